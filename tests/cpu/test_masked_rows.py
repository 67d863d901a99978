"""Experts that see every token, of whose rows ``where`` or ``masked_fill`` takes those that chose them: fused whole, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.config import Options
from tests.cpu.test_packed_fused import Compiled
from tests.strategies import THOROUGH

E, H, WIDE, K = 4, 8, 12, 2


@dataclass
class At:
    """One expert's turn: what was summed, its rows, those with their routing weight, and which tokens chose it [T, 1]."""

    out: Tensor
    y: Tensor
    z: Tensor
    hit: Tensor
    next_hit: Tensor
    first: Tensor
    x: Tensor
    read: list[Tensor]


class Layer(nn.Module):
    """``step`` adds one expert; with ``ids`` from outside nothing is known of them. ``twice``: there is an expert that has two turns."""

    def __init__(
        self, step: Callable[[At], Tensor], *, packed: bool = False, base: bool = False, top_k: int = K, twice: bool = False
    ) -> None:
        super().__init__()
        self.step, self.packed, self.base, self.router = step, packed, base, nn.Linear(H, E, bias=False)
        self.top_k, self.turns = top_k, [*range(E), *([0] if twice else [])]
        self.w1, self.w2 = nn.Parameter(torch.randn(E, WIDE, H)), nn.Parameter(torch.randn(E, H, WIDE))
        codes = (torch.randint(-127, 127, (E, n, k), dtype=torch.int8) for n, k in ((WIDE, H), (H, WIDE)))
        self.codes = nn.ParameterList(nn.Parameter(c, requires_grad=False) for c in codes)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(E, n, 1) / 99, requires_grad=False) for n in (WIDE, H))

    def expert(self, e: int, x: Tensor) -> Tensor:
        w1, w2 = (c[e].float() * s[e] for c, s in zip(self.codes, self.scales, strict=True)) if self.packed else (self.w1[e], self.w2[e])
        return F.linear(F.silu(F.linear(x, w1)), w2)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1) if ids is None else (scores.gather(1, ids), ids)
        out, read = x * 2 if self.base else torch.zeros_like(x), []
        for e in self.turns:
            y = self.expert(e, x)
            hit, next_hit = ((ids == i).any(-1, keepdim=True) for i in (e, (e + 1) % E))
            z = y * (weights * (ids == e)).sum(-1, keepdim=True)
            out = self.step(At(out, y, z, hit, next_hit, ids[:, :1] == e, x, read))
        return out + sum(r.sum() for r in read) if read else out


READ: dict[str, Callable[[At], Tensor]] = {
    "where": lambda a: a.out + torch.where(a.hit, a.z, 0.0),
    "where, the other way round": lambda a: torch.where(~a.hit, torch.zeros_like(a.z), a.z) + a.out,
    "masked_fill": lambda a: a.out + a.z.masked_fill(~a.hit, 0.0),
    "chain": lambda a: torch.where(a.hit, a.out + a.z, a.out),
    "chain, the other way round": lambda a: torch.where(~a.hit, a.out, a.z + a.out),
}
UNWEIGHTED: dict[str, Callable[[At], Tensor]] = {
    "where": lambda a: a.out + torch.where(a.hit, a.y, 0.0),
    "masked_fill": lambda a: a.out + a.y.masked_fill(~a.hit, 0.0),
    "chain": lambda a: torch.where(a.hit, a.out + a.y, a.out),
}


