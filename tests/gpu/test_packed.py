"""Models whose experts unpack their weights one by one, on the device: fused as they are held, values and gradients."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import moefuse
from tests.programs import packed
from tests.programs.packed import SPELLINGS, Gated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]  # torch's advice about precision


@pytest.mark.parametrize("hit", [False, True], ids=["each", "hit"])
@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s not in ("floats", "levels", "words")])
def test_a_layer(spelling: str, hit: bool) -> None:
    """("levels" and "words" make their tables on the CPU.)"""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gated(spelling, hit=hit).cuda()
    compiled = torch.compile(deepcopy(model), backend="moefuse", dynamic=False)
    x = torch.randn(3, packed.H, device="cuda")
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
