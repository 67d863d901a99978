"""What a function does with a local, read from its bytecode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch._dynamo.bytecode_transformation import cleaned_instructions

from moefuse.capture.bytecode import Code


def asks(function: Callable[..., Any]) -> bool:
    return Code(cleaned_instructions(function.__code__)).only_in_indices("rows")


def alone(x: Any, rows: Any) -> Any:
    return x[rows]


def among_others(x: Any, rows: Any, slots: Any) -> Any:
    y = x[None, rows]
    return y[rows, slots, None] + y[slots, rows]


def stored(x: Any) -> Any:
    rows = x.tolist()
    return x[rows]


def counted(x: Any, rows: Any) -> Any:
    return x[rows] * len(rows)


def beside_an_index(x: Any, rows: Any, slots: Any) -> Any:
    return (rows, x[slots])


def under_an_index(x: Any, rows: Any, slots: Any) -> Any:
    return rows[slots] + x[rows]


def indexed_in_an_index(x: Any, rows: Any) -> Any:
    return x[rows[0]]


def given_away(x: Any, rows: Any) -> Any:
    return x.index(rows)


def returned(x: Any, rows: Any) -> Any:
    return rows


def in_a_tuple(x: Any, rows: Any, slots: Any) -> Any:
    pair = (rows, slots)
    return x[pair]


@pytest.mark.parametrize("function", [alone, among_others, stored])
def test_nothing_but_an_index(function: Callable[..., Any]) -> None:
    assert asks(function)


@pytest.mark.parametrize("function", [counted, beside_an_index, under_an_index, indexed_in_an_index, given_away, returned, in_a_tuple])
def test_something_else(function: Callable[..., Any]) -> None:
    assert not asks(function)


def at_once(function: Callable[..., Any]) -> bool:
    """Asked of what the first ``tolist()`` gives."""
    code = Code(cleaned_instructions(function.__code__))
    named = next(i for i, inst in enumerate(code.instructions) if inst.argval == "tolist")
    return code.becomes_an_index(next(i for i, inst in enumerate(code.instructions) if i > named and inst.opname == "CALL") + 1)


AT_ONCE: dict[str, tuple[Callable[..., Any], bool]] = {
    "alone": (lambda x, rows: x[rows.tolist()], True),
    "behind a constant": (lambda x, rows: x[None, rows.tolist()].sum(), True),
    "beside another": (lambda x, rows, slots: x[rows.tolist(), slots.tolist(), None], True),
    "beside an element": (lambda x, rows: x[rows.tolist(), rows.shape[0]], True),
    "an element of it": (lambda x, rows: x[rows.tolist()[0]], False),
    "what it is indexed by": (lambda x, rows: rows.tolist()[x], False),
    "given away": (lambda x, rows: x[len(rows.tolist())], False),
    "given away with another": (lambda x, rows: x[max(rows.tolist(), x.shape)], False),
    "a method of it": (lambda x, rows: x[rows.tolist().pop()], False),
    "in a tuple of the index": (lambda x, rows: x[0, (rows.tolist(), x)], False),
    "added": (lambda x, rows: x[rows.tolist() * 2], False),
    "returned": (lambda x, rows: rows.tolist(), False),
    "kept as well": (lambda x, rows: (x[(kept := rows.tolist())], kept), False),
    "one of two": (lambda x, rows: x[rows.tolist() or x], False),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_an_index_at_once(name: str) -> None:
    """``x[rows.tolist()]``: what is not stored becomes an index, or something else besides."""
    function, holds = AT_ONCE[name]
    assert at_once(function) == holds


def loop_alone(x: Any) -> Any:
    rows = x.tolist()
    for row in rows:
        x = x[row]
    return x


def loop_behind_another_use(x: Any) -> Any:
    rows = x.sum(0)
    rows = rows.nonzero()
    rows = rows.tolist()
    for row in rows:
        x = x[row]
    return x


def loop_and_more(x: Any) -> Any:
    rows = x.tolist()
    for row in rows:
        x = x[row]
    return x, rows


def loop_in_a_loop(x: Any, rows: Any) -> Any:
    for _ in range(2):
        x = x[rows]
        rows = x.tolist()
        for row in rows:
            x = x[row]
    return x


LOOPED = {loop_alone: True, loop_behind_another_use: True, loop_and_more: False, loop_in_a_loop: False}


@pytest.mark.parametrize("function", LOOPED, ids=lambda f: f.__name__)
def test_a_list_that_is_only_looped_over(function: Callable[..., Any]) -> None:
    """From its last assignment on; a name may have meant something else before, if the program does not come back there."""
    code = Code(cleaned_instructions(function.__code__))
    last = max(i for i, inst in enumerate(code.instructions) if inst.opname == "STORE_FAST" and inst.argval == "rows")
    assert code.only_looped_over("rows", last) is LOOPED[function]
