"""What a fused call on quantised experts takes besides their storage: activations and one expert, in forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefuse.capture import entry
from moefuse.config import Options
from moefuse.passes.match import encodings, whole_stacks
from moefuse.pipeline import rewrite
from tests.cpu.peak_memory import peak
from tests.programs.packed_adapters import Adapted, Beside
from tests.programs.packed_forms import Domain, E, Form, H, Packed

WIDE = 1024
EXPERT = WIDE * H * 4
"""Bytes of an unpacked projection of one expert."""


class Large(Form):
    """Experts that are larger than what a few tokens make of them."""

    def __init__(self, domain: Domain, *, whole: bool, own: bool = False) -> None:
        super().__init__("nibbles", domain, whole=whole)
        self.gate, self.up, self.down, self.own = (*(Packed("nibbles", n, k) for n, k in ((WIDE, H), (WIDE, H), (H, WIDE))), own)

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.cos(gate) * up if self.own else super().between(gate, up)


class LargeAdapted(Beside):
    def __init__(self) -> None:
        super().__init__("nibbles", whole=False)
        self.bases = nn.ModuleList(Packed("nibbles", n, k) for n, k in ((WIDE, H), (WIDE, H), (H, WIDE)))
        for which, (n, k) in enumerate(((WIDE, H), (WIDE, H), (H, WIDE))):
            self.a[which] = nn.ParameterList(torch.randn(4, k) / 4 for _ in range(E))
            self.b[which] = nn.ParameterList(torch.randn(n, 4) / 4 for _ in range(E))


FORMS: dict[str, Any] = {
    "whole": lambda: Large("loop", whole=True),
    "gathered": lambda: Large("slots", whole=False),
    "each": lambda: Large("loop", whole=False),
    "body of one's own": lambda: Large("sorted", whole=False, own=True),
    "adapters": LargeAdapted,
}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_stacks, "READ", {"cpu": float("inf")})
    monkeypatch.setattr(whole_stacks, "BY_SLOT", {})
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))
    torch.manual_seed(0)


def peak_of(model: Form | Adapted, x: Tensor, *, fused: bool) -> int:
    """Bytes alive at the most of what a step makes: forward, and the gradients of tokens and of all that is trained."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        report = rewrite.rewrite(gm, inputs, Options(), entry.frame()) if fused else None
        assert report is None or [f.spec.encoding != "" for f in report.fused] == [True], str(report)
        if fused:
            gm.graph.eliminate_dead_code()  # as every compiler behind does
            gm.recompile()
        found.append((gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    ((gm, inputs),) = found
    trained = [t for t in (*inputs, *model.parameters()) if isinstance(t, Tensor) and t.requires_grad]

    def step() -> None:
        (out,) = gm(*inputs)
        torch.autograd.grad(out.square().sum(), list({id(t): t for t in trained}.values()), allow_unused=True)

    step()
    return peak(step)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_activations_and_one_expert(form: str) -> None:
    """Unpacking one expert takes what comes out and its steps; the program's own call takes more than a whole stack."""
    model, x = FORMS[form](), torch.randn(2, H, requires_grad=True)
    activations = 12 * 2 * 2 * WIDE * 4
    factors = 3 * sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    bound = activations + factors + 4 * EXPERT
    assert peak_of(model, x, fused=True) <= bound < E * EXPERT + factors
    assert form == "each" or peak_of(model, x, fused=False) > bound


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("form", FORMS)
def test_no_more_than_without_moefuse(form: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bounds that a CPU has: a loop over all experts was fused with all of them unpacked from as many slots as experts on."""
    monkeypatch.undo()
    model, x, found = FORMS[form](), torch.randn(tokens, H), list[int]()

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(peak(lambda: gm(*inputs)))
        rewrite.rewrite(gm, inputs, Options(), entry.frame())
        gm.graph.eliminate_dead_code()
        gm.recompile()
        found.append(peak(lambda: gm(*inputs)))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    before, after = found
    assert after <= before + 2 * EXPERT
