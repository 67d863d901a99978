"""Sums of expert weights and low-rank terms, in the ways that people write them: none is made, or the report says which and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu.sums_case import INNER, E, Layer, R, Spelling, T, checked
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
    "one A for all": lambda w, b, a, s: w + S * (b @ a[0]),
    "expert by expert": lambda w, b, a, s: torch.stack([w[e] + S * b[e] @ a[e] for e in range(E)]),
    "addmm of each": lambda w, b, a, s: torch.stack([torch.addmm(w[e], b[e], a[e], alpha=S) for e in range(E)]),
}


@pytest.mark.parametrize("dense", [pytest.param(False, id="loop"), pytest.param(True, id="dense")])
@pytest.mark.parametrize("name", APART)
def test_taken_apart(name: str, dense: bool) -> None:
    """Nothing of a weight's size is kept, and where gradients end they end."""
    found = checked(Layer(APART[name], dense))
    assert set(found.ranks) == {R}
    assert (found.large, found.report.notes, found.report.skipped) == ([], [], [])


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
    ("add", "sub", "alpha", "baddbmm", "in place", "neg twice", "detach term", "clone", "div", "turn", "float64", "einsum", "parameter")
)


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
        "sub": lambda: out - torch.bmm(b, a) * by,
        "alpha": lambda: out.add(b @ a, alpha=by),
        "baddbmm": lambda: torch.baddbmm(out, b, a, alpha=by),
        "in place": lambda: out.clone().sub_(b @ a, alpha=by),
        "neg twice": lambda: -(by * (b @ a) - out),
        "detach term": lambda: out + (by * (b @ a)).detach(),
        "clone": lambda: out.clone(memory_format=torch.contiguous_format),
        "div": lambda: out + (b @ a) / by,
        "turn": lambda: (out.mT + by * (a.mT @ b.mT)).transpose(-1, -2),
        "float64": lambda: (out.double() + by * (b.double() @ a.double())).to(out.dtype),
        "einsum": lambda: out + by * torch.einsum("erh,eor->eoh", a, b),
        "parameter": lambda: out + s * (b @ a) * by,
    }
    found: Tensor = made[step]()
    return found


@settings(max_examples=4 if FEW == 3 else 100, phases=PHASES, deadline=None)
@given(st.lists(st.tuples(STEPS, NUMBERS), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_drawn_combinations(steps: list[Step], detached: bool, dense: bool) -> None:
    """Any chain of steps that adds terms of ranks that are small together is taken apart, or told."""
    found = checked(Layer(spelled(steps, detached), dense))
    terms = sum(step != "clone" for step, _ in steps)
    if terms and 2 * terms * R <= INNER:
        assert (set(found.ranks), found.large, found.report.notes) == ({R}, [], [])
    elif terms:
        assert found.report.notes


def test_one_of_two_sums_is_made() -> None:
    """Each weight is taken for itself."""

    def spelling(w: Tensor, b: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return w + S * (b @ a) if w.shape[1] == INNER else torch.lerp(w, b @ a, 0.5)

    found = checked(Layer(spelling))
    assert found.ranks == (R,)
    assert len(found.large) == 1
    assert all("`lerp` computes it" in note and "kept for the gradients" in note for note in found.report.notes)
    assert found.report.notes
