"""Sums of expert weights and low-rank terms, in the ways that people write them: none is made, or the report says which and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.cpu.sums_case import INNER, E, H, K, Layer, Listed, R, Spelling, T, checked
from tests.strategies import FEW, PHASES

S = 1.5
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _in_place(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    total = w.clone()
    total += S * (b @ a)
    total.sub_(b @ a, alpha=0.5)
    return total


def _copied(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    return torch.empty_like(w).copy_(w).baddbmm_(b, a, alpha=S)


def _without_gradients(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    with torch.no_grad():
        delta = S * (b @ a)
    return w + delta


APART: dict[str, Spelling] = {
    "alpha": lambda w, b, a, s: torch.add(w, b @ a, alpha=S),
    "baddbmm": lambda w, b, a, s: torch.baddbmm(w, b, a, alpha=S),
    "bmm first": lambda w, b, a, s: torch.bmm(b, a) * S + w,
    "einsum": lambda w, b, a, s: w + torch.einsum("eor,eri->eoi", b, a) * S,
    "einsum, swapped": lambda w, b, a, s: w + torch.einsum("eri,eor->eoi", a, b) * S,
    "turned": lambda w, b, a, s: (w.transpose(1, 2) + S * (a.transpose(1, 2) @ b.transpose(1, 2))).transpose(1, 2),
    "in float64": lambda w, b, a, s: (w.double() + S * (b.double() @ a.double())).to(w.dtype),
    "names of arguments": lambda w, b, a, s: torch.add(w, other=torch.matmul(b, other=a), alpha=S),
    "subtracted": lambda w, b, a, s: w - S * (b @ a),
    "from behind": lambda w, b, a, s: torch.rsub(b @ a, w, alpha=S),
    "divided": lambda w, b, a, s: w + -(b @ a) / S,
    "a factor is scaled": lambda w, b, a, s: w + (S * b) @ a,
    "in place": _in_place,
    "into a copy": _copied,
    "base detached": lambda w, b, a, s: w.detach() + S * (b @ a),
    "A detached": lambda w, b, a, s: w + S * (b @ a.detach()),
    "term detached": lambda w, b, a, s: w + (S * (b @ a)).detach(),
    "all detached": lambda w, b, a, s: (w + S * (b @ a)).detach(),
    "term without gradients": _without_gradients,
    "two terms": lambda w, b, a, s: w + S * (b @ a) + 0.5 * (b.sin() @ a.cos()),
    "a sum of terms": lambda w, b, a, s: w + 0.5 * sum([b @ a, -S * (b.sin() @ a)]),
    "scaled by a Parameter": lambda w, b, a, s: w + s * (b @ a),
    "experts last": lambda w, b, a, s: w + S * torch.einsum("ore,eri->eoi", b.permute(1, 2, 0), a),
    "experts between": lambda w, b, a, s: w + S * torch.einsum("oer,rei->eoi", b.permute(1, 0, 2), a.permute(1, 0, 2)),
    "experts last, turned": lambda w, b, a, s: w + S * torch.einsum("roe,eri->eoi", b.permute(1, 2, 0).transpose(0, 1), a),
    "experts last, two terms": lambda w, b, a, s: w + (torch.einsum("ore,eri->eoi", b.permute(1, 2, 0), a) + 0.5 * (b.sin() @ a)),
    "other experts' terms": lambda w, b, a, s: w + S * (b.flip(0) @ a),
    "scaled by the weight": lambda w, b, a, s: w + w.square().mean() * (b @ a),
    "one A for all": lambda w, b, a, s: w + S * (b @ a[0]),
    "expert by expert": lambda w, b, a, s: torch.stack([w[e] + S * b[e] @ a[e] for e in range(E)]),
    "addmm of each": lambda w, b, a, s: torch.stack([torch.addmm(w[e], b[e], a[e], alpha=S) for e in range(E)]),
}


@pytest.mark.every_value
@pytest.mark.parametrize("dense", [pytest.param(False, id="loop"), pytest.param(True, id="dense")])
@pytest.mark.parametrize("name", APART)
def test_taken_apart(name: str, dense: bool) -> None:
    """Nothing of a weight's size is kept, and where gradients end they end."""
    found = checked(Layer(APART[name], dense))
    assert set(found.ranks) == {R}
    assert (found.large, found.report.notes, found.report.skipped) == ([], [], [])


