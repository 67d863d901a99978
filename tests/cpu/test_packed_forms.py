"""Stacks in few bits that a program unpacks as a whole, or for the slots that chose them: nothing the size of a stack is left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.config import Options
from moefuse.errors import ParallelError
from moefuse.parallel import units
from moefuse.passes.match import encodings, whole_stacks
from tests.cpu.test_packed_fused import Compiled
from tests.programs.packed_forms import GATHERED, HELD, WHOLE, WIDE, Domain, E, Form, H, K


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slots there are: a CPU has its own bounds."""
    monkeypatch.setattr(whole_stacks, "READ", {"cpu": float("inf")})
    monkeypatch.setattr(whole_stacks, "BY_SLOT", {})
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))
    torch.manual_seed(0)


def _as_held(compiled: Compiled) -> None:
    assert [f.spec.encoding != "" for f in compiled.report.fused] == [True], str(compiled.report)
    assert (len(compiled.ops), compiled.report.notes) == (1, [])
    (gm,) = compiled.graphs
    gm.graph.eliminate_dead_code()
    sizes = [n.meta["example_value"].numel() for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), Tensor)]
    held = [n.meta["example_value"].numel() for n in gm.graph.find_nodes(op="placeholder")]
    assert max(sizes) == max(held), "something as large as all weights is made"


FORMS: list[tuple[str, Domain, bool]] = [
    *((held, domain, True) for held in HELD for domain in WHOLE),
    *((held, domain, False) for held in HELD for domain in (*GATHERED, "loop")),
]
"""How weights are held, the rows, and whether stacks are unpacked as a whole, or what slots choose, or each expert in turn."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("held", "domain", "whole"), FORMS)
def test_nothing_is_unpacked(held: str, domain: Domain, whole: bool) -> None:
    """The op has the stacks, and the ids; no weight of a slot is made. (With as many slots as experts, so that a loop is read, too.)"""
    compiled = Compiled(Form(held, domain, whole=whole))
    compiled.check(torch.randn(9, H))
    _as_held(compiled)


@pytest.mark.parametrize(("major", "most"), [(8, 64.0), (9, 1024.0), (10, 64.0)])
def test_how_many_rows_depends_on_the_device(major: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that multiply many rows as quickly as unpacked weights are Hopper's alone."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert whole_stacks.most_slots(torch.device("cuda", 0)) == most
    assert whole_stacks.most_slots(torch.device("cpu")) == 0.5
    assert whole_stacks.most_slots(torch.device("meta")) == 0.0


EQUAL: list[tuple[str, str, Domain]] = [
    ("block", "codes and scales", "loop"),
    ("block", "one number", "slots"),
    ("channel", "one number", "slots"),
    ("nibbles", "codes and scales", "slots"),
    ("levels", "one number", "slots"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("held", "equal", "domain"), EQUAL)
def test_experts_that_are_equal(held: str, equal: str, domain: Domain) -> None:
    """As from one dense layer, or fresh: verification moves codes then, which float8 has no arithmetic for."""
    model = Form(held, domain, whole=False)
    for part in model.gate.parts:
        part.data.copy_((part[:1] if equal == "codes and scales" else part[:1, :1, :1]).clone())
    compiled = Compiled(model)
    compiled.check(torch.randn(9, H))
    _as_held(compiled)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, whole: bool) -> None:
    """One token, and what is left of the program where there is none: of what slots choose nothing."""
    compiled = Compiled(Form("nibbles", "slots", whole=whole))
    compiled.check(torch.randn(tokens, H))
    assert len(compiled.ops) == (1 if whole else tokens)


@pytest.mark.parametrize(("tokens", "ops"), [(2, 1), (3, 0)])
def test_on_a_cpu_only_for_few_slots(monkeypatch: pytest.MonkeyPatch, tokens: int, ops: int) -> None:
    """With more it would be slower than to unpack all at once."""
    monkeypatch.undo()
    compiled = Compiled(Form("channel", "dense", whole=True))
    compiled.check(torch.randn(tokens, H))
    assert (len(compiled.report.fused), len(compiled.ops)) == (1, ops)


@pytest.mark.parametrize(("tokens", "fused"), [(32, 0), (33, 1)])
def test_what_is_unpacked_as_it_is_multiplied_stays_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tokens: int, fused: int) -> None:
    """Fused, all of the stack would be made: for a token that took 70 times as long as what Inductor makes of it."""
    monkeypatch.undo()
    compiled = Compiled(Form("channel", "slots", whole=True))
    compiled.check(torch.randn(tokens, H))
    assert len(compiled.report.fused) == fused
    assert fused or "unpacks as it multiplies" in compiled.report.skipped[0].message


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("held", HELD)
def test_one_stack_both_ways_round(held: str) -> None:
    """A weight that is read twice is each time what it is there."""
    compiled = Compiled(Tied(held, "slots", whole=True))
    compiled.check(torch.randn(9, H))
    assert [f.spec.encoding != "" for f in compiled.report.fused] == [True], str(compiled.report)


def test_any_number_of_tokens() -> None:
    """One graph for all of them."""
    compiled = Compiled(Form("block", "slots", whole=False), dynamic=True)
    for tokens in (3, 7, 12):
        compiled.check(torch.randn(tokens, H))
    assert (len(compiled.graphs), len(compiled.ops)) == (1, 1)


class Spelled(Form):
    """One statement off, in what takes the parts of the first projection."""

    def __init__(self, how: str) -> None:
        super().__init__("channel", "slots", whole=False)
        self.how = how

    def taken(self, ids: Tensor) -> Tensor:
        codes, scale = self.gate.parts
        match self.how:
            case "flipped":
                return codes[ids].float() * scale[ids.flip(1)]
            case "turned":
                return (codes[ids].float() * scale[ids]).flip(1)
            case "next":
                return codes[ids].float() * scale[(ids + 1) % E]
            case "flat":
                return (codes[ids.flatten()].float() * scale[ids.flatten()]).view(-1, K, WIDE, H)
            case "mixed":
                return codes[ids].float() * scale.index_select(0, ids.reshape(-1)).view(-1, K, WIDE, 1)
            case "int32":
                return codes[ids.int()].float() * scale[ids]
            case "one scale":
                return codes[ids].float() * scale[0]
        return (codes[ids].float() * scale[ids]).clamp(-0.5, 0.5)

    def weights(self) -> list[Callable[[int | Tensor], Tensor]]:
        return [self.taken, self.up.of, self.down.of]  # type: ignore[list-item]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["flat", "mixed", "int32", "one scale"])
def test_spellings_of_what_slots_choose(how: str) -> None:
    compiled = Compiled(Spelled(how))
    compiled.check(torch.randn(9, H))
    _as_held(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["flipped", "turned", "next", "clamped"])
def test_near_misses_of_what_slots_choose(how: str) -> None:
    """No stack has such weights: the program stays as it is, and that is told."""
    compiled = Compiled(Spelled(how))
    compiled.check(torch.randn(9, H))
    assert not compiled.ops
    assert not [n for gm in compiled.graphs for n in gm.graph.nodes if n.target is torch.ops.moefuse.unpacked.default]
    assert {s.code for s in compiled.report.skipped} == {"encoding-unknown"}, str(compiled.report)


class Escaping(Form):
    """An expert's rows are read elsewhere, too."""

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        self.loss = gate.square().mean()
        return super().between(gate, up)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.loss


