"""Models whose experts unpack their weights one by one, on the device: fused as they are held, values and gradients."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import moefuse
from tests.programs import packed
from tests.programs.packed import SPELLINGS, Gated
from tests.programs.packed_adapters import Beside
from tests.programs.packed_forms import H

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]  # torch's advice about precision


@pytest.mark.parametrize("hit", [False, True], ids=["each", "hit"])
@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s not in ("floats", "levels", "words")])
def test_a_layer(spelling: str, hit: bool) -> None:
    """("levels" and "words" make their tables on the CPU.)"""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gated(spelling, hit=hit).cuda()
    compiled = torch.compile(deepcopy(model), backend="moefuse", dynamic=False)
    x = torch.randn(2, packed.H, device="cuda")
    found = []
    for run in (compiled, model.double()):
        given = x.detach().to(torch.float64 if run is model else torch.float32).requires_grad_()
        out = run(given)
        found.append((out.double(), torch.autograd.grad(out.square().sum(), given)[0].double()))
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 2e-3 * float(theirs.abs().max())
    report = moefuse.last_report()
    assert report is not None
    assert [f.spec.encoding != "" for f in report.fused] == [True], str(report)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "inference"])
@pytest.mark.parametrize("held", ["nibbles", "channel", "block"])
def test_adapters(held: str, trained: bool) -> None:
    """QLoRA: values, and gradients of tokens, router and factors, of a base that is read as it is held, against float64."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Beside(held, whole=False).cuda()
    compiled = torch.compile(deepcopy(model), backend="moefuse", dynamic=False)
    exact = deepcopy(model).double()
    exact.dtype = torch.float64
    x, found = torch.randn(9, H, device="cuda"), []
    for run, owner in ((compiled, compiled._orig_mod), (exact, exact)):
        given = x.to(torch.float64 if run is exact else torch.float32).requires_grad_(trained)
        with torch.set_grad_enabled(trained):
            out = run(given)
        values = [out]
        if trained:
            wanted = [p for p in owner.parameters() if p.requires_grad]
            values += torch.autograd.grad(out.square().sum(), (given, *wanted))
        found.append([v.double() for v in values])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 2e-3 * float(theirs.abs().max())
    report = moefuse.last_report()
    assert report is not None
    assert [f.spec.encoding != "" for f in report.fused] == [True], str(report)
