"""Counts that a program takes apart: in NumPy, or as long as ``bincount`` makes them."""

from __future__ import annotations

from typing import Any

import torch

from moefuse.capture import guess
from moefuse.capture.attempt import Attempt
from moefuse.capture.bytecode import GENERATOR
from moefuse.capture.dynamo import lists, values
from moefuse.capture.opened import Elements
from moefuse.passes.graph.assumptions import Assumption

OF_A_TABLE = (
    "the experts come out of a table, so that nobody knows how long it is: no score has chosen among so many; "
    "a loop over experts that compares with == needs no list"
)
SHORT = "without `minlength` it is shorter if the last experts have no tokens"


def numbers(attempt: Attempt, tx: Any, variable: Any) -> list[Any] | None:
    """The elements of an array of integers as Python's numbers, and as many of ``bincount(ids, minlength=E)`` as there are experts.

    NumPy's integers are no Python integers; a program that asks for their type is traced without capture (:func:`asks_for_type`).
    """
    count = _length(attempt, variable)
    node = values.tensor_node(variable)
    bins = guess.bins(node)
    if count is None or node is None:
        return None
    if bins is not None and not bins[1] and not _only_for(attempt, tx):
        attempt.tell(tx, "this list", SHORT)
        return None
    attempt.numpy = attempt.numpy or values.is_ndarray(variable)
    found = [values.number_at(tx, node, i) for i in range(count)]
    if bins is not None:
        length = Assumption("length", attempt.place(tx), attempt.location(tx), node, row=count)
        attempt.assume(tx, length)
        if not bins[1]:
            length.items = tuple(values.number_node(v) for v in found)  # type: ignore[misc]
            lazy = bool(tx.f_code.co_flags & GENERATOR)
            attempt.elements.append(Elements(length, {n: i for i, n in enumerate(length.items)}, lazy))
    return found


def _only_for(attempt: Attempt, tx: Any) -> bool:
    """Whether what the running instruction gives is looped over by the ``for`` that follows, and by nothing else."""
    code, at = attempt.code_of(tx), tx.instruction_pointer
    if code.instructions[at - 1].opname == "GET_ITER":
        return code.plain_for(at - 1) and (not tx.f_code.co_flags & GENERATOR or values.enumerates(tx.f_code))
    return code.instructions[at].opname == "GET_ITER" and code.plain_for(at) and not tx.f_code.co_flags & GENERATOR


def asks_for_type(tx: Any, inst: Any) -> bool:
    """Whether an instruction asks for the type of a number that depends on data."""
    if lists.callee(tx, inst) not in (isinstance, type):
        return False
    return any(values.symbol(values.plain(v)) is not None for v in tx.stack[-inst.arg :])


def as_list(attempt: Attempt, tx: Any, variable: Any) -> Any:
    """``bincount(ids, minlength=E).tolist()``; None for any other tensor."""
    node = values.tensor_node(variable)
    bins = guess.bins(node)
    if not attempt.active:
        return None
    if bins is None:
        if guess.from_table(node):
            attempt.tell(tx, "this list", OF_A_TABLE)
        return None
    if not bins[1]:
        attempt.tell(tx, "this list", SHORT)
        return None
    found = numbers(attempt, tx, variable)
    return None if found is None else values.new_list(found)


def _length(attempt: Attempt, variable: Any) -> int | None:
    node = values.tensor_node(variable)
    value = node.meta.get("example_value") if node is not None and attempt.active else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    bins = guess.bins(node)
    if bins is not None:
        return bins[0]
    return int(value.shape[0]) if values.is_ndarray(variable) and isinstance(value.shape[0], int) else None
