"""Counts that a program takes apart: in NumPy, or as long as ``bincount`` makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moefuse._dynamo import lists, values
from moefuse.capture import guess
from moefuse.capture.assumptions import Assumption

if TYPE_CHECKING:
    from moefuse.capture.frame import Frame


def numbers(frame: Frame, tx: Any, variable: Any) -> list[Any] | None:
    """The elements of an array of integers as Python's numbers, and as many of ``bincount(ids, minlength=E)`` as there are experts.

    NumPy's integers are no Python integers; a program that asks for their type is traced without capture (:func:`asks_for_type`).
    """
    count = _length(frame, variable)
    node = values.tensor_node(variable)
    if count is None or node is None:
        return None
    frame.numpy = frame.numpy or values.is_ndarray(variable)
    if guess.bins(node) is not None:
        frame.assume(tx, Assumption("length", frame.place(tx), frame.location(tx), node, row=count))
    return [values.number_at(tx, node, i) for i in range(count)]


def asks_for_type(tx: Any, inst: Any) -> bool:
    """Whether an instruction asks for the type of a number that depends on data."""
    if lists.callee(tx, inst) not in (isinstance, type):
        return False
    return any(values.symbol(values.plain(v)) is not None for v in tx.stack[-inst.arg :])


def as_list(frame: Frame, tx: Any, variable: Any) -> Any:
    """``bincount(ids, minlength=E).tolist()``; None for any other tensor."""
    node = values.tensor_node(variable)
    if not frame.active or guess.bins(node) is None:
        return None
    found = numbers(frame, tx, variable)
    return None if found is None else values.new_list(found)


def _length(frame: Frame, variable: Any) -> int | None:
    node = values.tensor_node(variable)
    value = node.meta.get("example_value") if node is not None and frame.active else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    bins = guess.bins(node)
    if bins is not None:
        return bins
    return int(value.shape[0]) if values.is_ndarray(variable) and isinstance(value.shape[0], int) else None