def test_a_refused_layer_is_left_as_it_was() -> None:
    """Every operation of the program is there again."""
    compiled = Compiled(Escaping("nibbles", "slots", whole=False))
    before = Compiled(Escaping("nibbles", "slots", whole=False), options=Options(quantised="off"))
    x = torch.randn(9, H)
    compiled.check(x)
    torch._dynamo.reset()
    before.check(x)
    assert not compiled.report.fused
    assert [s.code for s in compiled.report.skipped] == ["value-escapes"], str(compiled.report)
    ours, theirs = ([(n.op, str(n.target)) for n in gm.graph.nodes] for gm in (compiled.graphs[0], before.graphs[0]))
    assert ours == theirs


def test_gradients_through_what_slots_choose() -> None:
    """Tokens and the router have the gradients that they have in the program."""
    model = Form("nibbles", "slots", whole=False)
    compiled = Compiled(model)
    compiled.check_gradients(torch.randn(5, H), model.router.weight)
    assert len(compiled.ops) == 1


def test_no_slices_of_what_is_held() -> None:
    """``experts="tp"`` says why there is none. (It said that there were no experts.)"""
    site: Any = SimpleNamespace(layer="", name="experts", widths=(H,))
    with pytest.raises(ParallelError, match="a weight is computed, and no view of a Parameter; use experts='ep'"):
        units.cuts_of(Form("nibbles", "slots", whole=False), site, 2)


class Between(Form):
    """What no activation of the op computes: the experts are products around the user's own operations."""

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.cos(gate) * up + gate.sigmoid()


GROUPED = torch.ops.moefuse.grouped_linear_coded.default


@pytest.mark.sampled(4)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("domain", ["loop", "slots", "sorted"])
def test_bodies_of_the_users_own(held: str, domain: Domain) -> None:
    """Each projection by itself, as it is held; gradients go through."""
    model = Between(held, domain, whole=domain == "loop")
    compiled = Compiled(model)
    compiled.check_gradients(torch.randn(9, H), model.router.weight)
    assert [(f.tier, f.spec.encoding != "") for f in compiled.report.fused] == [("grouped", True)], str(compiled.report)
    (gm,) = compiled.graphs
    assert len(gm.graph.find_nodes(op="call_function", target=GROUPED)) == 3
