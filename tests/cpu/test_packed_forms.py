"""Stacks in few bits that a program unpacks as a whole, or for the slots that chose them: nothing the size of a stack is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moefuse.passes.match import whole_stacks
from tests.cpu.test_packed_fused import Compiled
from tests.programs.packed_forms import HELD, WHOLE, Domain, E, Form, H


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slots there are: a CPU has its own bounds."""
    monkeypatch.setattr(whole_stacks, "READ", {"cpu": 0})
    torch.manual_seed(0)


def _as_held(compiled: Compiled) -> None:
    assert [f.spec.encoding != "" for f in compiled.report.fused] == [True], str(compiled.report)
    assert (len(compiled.ops), compiled.report.notes) == (1, [])
    (gm,) = compiled.graphs
    gm.graph.eliminate_dead_code()
    sizes = [n.meta["example_value"].numel() for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), Tensor)]
    held = [n.meta["example_value"].numel() for n in gm.graph.find_nodes(op="placeholder")]
    assert max(sizes) == max(held), "something as large as all weights is made"


@pytest.mark.parametrize("domain", WHOLE)
@pytest.mark.parametrize("held", HELD)
def test_a_stack_is_not_unpacked(held: str, domain: Domain) -> None:
    compiled = Compiled(Form(held, domain, whole=True))
    compiled.check(torch.randn(9, H))
    _as_held(compiled)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    compiled = Compiled(Form("nibbles", "slots", whole=True))
    compiled.check(torch.randn(tokens, H))
    assert len(compiled.ops) == 1


def test_loops_that_run_every_expert() -> None:
    """As many slots as experts: what the program unpacks is right to read, and so is what it holds."""
    compiled = Compiled(Form("nibbles", "loop", whole=False))
    compiled.check(torch.randn(9, H))
    _as_held(compiled)


@pytest.mark.parametrize(("tokens", "ops"), [(2, 1), (3, 0)])
def test_on_a_cpu_only_for_few_slots(monkeypatch: pytest.MonkeyPatch, tokens: int, ops: int) -> None:
    """With more it would be slower than to unpack all at once."""
    monkeypatch.undo()
    compiled = Compiled(Form("channel", "slots", whole=True))
    compiled.check(torch.randn(tokens, H))
    assert (len(compiled.report.fused), len(compiled.ops)) == (1, ops)


class Other(Form):
    """What is unpacked is read by someone else too, or is no encoding."""

    def __init__(self, how: str) -> None:
        super().__init__("channel", "slots", whole=True)
        self.how, self.read = how, torch.zeros(())

    def weights(self) -> list[Callable[[int | Tensor], Tensor]]:
        gate, *others = (p.whole() for p in (self.gate, self.up, self.down))
        if self.how == "clamped":
            gate = gate.clamp(-0.5, 0.5)
        if self.how == "read":
            self.read = gate.sum()
        return [w.__getitem__ for w in (gate, *others)]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.read if self.how == "read" else out


@pytest.mark.parametrize(("how", "why"), [("read", "they are read at"), ("clamped", "`clamp` ")])
def test_what_has_to_be_unpacked_stays(how: str, why: str) -> None:
    """Fused as before, with the other projections as they are held, and told."""
    compiled = Compiled(Other(how))
    compiled.check(torch.randn(E, H))
    assert len(compiled.report.fused) == 1, str(compiled.report)
    (note,) = compiled.report.notes
    assert "unpacked as a whole in each call" in note
    assert why in note


class Tied(Form):
    """One square matrix, the second time the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        self.domain = "slots"
        weights, ids = torch.topk(self.router(x).softmax(-1), 2, dim=-1)
        w = self.gate.whole()[ids]
        y = torch.einsum("tko,tkoh->tkh", torch.einsum("th,tkoh->tko", x, w).relu(), w)
        return (y * weights[..., None]).sum(1)


@pytest.mark.parametrize("held", HELD)
def test_one_stack_both_ways_round(held: str) -> None:
    """A weight that is read twice is each time what it is there."""
    compiled = Compiled(Tied(held, "slots", whole=True))
    compiled.check(torch.randn(9, H))
    assert [f.spec.encoding != "" for f in compiled.report.fused] == [True], str(compiled.report)
