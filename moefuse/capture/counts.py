"""Counts that a program takes apart: in NumPy, or as long as ``bincount`` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from moefuse.capture import guess
from moefuse.capture.bytecode import GENERATOR
from moefuse.capture.dynamo import lists, values
from moefuse.passes.graph.assumptions import Assumption

if TYPE_CHECKING:
    from moefuse.capture.attempt import Attempt


OF_A_TABLE = (
    "the experts come out of a table, so that nobody knows how long it is: no score has chosen among so many; "
    "a loop over experts that compares with == needs no list"
)
SHORT = "without `minlength` it is shorter if the last experts have no tokens"


@dataclass(eq=False)
class Elements:
    """The numbers of ``bincount(ids)`` that a ``for`` goes through: as many as there are experts, though the last ones may be missing.

    Each iteration is the scope of an assumption: that the tensor has this element. ``nodes``: number in the graph -> place. ``lazy``: they
    come through ``enumerate``, which must not have been turned into a list before.
    """

    length: Assumption
    nodes: dict[Any, int]
    lazy: bool
    done: set[int] = field(default_factory=set)

    def given(self, iterator: Any, item: Any) -> int | None:
        """The place of the element that a ``for`` has just got, by itself or in a tuple (``enumerate``, ``zip``)."""
        if self.lazy and not values.is_generator(values.plain(iterator)):
            return None
        item = values.plain(item)
        inside = vars(item).get("items")
        found = [self.nodes.get(values.number_node(values.plain(v))) for v in (inside if isinstance(inside, list | tuple) else [item])]
        return next((at for at in found if at is not None), None)


def numbers(frame: Attempt, tx: Any, variable: Any) -> list[Any] | None:
    """The elements of an array of integers as Python's numbers, and as many of ``bincount(ids, minlength=E)`` as there are experts.

    NumPy's integers are no Python integers; a program that asks for their type is traced without capture (:func:`asks_for_type`).
    """
    count = _length(frame, variable)
    node = values.tensor_node(variable)
    bins = guess.bins(node)
    if count is None or node is None:
        return None
    if bins is not None and not bins[1] and not _only_for(frame, tx):
        frame.tell(tx, "this list", SHORT)
        return None
    frame.numpy = frame.numpy or values.is_ndarray(variable)
    found = [values.number_at(tx, node, i) for i in range(count)]
    if bins is not None:
        length = Assumption("length", frame.place(tx), frame.location(tx), node, row=count)
        frame.assume(tx, length)
        if not bins[1]:
            length.items = tuple(values.number_node(v) for v in found)  # type: ignore[misc]
            lazy = bool(tx.f_code.co_flags & GENERATOR)
            frame.elements.append(Elements(length, {n: i for i, n in enumerate(length.items)}, lazy))
    return found


def _only_for(frame: Attempt, tx: Any) -> bool:
    """Whether what the running instruction gives is looped over by the ``for`` that follows, and by nothing else."""
    code, at = frame.code_of(tx), tx.instruction_pointer
    if code.instructions[at - 1].opname == "GET_ITER":
        return code.plain_for(at - 1) and (not tx.f_code.co_flags & GENERATOR or values.enumerates(tx.f_code))
    return code.instructions[at].opname == "GET_ITER" and code.plain_for(at) and not tx.f_code.co_flags & GENERATOR


def asks_for_type(tx: Any, inst: Any) -> bool:
    """Whether an instruction asks for the type of a number that depends on data."""
    if lists.callee(tx, inst) not in (isinstance, type):
        return False
    return any(values.symbol(values.plain(v)) is not None for v in tx.stack[-inst.arg :])


def as_list(frame: Attempt, tx: Any, variable: Any) -> Any:
    """``bincount(ids, minlength=E).tolist()``; None for any other tensor."""
    node = values.tensor_node(variable)
    bins = guess.bins(node)
    if not frame.active:
        return None
    if bins is None:
        if guess.from_table(node):
            frame.tell(tx, "this list", OF_A_TABLE)
        return None
    if not bins[1]:
        frame.tell(tx, "this list", SHORT)
        return None
    found = numbers(frame, tx, variable)
    return None if found is None else values.new_list(found)


def _length(frame: Attempt, variable: Any) -> int | None:
    node = values.tensor_node(variable)
    value = node.meta.get("example_value") if node is not None and frame.active else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    bins = guess.bins(node)
    if bins is not None:
        return bins[0]
    return int(value.shape[0]) if values.is_ndarray(variable) and isinstance(value.shape[0], int) else None