def _compiled(layer: Layer, *given: Tensor) -> Compiled:
    """Compiled without a look at what comes out: the rules alone decide."""
    compiled = Compiled(layer, options=Options(verify="off"), dynamic=False)
    with torch.no_grad():
        for tokens in (5, 1, 0) if THOROUGH else (5, 1):
            x, rest = torch.randn(tokens, H), [g[:tokens] for g in given]
            torch.testing.assert_close(compiled.run(x, *rest), layer(x, *rest), rtol=1e-4, atol=1e-4)
    return compiled


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("outside", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("how", READ)
def test_read(how: str, outside: bool, packed: bool) -> None:
    """One layer of all experts, and nothing said beside it, wherever the ids are from. (A chain was one expert, and a refusal.)"""
    ids = [torch.randint(E, (5, K))] if outside else []
    compiled = _compiled(Layer(READ[how], packed=packed, base=how.startswith("chain")), *ids)
    assert {f.spec.num_experts for f in compiled.report.fused} == {E}, str(compiled.report)
    assert not compiled.report.skipped, str(compiled.report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("outside", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("how", UNWEIGHTED)
def test_rows_without_a_weight(how: str, outside: bool) -> None:
    """An id that a token has twice counts once here, so that ids from outside are refused, and not in silence."""
    compiled = _compiled(Layer(UNWEIGHTED[how]), *([torch.randint(E, (5, K))] if outside else []))
    assert (not compiled.report.fused) == outside, str(compiled.report)
    assert {s.code for s in compiled.report.skipped} == ({"ids-not-distinct"} if outside else set()), str(compiled.report)


ONE: dict[str, Callable[[At], Tensor]] = {
    "where": lambda a: a.out + torch.where(a.first, a.z, 0.0),
    "where, without a weight": lambda a: a.out + torch.where(a.first, a.y, 0.0),
    "chain": lambda a: torch.where(a.first, a.out + a.z, a.out),
    "the last one stays": lambda a: torch.where(a.first, a.z, a.out),
    "the last one stays, without a weight": lambda a: torch.where(a.hit, a.y, a.out),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("outside", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("how", ONE)
def test_one_expert_for_a_token(how: str, outside: bool) -> None:
    """Its mask may be that of its only slot, [T, 1], and what it replaces is zero."""
    compiled = _compiled(Layer(ONE[how], top_k=1), *([torch.randint(E, (5, 1))] if outside else []))
    assert {f.spec.num_experts for f in compiled.report.fused} == {E}, str(compiled.report)
    assert not compiled.report.skipped, str(compiled.report)


@pytest.mark.parametrize("other", [{"base": True}, {"twice": True}], ids=["onto something", "two turns"])
def test_what_is_replaced_is_no_zero(other: dict[str, bool]) -> None:
    """The rows would be added to it. (What stands before an expert's second turn is a whole layer.)"""
    compiled = _compiled(Layer(ONE["the last one stays"], top_k=1, **other))
    assert bool(compiled.report.fused) is ("twice" in other), str(compiled.report)
    assert {s.code for s in compiled.report.skipped} == {"no-rule"}, str(compiled.report)


def _read_beside(a: At) -> Tensor:
    a.read.append(a.out + a.z)
    return torch.where(a.hit, a.read[-1], a.out)


def _written_between(a: At) -> Tensor:
    more = a.out + a.z
    a.out.mul_(2)
    return torch.where(a.hit, more, a.out)


NEAR: dict[str, tuple[Callable[[At], Tensor], str]] = {
    "another expert's mask": (lambda a: a.out + torch.where(a.next_hit, a.z, 0.0), "experts-differ"),
    "those that did not choose it": (lambda a: a.out + torch.where(a.hit, 0.0, a.z), "no-rule"),
    "filled where it was chosen": (lambda a: a.out + a.y.masked_fill(a.hit, 0.0), "not-combined"),
    "ones elsewhere": (lambda a: a.out + torch.where(a.hit, a.y, 1.0), "not-combined"),
    "one slot of two": (lambda a: a.out + torch.where(a.first, a.z, 0.0), "experts-differ"),
    "the last of two stays": (lambda a: torch.where(a.hit, a.y, a.out), "no-rule"),
    "chain of those that did not": (lambda a: torch.where(a.hit, a.out, a.out + a.z), "sum-changed"),
    "chain that forgets": (lambda a: torch.where(a.hit, a.out + a.z, a.x), "sum-changed"),
    "chain of another expert's mask": (lambda a: torch.where(a.next_hit, a.out + a.z, a.out), "experts-differ"),
    "chain that subtracts": (lambda a: torch.where(a.hit, a.out - a.z, a.out), "not-combined"),
    "chain of twice": (lambda a: torch.where(a.hit, torch.add(a.out, a.z, alpha=2), a.out), "not-combined"),
    "chain in place": (lambda a: torch.where(a.hit, a.out.add_(a.z), a.out), "sum-changed"),
    "chain with a write between": (_written_between, "sum-changed"),
    "chain that is read beside": (_read_beside, "value-escapes"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", NEAR)
def test_near_misses(how: str) -> None:
    step, code = NEAR[how]
    compiled = _compiled(Layer(step))
    assert not compiled.report.fused, str(compiled.report)
    assert code in {s.code for s in compiled.report.skipped}, str(compiled.report)


def test_nothing_added_to_a_sum() -> None:
    """``sum + 0`` is the sum: it was a second layer of the same experts."""

    class More(Layer):
        def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
            return super().forward(x, ids) + 0

    compiled = Compiled(More(lambda a: a.out + a.z))
    compiled.check(torch.randn(5, H))
    assert (len(compiled.report.fused), compiled.report.skipped) == (1, []), str(compiled.report)


def test_gradients() -> None:
    """Of a chain: to the tokens, the router and the weights."""
    layer = Layer(READ["chain"], base=True)
    compiled = Compiled(layer)
    compiled.check_gradients(torch.randn(5, H), layer.router.weight, layer.w1, layer.w2)
    assert len(compiled.report.fused) == 1, str(compiled.report)


class Distributions(Layer):
    """Experts that give logarithms of probabilities, over their features or (which mixes rows) over the tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__(lambda a: a.out + a.z)
        self.dim = dim

    def expert(self, e: int, x: Tensor) -> Tensor:
        return F.log_softmax(super().expert(e, x), dim=self.dim)


@pytest.mark.parametrize(("dim", "fused"), [(-1, True), (0, False)])
def test_logarithms_of_probabilities(dim: int, fused: bool) -> None:
    layer = Distributions(dim)
    compiled = Compiled(layer)
    compiled.check(torch.randn(5, H))
    compiled.check_gradients(torch.randn(5, H), layer.router.weight, layer.w1, layer.w2)
    assert bool(compiled.report.fused) == fused, str(compiled.report)
