"""Weights read as linear combinations: which addends, which are cut off from gradients, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefuse.passes.infer.weight_parts import Addend, OtherError
from moefuse.passes.infer.weight_sums import combination, stack_of_sums
from moefuse.passes.ir.expr import Leaf
from tests.null.rules_case import E, trace


def read(function: Callable[..., Any]) -> list[str]:
    """The combination that a function of (w_up, factor_b, factor_a) returns, one text for each addend."""
    traced = trace(function)
    output = next(iter(traced.graph.find_nodes(op="output")))
    return [_text(a) for a in combination(traced.ctx, Leaf(traced.returned, True, None, (1, 2)), output)]


def _text(addend: Addend) -> str:
    scale = "" if addend.scale == 1 else f"{addend.scale:g} "
    return scale + " @ ".join(map(_leaf, addend.leaves))


def _leaf(leaf: Leaf) -> str:
    name = leaf.source.name + (f" x{len(leaf.parts)}" if leaf.parts else "")
    name += f" but {sorted(leaf.zeros)}" if leaf.zeros else ""
    return name + ("" if list(leaf.order) == sorted(leaf.order) else " turned") + (" detached" if leaf.detached else "")


def _of_some(w_up: Any, factor_b: Any, factor_a: Any, which: set[int]) -> Any:
    return torch.stack([factor_b[e] @ factor_a[e] + w_up[e] if e in which else w_up[e] for e in range(E)])


def _again(stack: Any) -> Any:
    return torch.stack([stack[e] for e in range(E)])


def _one_without(w_up: Any, factor_b: Any, factor_a: Any) -> Any:
    return torch.stack([factor_b[0] @ factor_a[0], w_up[1], w_up[2]])


BASE, TERM = "w_up", "factor_b @ factor_a"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda w_up: w_up, [BASE], id="given"),
        pytest.param(lambda w_up, factor_b, factor_a: w_up - 2 * (factor_b @ factor_a) / 4, [BASE, f"-0.5 {TERM}"], id="numbers"),
        pytest.param(
            lambda w_up, factor_b, factor_a: torch.baddbmm(w_up, factor_b, factor_a, beta=0.5, alpha=3),
            [f"0.5 {BASE}", f"3 {TERM}"],
            id="baddbmm",
        ),
        pytest.param(
            lambda w_up, factor_b, factor_a: torch.baddbmm(w_up, factor_b, factor_a, beta=0), [TERM], id="beta 0, which reads no base"
        ),
        pytest.param(lambda w_up, factor_b, factor_a: -(w_up + factor_b @ factor_a), [f"-1 {BASE}", f"-1 {TERM}"], id="sign of all"),
        pytest.param(
            lambda w_up, factor_b, factor_a: (w_up + factor_b @ factor_a).detach() + factor_b @ factor_a,
            [f"{BASE} detached", "factor_b detached @ factor_a detached", TERM],
            id="gradients end at some",
        ),
        pytest.param(
            lambda w_up, factor_b, factor_a: w_up + torch.einsum("erh,eir->ehi", factor_a, factor_b).transpose(1, 2),
            [BASE, TERM],
            id="turned",
        ),
        pytest.param(
            lambda w_up, factor_b, factor_a: w_up.transpose(2, 1) + factor_a.transpose(1, 2) @ factor_b.transpose(1, 2),
            ["w_up turned", "factor_a turned @ factor_b turned"],
            id="the other way round",
        ),
        pytest.param(
            lambda w_up, factor_b, factor_a: torch.stack([w_up[e] + factor_b[e] @ factor_a[e] for e in range(E)]),
            [BASE, TERM],
            id="expert by expert",
        ),
        pytest.param(
            lambda w_up, factor_b, factor_a: w_up + factor_b @ factor_a[1], [BASE, "factor_b @ getitem x3"], id="one A for all experts"
        ),
        pytest.param(lambda w_up, factor_b, factor_a: w_up.clone().sub_(factor_b @ factor_a), [BASE, f"-1 {TERM}"], id="in place"),
        pytest.param(
            lambda w_up, factor_b, factor_a: _of_some(w_up, factor_b, factor_a, {1}),
            [BASE, "factor_b but [0, 2] @ factor_a but [0, 2]"],
            id="one expert has a term",
        ),
        pytest.param(
            lambda w_up, factor_b, factor_a: _again(_of_some(w_up, factor_b, factor_a, {0, 2})),
            [BASE, "factor_b but [1] @ factor_a but [1]"],
            id="out of such a stack into another",
        ),
    ],
)
def test_read(function: Callable[..., Any], expected: list[str]) -> None:
    assert read(function) == expected


def _written_later(w_up: Any, factor_b: Any, factor_a: Any) -> Any:
    total = w_up.clone()
    before = total * 2
    total.add_(factor_b @ factor_a)
    return before


def _view_written(w_up: Any, factor_b: Any, factor_a: Any) -> Any:
    total = w_up.clone()
    view = total.transpose(1, 2)
    total.add_(factor_b @ factor_a)
    return view.transpose(1, 2)


def test_a_value_is_what_it_was_when_it_was_read() -> None:
    """A write behind a copy changes nothing of it, and a view is what was written below it."""
    assert read(_written_later) == [f"2 {BASE}"]
    assert read(_view_written) == [BASE, TERM]


def _input_written(w_up: Any, factor_b: Any, factor_a: Any) -> Any:
    w_up.add_(factor_b @ factor_a)
    return w_up * 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        pytest.param(lambda w_up: w_up.exp(), "`exp` computes it", id="function"),
        pytest.param(lambda w_up: w_up * w_up, "multiplied with a tensor", id="product of weights"),
        pytest.param(lambda w_up: w_up + 1, "a number is added", id="number"),
        pytest.param(lambda w_up: torch.stack([w_up[e] for e in (1, 0, 2)]), "uses the weight of expert", id="order of experts"),
        pytest.param(lambda w_up: torch.stack([w_up[e] * (e + 1) for e in range(E)]), "several scales", id="scales of experts"),
        pytest.param(
            lambda w_up, factor_b, factor_a: _one_without(w_up, factor_b, factor_a),
            "numbers of weights",
            id="one has no weight",
        ),
        pytest.param(_input_written, "written to in the graph", id="input written"),
        pytest.param(lambda w_up, factor_b, factor_a: w_up + factor_b[0] @ factor_a[0], "one and the same term", id="one term for all"),
    ],
)
def test_no_combination(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(OtherError, match=why):
        read(function)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda w_up, factor_b, factor_a: w_up + factor_b @ factor_a, True, id="sum"),
        pytest.param(lambda w_up, factor_b, factor_a: w_up + factor_b @ factor_a[0], False, id="rows of sequences look the same"),
        pytest.param(lambda factor_b, factor_a: factor_b @ factor_a, False, id="no base"),
        pytest.param(lambda w_up: w_up * 2, False, id="no term"),
    ],
)
def test_stacks_for_every_row(function: Callable[..., Any], expected: bool) -> None:
    """What a rule takes for the weights of all experts."""
    traced = trace(function)
    assert stack_of_sums(traced.ctx, traced.returned, next(iter(traced.graph.find_nodes(op="output")))) is expected
