"""What a function does with a local, read from its bytecode."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from torch._dynamo.bytecode_transformation import cleaned_instructions

from moefuse.capture import bytecode
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


def zipped_at_once(u: Any, c: Any) -> Any:
    for e, n in zip(u.tolist(), c.tolist()):
        u = u + e * n


def zipped_strictly(u: Any, c: Any) -> Any:
    for e, n in zip(u.tolist(), c.tolist(), strict=True):
        u = u + e * n


def zipped_by_name(u: Any, c: Any) -> Any:
    experts = u.tolist()
    sizes = c.tolist()
    for e, n in zip(experts, sizes):
        u = u + e * n


def zipped_second(u: Any, c: Any, x: Any) -> Any:
    for n, e in zip(c, u.tolist()):
        u = x[e * 2].sum() + n


def zipped_in_pieces(u: Any, c: Any, x: Any) -> Any:
    parts = x[c // 2].split(u.tolist(), dim=0)
    for e, part in zip(c.tolist(), parts):
        u = u + e * part


def zipped_as_argument_of_another(u: Any, c: Any) -> Any:
    for e, n in sorted(zip(u.tolist(), c.tolist())):
        u = u + e * n


def zipped_inside_of_an_argument(u: Any, c: Any) -> Any:
    for e, n in zip(sorted(u.tolist()), c.tolist()):
        u = u + e * n


def zipped_and_counted(u: Any, c: Any) -> Any:
    for _, (e, n) in enumerate(zip(u.tolist(), c.tolist())):
        u = u + e * n


def zipped_and_kept(u: Any, c: Any) -> Any:
    pairs = zip(u.tolist(), c.tolist())
    for e, n in pairs:
        u = u + e * n


def zipped_twice(u: Any, c: Any) -> Any:
    experts = u.tolist()
    for e, n in zip(experts, c.tolist()):
        u = u + e * n
    for e, n in zip(experts, c.tolist()):
        u = u + e * n


def zipped_or_not(u: Any, c: Any, x: Any) -> Any:
    experts = u.tolist()
    if x:
        experts = [0]
    for e, n in zip(experts, c.tolist()):
        u = u + e * n


def zipped_in_a_comprehension(u: Any, c: Any) -> Any:
    return [e * n for e, n in zip(u.tolist(), c.tolist())]


def zipped_by_a_method(u: Any, c: Any) -> Any:
    for e, n in c.zip(u.tolist(), c):
        u = u + e * n


def zipped_in_items(u: Any, c: Any) -> Any:
    for e, n in zip(u.tolist()[1:], c.tolist()):
        u = u + e * n


def zipped_in_a_generator(u: Any, c: Any) -> Any:
    return sum(e * n for e, n in zip(u.tolist(), c.tolist()))


def zipped_in_a_dictionary(u: Any, c: Any) -> Any:
    return {e: n for e, n in zip(u.tolist(), c.tolist())}


ZIPPED = [zipped_at_once, zipped_strictly, zipped_by_name, zipped_second, zipped_in_pieces, zipped_in_a_comprehension]
UNZIPPED = [
    zipped_as_argument_of_another, zipped_inside_of_an_argument, zipped_and_counted, zipped_and_kept, zipped_twice, zipped_or_not,
    zipped_in_a_generator, zipped_in_a_dictionary, zipped_by_a_method, zipped_in_items,
]  # fmt: skip


@pytest.mark.parametrize("function", [*ZIPPED, *UNZIPPED])
def test_a_list_that_only_a_zip_has(function: Callable[..., Any]) -> None:
    """Asked of what the first ``tolist()`` gives: a ``for`` through ``zip`` is all that has it."""
    code = Code(cleaned_instructions(function.__code__))
    named = next(i for i, inst in enumerate(code.instructions) if inst.argval == "tolist")
    at = next(i for i, inst in enumerate(code.instructions) if i > named and inst.opname == "CALL")
    assert code.zipped(at + 1) == (function in ZIPPED)


def test_a_subscript_of_python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is an operator with two operands, as the addition beside it is."""
    monkeypatch.setattr(bytecode, "_SUBSCRIPT", 26)
    binary = [types.SimpleNamespace(opname="BINARY_OP", arg=arg) for arg in (0, 26)]
    assert [bytecode.subscripts(inst) for inst in binary] == [False, True]
    assert not bytecode.subscripts(types.SimpleNamespace(opname="BINARY_SLICE", arg=None))


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


def every_kind(x: Any, y: Any, given: Any) -> Any:
    if x in y:
        x = y[0] is x
    for item in y:
        given(item)
        given(item, last=x)
        given(*y)
    return f"{x}", x + y


def test_kinds() -> None:
    """What capture looks at has the names of this Python's instructions; an operator that is no index is none of it."""
    instructions = cleaned_instructions(every_kind.__code__)
    found = {(bytecode.kind(inst), inst.opname) for inst in instructions if bytecode.kind(inst)}
    assert {kind for kind, _ in found} == {"contains", "identity", "subscript", "jump", "get_iter", "for_iter", "call", "spread", "format"}
    assert all(name == "BINARY_SUBSCR" or name == "BINARY_OP" for kind, name in found if kind == "subscript")
    assert sum(bytecode.kind(inst) == "subscript" for inst in instructions) == 1
    assert "handler" in bytecode.KINDS.values()
