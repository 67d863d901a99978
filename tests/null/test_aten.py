"""ATen's operators, as exported programs have them: the names and arguments that rules know; what a decomposition leaves of an einsum."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefuse.passes.graph.calls import call_of
from moefuse.passes.ir.facts import Index, IndexMatrix, Rows
from tests.null.rules_case import E, H, I, K, T, call, fact_of, letters, rows_of, trace

aten = torch.ops.aten
Function = Callable[..., Any]
ALL = slice(None)

FORMS: dict[str, tuple[Function, str, tuple[Any, ...]]] = {
    "one index": (lambda x, weight: aten.index.Tensor(x, [weight.long()]), "getitem", ("x", ("long",))),
    "behind another dimension": (lambda x, weight: aten.index.Tensor(x, [None, weight.long()]), "getitem", ("x", (ALL, "long"))),
    "without bounds": (lambda x, weight: aten._unsafe_index.Tensor(x, [weight.long()]), "getitem", ("x", ("long",))),
    "slice": (lambda x: aten.slice.Tensor(x, 1, 0, 2), "getitem", ("x", (ALL, slice(0, 2, None)))),
    "slice from the back": (lambda x: aten.slice.Tensor(x, -1, 1, 4, 2), "getitem", ("x", (ALL, slice(1, 4, 2)))),
    "slice to the end": (lambda x: aten.slice.Tensor(x, 0, 3, sys.maxsize), "getitem", ("x", (slice(3, None, None),))),
    "slice by names": (lambda x: aten.slice.Tensor(x, start=1, end=-1), "getitem", ("x", (slice(1, -1, None),))),
    "empty": (lambda x: call(aten.empty_permuted.default, x, [7, 5], [1, 0]), "empty", ((7, 5),)),
    "put": (
        lambda x, weight, other: aten.index_put.default(x, [weight.long()], other[:7]),
        "index_put",
        ("x", ("long",), "getitem", False),
    ),
    "put, added": (
        lambda x, weight, other: aten.index_put_.default(x, [weight.long()], other[:7], True),
        "index_put",
        ("x", ("long",), "getitem", True),
    ),
}


def shown(value: Any) -> Any:
    """Nodes by their names."""
    if isinstance(value, tuple | list):
        return tuple(map(shown, value))
    if not isinstance(value, torch.fx.Node):
        return value
    return value.target if value.op == "placeholder" else value.name


@pytest.mark.parametrize(("function", "name", "args"), FORMS.values(), ids=FORMS)
def test_operators_that_python_writes_otherwise(function: Function, name: str, args: tuple[Any, ...]) -> None:
    found = call_of(trace(function).returned)
    assert found is not None
    assert (found.name, shown(found.args), found.kwargs) == (name, args, {})
    assert found.inplace == (function is FORMS["put, added"][0])


def chosen(ids: Any) -> Any:
    return aten.nonzero.default(ids == 1)


COLUMNS: dict[str, tuple[Function, str | None]] = {
    "tokens": (lambda ids: aten.squeeze.dims(aten.slice.Tensor(chosen(ids), 1, 0, 1), [1]), "token"),
    "slots": (lambda ids: aten.squeeze.dims(aten.slice.Tensor(chosen(ids), 1, 1, 2), [1]), "slot"),
    "slots, by Python": (lambda ids: chosen(ids)[:, 1:2].squeeze(1), "slot"),
    "some rows": (lambda ids: aten.slice.Tensor(chosen(ids), 0, 0, 1), None),
    "columns of the transposed": (lambda ids: aten.slice.Tensor(chosen(ids).t(), 1, 0, 1), None),
}


@pytest.mark.parametrize(("function", "of"), COLUMNS.values(), ids=COLUMNS)
def test_columns_of_nonzero(function: Function, of: str | None) -> None:
    fact = fact_of(function)
    assert (fact.of if isinstance(fact, Index) else None) == of
    assert of is not None or not isinstance(fact, Index | IndexMatrix)


def as_bmm(x: Any, stack: Any) -> Any:
    """``einsum("th,eih->tei", x, stack)`` as torch decomposes it."""
    matrix = stack.permute(2, 0, 1).reshape(1, H, -1)
    return torch.bmm(x.unsqueeze(0), matrix).view(T, 1, E, -1).permute(0, 2, 3, 1).reshape(T, E, -1)


def slots_as_bmm(x: Any, ids: Any, w_in: Any) -> Any:
    """``einsum("th,tkih->tki", x, w_in[ids])``."""
    matrix = w_in[ids].permute(0, 3, 1, 2).reshape(T, H, -1)
    return torch.bmm(x.unsqueeze(1), matrix).view(T, 1, K, 2 * I).permute(0, 2, 3, 1).reshape(T, K, 2 * I)


def test_stacks_that_a_product_puts_together() -> None:
    expected = rows_of(lambda x, trained_in: torch.einsum("th,eih->tei", x, trained_in))
    assert rows_of(lambda x, trained_in: as_bmm(x, trained_in)) == expected
    assert rows_of(lambda x, ids, w_in: slots_as_bmm(x, ids, w_in)) == ("slots", "t k f", "linear(token(x), w_in)")


def test_rows_meet_the_other_way_round() -> None:
    """The stack in front: ``einsum("eih,th->eit")``."""
    fact = fact_of(lambda x, trained_in: torch.bmm(trained_in.reshape(1, -1, H), x.t().unsqueeze(0)).view(E, 2 * I, T))
    assert isinstance(fact, Rows)
    assert letters(fact.axes) == "e f t"


NOT_ROWS: dict[str, Function] = {
    "an input of the graph is no stack": lambda x, w_in: as_bmm(x, w_in),
    "experts behind the features": lambda x, trained_in: torch.bmm(
        x.unsqueeze(0), trained_in.permute(2, 1, 0).reshape(1, H, -1)
    ).view(T, E, 2 * I),
    "summed over experts": lambda x, trained_in: torch.bmm(x.repeat(1, E).unsqueeze(0), trained_in.permute(0, 2, 1).reshape(1, E * H, -1)),
}  # fmt: skip


@pytest.mark.parametrize("function", NOT_ROWS.values(), ids=NOT_ROWS)
def test_what_is_no_such_product(function: Function) -> None:
    assert not isinstance(fact_of(function), Rows)


def test_rows_by_an_operator_of_indexing() -> None:
    rows = rows_of(lambda x, ids, w_in: aten.linear.default(aten.index.Tensor(x, [aten.where.default(ids == 0)[0]]), w_in[0]))
    assert rows == ("selected", "r f", "linear(token(x), w_in)")
