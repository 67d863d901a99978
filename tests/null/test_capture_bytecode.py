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