WHICH = [pytest.param(which, id=f"of {which}") for which in ((0, 1, 2), (1, 2), (0, 2), (0,), (2,))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", WHICH)
def test_adapters_of_some_experts(which: tuple[int, ...]) -> None:
    """Whether the first has one or not: the others have zeros in their place, which nobody else sees."""
    found = checked(Listed(APART["alpha"], which, (1,)))
    assert (found.ranks, found.large, found.report.notes, found.report.skipped) == ((R,), [], [], [])
    found = checked(Layer(lambda w, b, a, s: torch.stack([w[e] + S * b[e] @ a[e] if e in which else w[e] for e in range(E)])))
    assert (found.ranks, found.large, found.report.notes) == ((R,), [], [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", WHICH)
def test_adapters_of_some_rows(which: tuple[int, ...]) -> None:
    """Rows of stacks, to some of which a term is added; and where what is added is no term, they are sums that are made."""

    class Rows(Layer):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x).softmax(-1).topk(K)
            out = torch.zeros_like(x)
            for e in range(E):
                token, slot = torch.where(ids == e)
                first, last = self.w_in[e], self.w_out[e].T
                if e in which:
                    first = self.spelling(first, self.b_in[e], self.a_in[e], self.scale)
                    last = self.spelling(last.T, self.b_out[e], self.a_out[e], self.scale).T
                out.index_add_(0, token, F.silu(x[token] @ first.T) @ last * weights[token, slot, None])
            return out

    found = checked(Rows(APART["alpha"]))
    assert (found.ranks, found.large, found.report.notes) == ((R,), [], [])
    found = checked(Rows(lambda w, b, a, s: torch.lerp(w, b @ a, 0.5)))
    assert found.ranks == ()
    assert len(found.large) == 2 * len(which)
    assert [_memory(2 * len(which)) in note for note in found.report.notes] == [True]


def test_experts_with_other_adapters() -> None:
    """One has a term and begins with it, one has two, one has none."""

    class Mixed(Listed):
        def __init__(self) -> None:
            super().__init__(self.unlike, (0, 1))

        def unlike(self, w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
            return b @ a + w if w is self.w_in[0] else w + b @ a + 0.5 * (b.sin() @ a.cos())

    found = checked(Mixed())
    assert (found.ranks, found.large, found.report.notes) == ((R,), [], [])


def _memory(sums: int) -> str:
    return f"is made in each call ({sums * H * INNER * 4 / 2**20:.2g} MiB) at "


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", WHICH)
def test_sums_of_some_experts_are_told(which: tuple[int, ...]) -> None:
    """The note does not hang on the first expert, and says how much all of them are together, on both projections."""
    found = checked(Listed(lambda w, b, a, s: torch.lerp(w, b @ a, 0.5), which, (2,)))
    (note,) = found.report.notes
    assert found.ranks == ()
    assert len(found.large) == len(which) + 1
    assert _memory(len(which) + 1) in note
    assert "test_lora_sums.py:" in note
    assert note.endswith("kept for the gradients in training: `lerp` computes it")


def _one_apart(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    return w.detach() + b @ a if len(a) == R - 1 else w + b @ a


@pytest.mark.parametrize(
    ("layer", "sums", "why"),
    [
        pytest.param(lambda: Listed(APART["alpha"], (1, 2), ranks=(R, R, 2)), 2, "adapters of several ranks, 2 and 4", id="ranks"),
        pytest.param(lambda: Listed(lambda w, b, a, s: b.sum() * (b @ a), (2,)), 0, "", id="no sum"),
        pytest.param(lambda: Listed(lambda w, b, a, s: w + len(a) * (b @ a), (1, 2), ranks=(R, R, 2)), 2, "several scales", id="scales"),
        pytest.param(lambda: Listed(_one_apart, (0, 2), ranks=(R, R, R - 1)), 2, "gradients end at some experts", id="one is detached"),
    ],
)
def test_unlike_adapters_are_told(layer: Callable[[], Listed], sums: int, why: str) -> None:
    found = checked(layer())
    assert found.ranks == ()
    assert len(found.report.notes) == bool(sums)
    assert all(_memory(sums) in note and why in note for note in found.report.notes)


def test_another_reader_of_one_expert_s_sum_is_told() -> None:
    """It is not the first, and it is the only one that is made."""

    class Penalised(Listed):
        def forward(self, x: Tensor) -> Tensor:
            total = self.w_in[2] + self.b_in[2] @ self.a_in[2]
            self.spelling = lambda w, b, a, s: total if w is self.w_in[2] else w + b @ a
            return super().forward(x) + total.square().mean()

    found = checked(Penalised(APART["alpha"], (1, 2)))
    (note,) = found.report.notes
    assert found.ranks == (R,)
    assert _memory(1) in note
    assert "it is read at" in note


def _partly(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    total = w.clone()
    total[:, :8] += S * (b @ a)[:, :8]
    return total


def _unseen(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    total, delta = w.clone(), S * (b @ a)
    with torch.no_grad():
        total.add_(delta)
    return total


MADE: dict[str, tuple[Spelling, str]] = {
    "beta": (lambda w, b, a, s: torch.baddbmm(w, b, a, alpha=S, beta=0.5), "the weight itself is scaled there"),
    "all scaled": (lambda w, b, a, s: S * (w + b @ a), "the weight itself is scaled there"),
    "twice": (lambda w, b, a, s: 2 * w + S * (b @ a), "the weight itself is scaled there"),
    "squared": (lambda w, b, a, s: w + (b @ a).square(), "`square` computes it"),
    "lerp": (lambda w, b, a, s: torch.lerp(w, b @ a, 0.5), "`lerp` computes it"),
    "a scale for each expert": (lambda w, b, a, s: w + b.mean((1, 2), keepdim=True) * (b @ a), "multiplied with a tensor"),
    "magnitude": (lambda w, b, a, s: (w + b @ a) / (w + b @ a).norm(dim=-1, keepdim=True), "divided by a tensor"),
    "one term for all": (lambda w, b, a, s: w + S * (b[0] @ a[0]), "all experts have one and the same term"),
    "partly": (_partly, "a part of it is written to"),
    "unseen by autograd": (_unseen, "written to without gradients"),
    "wide": (lambda w, b, a, s: w + torch.cat([b] * 3, 2) @ torch.cat([a] * 3, 1), "the ranks are more than half"),
    "two weights": (lambda w, b, a, s: w + w.flip(0).detach() + b @ a, "`flip` computes it"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_sum_that_is_made_is_told(name: str) -> None:
    """With the line, and the reason; the layer is fused on the sum."""
    spelling, why = MADE[name]
    found = checked(Layer(spelling))
    assert found.ranks == ()
    (note,) = {note.partition(" at ")[0] + note.partition(": ")[2] for note in found.report.notes} or {""}
    assert note.startswith("the sum of expert weights and their low-rank adapters is made in each call")
    assert why in note
    assert all("test_lora_sums.py:" in note for note in found.report.notes)


def test_many_rows_are_told() -> None:
    found = checked(Layer(APART["alpha"]), tokens=64)
    assert found.ranks == ()
    assert any("an expert has 42 rows on average" in note for note in found.report.notes)


def test_another_reader_is_told() -> None:
    """The experts do without the sum, and it is there all the same."""

    class Penalised(Layer):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.add(self.w_in, self.b_in @ self.a_in, alpha=S)
            self.spelling = lambda w, b, a, s: total if w is self.w_in else torch.add(w, b @ a, alpha=S)
            return super().forward(x) + total.square().mean()

    found = checked(Penalised(APART["alpha"]))
    assert found.ranks == (R,)
    assert len(found.report.notes) == 1
    assert "it is read at" in found.report.notes[0]


def test_a_hook_on_the_sum_is_told() -> None:
    """It would see another gradient: the sum stays."""

    def hooked(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
        total = w + S * (b @ a)
        total.register_hook(lambda grad: grad * 2)
        return total

    from tests.cpu.sums_case import Outcome

    found = Outcome(Layer(hooked), torch.randn(T, 24))
    assert found.ranks == ()
    assert all("a hook observes it" in note for note in found.report.notes)
    assert found.report.notes


Step = tuple[str, float]
NUMBERS = st.sampled_from((0.5, -1.25, 2.0))
STEPS = st.sampled_from(
    tuple("add,sub,alpha,baddbmm,in place,neg twice,detach term,clone,div,turn,float64,einsum,experts last,parameter".split(","))
)


def _experts_last(b: Tensor, a: Tensor) -> Tensor:
    return torch.einsum("rhe,ore->eoh", a.permute(1, 2, 0), b.permute(1, 2, 0))


SOME = st.none() | st.tuples(*[st.sets(st.integers(0, E - 1))] * 2)
"""Which experts have adapters on the first projection and on the last; None: all, in stacks."""


def spelled(steps: list[Step], detached: bool) -> Spelling:
    """A weight to which each step adds a term, or which it passes on as it is."""

    def build(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
        out = w.detach() if detached else w
        for step, number in steps:
            out = _one(step, number, out, b, a, s)
        return out

    return build


def _one(step: str, by: float, out: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
    made: dict[str, Any] = {
        "add": lambda: by * (b @ a) + out,
        "sub": lambda: out - torch.matmul(b, a) * by,
        "alpha": lambda: out.add(b @ a, alpha=by),
        "baddbmm": lambda: (torch.baddbmm if out.dim() == 3 else torch.addmm)(out, b, a, alpha=by),
        "in place": lambda: out.clone().sub_(b @ a, alpha=by),
        "neg twice": lambda: -(by * (b @ a) - out),
        "detach term": lambda: out + (by * (b @ a)).detach(),
        "clone": lambda: out.clone(memory_format=torch.contiguous_format),
        "div": lambda: out + (b @ a) / by,
        "turn": lambda: (out.mT + by * (a.mT @ b.mT)).transpose(-1, -2),
        "float64": lambda: (out.double() + by * (b.double() @ a.double())).to(out.dtype),
        "einsum": lambda: out + by * torch.einsum("erh,eor->eoh" if out.dim() == 3 else "rh,or->oh", a, b),
        "experts last": lambda: (
            out + by * (torch.einsum("rhe,ore->eoh", *(f.permute(1, 2, 0) for f in (a, b))) if out.dim() == 3 else b @ a)
        ),
        "parameter": lambda: out + s * (b @ a) * by,
    }
    found: Tensor = made[step]()
    return found


@settings(max_examples=4 if FEW == 3 else 100, phases=PHASES, deadline=None)
@given(st.lists(st.tuples(STEPS, NUMBERS), min_size=1, max_size=3), st.booleans(), st.booleans(), SOME)
def test_drawn_combinations(steps: list[Step], detached: bool, dense: bool, some: tuple[set[int], set[int]] | None) -> None:
    """Any chain of steps that adds terms of ranks that are small together is taken apart, or told, whichever experts have them."""
    spelling = spelled(steps, detached)
    found = checked(Layer(spelling, dense) if some is None else Listed(spelling, *some))
    terms = sum(step != "clone" for step, _ in steps)
    sums = 2 if some is None else sum(map(bool, some))
    # Some experts' weights are unlike the others' where gradients end in front of them, and where they are views of a turned sum.
    alike = some is None or all(len(which) in (0, E) for which in some) or not (detached or steps[-1][0] == "turn")
    if terms and alike and 2 * terms * R <= INNER:
        assert (found.ranks, found.large, found.report.notes) == ((R,) * bool(sums), [], [])
    elif terms and sums:
        assert found.report.notes or found.report.skipped


def test_one_of_two_sums_is_made() -> None:
    """Each weight is taken for itself."""

    def spelling(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return w + S * (b @ a) if w.shape[1] == INNER else torch.lerp(w, b @ a, 0.5)

    found = checked(Layer(spelling))
    assert found.ranks == (R,)
    assert len(found.large) == 1
    assert all("`lerp` computes it" in note and "kept for the gradients" in note for note in found.report.notes)
    assert found.report.notes
