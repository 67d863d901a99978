"""The last check of a rewritten graph: each kind of rewrite that loses something is noticed, and one that loses nothing passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from moefuse.passes.infer.state import Standin
from moefuse.passes.prove.effects import EffectsDifferError, compare, effects
from tests.null.rules_case import Traced, trace


def named(traced: Traced, target: str, number: int = 0) -> Node:
    """The n-th node of a graph with this target."""
    found = [n for n in traced.graph.nodes if target in (n.target, getattr(n.target, "__name__", None))]
    return found[number]  # type: ignore[no-any-return]


def problem(traced: Traced, change: Callable[[Graph], None]) -> str | None:
    """What the check says of a graph after a change; None if it passes."""
    before = effects(traced.ctx)
    change(traced.graph)
    try:
        compare(traced.ctx, before)
    except EffectsDifferError as error:
        return f"{error.node.name} {error.detail}"
    return None


def test_a_write_to_an_input_must_stay() -> None:
    traced = trace(lambda x, x2: (x2.detach().add_(1), x * 2)[1])
    assert problem(traced, lambda g: g.erase_node(named(traced, "add_"))) == "add_ is gone"


def test_writes_to_inputs_must_keep_their_order() -> None:
    """A later statement finds what an earlier one left."""
    traced = trace(lambda x: (x.add_(1), x.mul_(2), x * 2)[2])
    assert problem(traced, lambda g: named(traced, "mul_").append(named(traced, "add_"))) == "add_ happens in another order"


def test_a_random_draw_must_stay() -> None:
    """Everything drawn later would be another number."""
    traced = trace(lambda x: (torch.rand_like(x), x * 2)[1])
    assert problem(traced, lambda g: g.erase_node(named(traced, "rand_like"))) == "rand_like is gone"


def test_what_draws_nothing_may_go() -> None:
    """Dropout in inference."""
    traced = trace(lambda x: (torch.nn.functional.dropout(x, 0.5, False), x * 2)[1])
    assert problem(traced, lambda g: g.erase_node(named(traced, "dropout"))) is None


def test_a_write_that_somebody_reads_must_stay() -> None:
    """A tensor of the graph's own, written to through a view; nothing outside of the graph sees it, but a reader inside does."""

    def program(x: Any) -> Any:
        y = x * 1
        y.view(-1).add_(1)
        return y.sum()

    traced = trace(program)
    assert problem(traced, lambda g: g.erase_node(named(traced, "add_"))) == "sum_1 would not find what `add_` wrote in what `mul` computes"


def test_a_reader_must_not_move_behind_a_write() -> None:
    traced = trace(lambda x: (y := x * 1, y.sum(), y.add_(1))[1])
    said = problem(traced, lambda g: named(traced, "add_").append(named(traced, "sum")))
    assert said == "sum_1 would not find what was there before in what `mul` computes"


def accumulate(x: Any, x2: Any) -> Any:
    """A region by hand: two writes to an accumulator, and what reads it before and behind them."""
    out = torch.zeros_like(x)
    view = out.view(-1)
    out.add_(x)
    out.add_(x2)
    return out * 2, view


def around_sums(x: Any, x2: Any) -> Any:
    out = torch.zeros_like(x)
    out.add_(x)
    out.sub_(x2)
    out.sub_(x)
    return out * 2


def between_sums(x: Any, x2: Any) -> Any:
    out = torch.zeros_like(x)
    out.sub_(x2)
    out.add_(x)
    out.sub_(x)
    return out * 2


@pytest.mark.parametrize(("program", "taken"), [(around_sums, True), (around_sums, False), (between_sums, True)])
def test_what_a_sum_is_added_to_must_stay(program: Callable[..., Any], taken: bool) -> None:
    """A write before those that a region is made of, or between them, went with it as if it were its own."""
    traced = trace(program)
    out, write, adds = named(traced, "zeros_like"), named(traced, "add_"), (named(traced, "sub_"), named(traced, "sub_", 1))

    def change(graph: Graph) -> None:
        gone = [*adds, write] if taken else [*adds]
        with graph.inserting_after(adds[-1]):
            result = graph.call_function(torch.add, (out, *graph.find_nodes(op="placeholder")[1:]))
        traced.ctx.results[result] = Standin((out, *adds), frozenset(gone), out, adds)
        traced.ctx.memory.introduce(result, out)
        named(traced, "mul").replace_input_with(out, result)
        for node in gone:
            graph.erase_node(node)

    said = problem(traced, change)
    assert said is not None if taken else said is None
    assert not taken or "would not add to what `add_` wrote" in str(said)


def replaced(traced: Traced, *, redirect: bool, nodes: int = 2) -> Callable[[Graph], None]:
    """Put a sum in the place of the writes; ``redirect``: who reads the accumulator reads the sum."""

    def change(graph: Graph) -> None:
        writes = [named(traced, "add_", i) for i in range(2)]
        out = named(traced, "zeros_like")
        with graph.inserting_after(writes[-1]):
            result = graph.call_function(torch.add, tuple(graph.find_nodes(op="placeholder")))
        traced.ctx.results[result] = Standin((out, *writes), frozenset(writes))
        traced.ctx.memory.introduce(result, out)
        if redirect:
            named(traced, "mul").replace_input_with(out, result)
        for write in reversed(writes[:nodes]):
            graph.erase_node(write)

    return change


def test_a_result_that_is_read_instead_of_the_accumulator_is_the_same() -> None:
    traced = trace(lambda x, x2: accumulate(x, x2)[0])
    assert problem(traced, replaced(traced, redirect=True)) is None


@pytest.mark.parametrize("redirect", [True, False])
def test_a_view_of_the_accumulator_does_not_show_the_result(redirect: bool) -> None:
    """The writes are gone, and somebody still looks at the memory that they wrote to."""
    traced = trace(accumulate)
    said = problem(traced, replaced(traced, redirect=redirect))
    assert said is not None
    assert "would not find the experts' result" in said


def test_a_write_of_a_region_that_was_read_before_its_end_must_stay() -> None:
    """Between the two writes somebody reads; the first must not go."""

    def program(x: Any, x2: Any) -> Any:
        out = torch.zeros_like(x)
        out.add_(x)
        middle = out.sum()
        out.add_(x2)
        return out * 2, middle

    traced = trace(program)
    assert problem(traced, replaced(traced, redirect=True)) == "sum_1 would not find what `add_` wrote in what `zeros_like` computes"
