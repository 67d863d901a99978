"""``for e, n in zip(found.tolist(), counts.tolist())``, where ``found, counts = unique(ids, return_counts=True)``.

The lists are as long as experts occur, and only where all do is the i-th number that of expert i. So the loop is given every expert with
its number of slots, which may be 0, and each iteration is the scope of an assumption: the expert occurs (``row``). That is the same as long
as nothing else is done with the lists, and as what is zipped with them is of the same ``unique``: places in a list have no meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.capture import bins, guess
from moefuse.capture.attempt import Attempt
from moefuse.capture.dynamo import lists, values

_BESIDE = "it goes through something beside the experts that occur, and the place of an expert among those depends on the others"


class Occurrences:
    """The lists of what occurs of one attempt at a frame, until a ``for`` goes through them."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._lists: dict[int, tuple[Any, Node]] = {}
        self._counts: dict[Node, Node] = {}
        self._numbers: dict[tuple[Node, str], list[Any]] = {}
        self._made: tuple[Any, Any, Node] | None = None

    def listed(self, tx: Any, variable: Any) -> Any:
        """``tolist()`` of distinct ids, or of how often each is there, as numbers for each expert; None for any other tensor or use."""
        found = guess.occurring(values.tensor_node(variable)) if self.attempt.active else None
        plain = tx.f_globals.get("zip", zip) is zip
        return self._list(tx, *found) if found is not None and plain and self.attempt.code_of(tx).zipped(tx.instruction_pointer) else None

    def _list(self, tx: Any, unique: Node, what: str, like: Any = None) -> Any:
        """The list for each expert that the router could choose: its number, or its number of slots; None where that is not known.

        As tensors, if ``like`` is what they are elements of.
        """
        ids = unique.args[0]
        count = guess.choices(ids)
        if count is None or not isinstance(ids, Node):
            return None
        counts = bins.numbers(tx, ids, count) if unique not in self._counts else self._counts[unique]
        if counts is None:
            return None
        self._counts[unique] = counts
        made = values.new_list(self._items(tx, unique, what, count, like))
        self._lists[id(made)] = made, unique
        return made

    def _items(self, tx: Any, unique: Node, what: str, count: int, like: Any) -> list[Any]:
        if what == "ids":
            return [values.constant(i) if like is None else values.row_tensor(tx, i, like) for i in range(count)]
        if like is None and (unique, what) in self._numbers:
            return self._numbers[unique, what]
        of = self._counts[unique]
        of = values.call(tx, "cumsum", of, 0).as_proxy().node if what == "ends" else of
        if like is not None:
            return [values.call(tx, operator.getitem, of, i) for i in range(count)]
        return self._numbers.setdefault((unique, what), [values.number_at(tx, of, i) for i in range(count)])

    def call(self, tx: Any, at: int) -> None:
        """Something is about to be called: ``zip``, with lists of what occurs and nothing else, or what splits a tensor by them."""
        if not self._lists and "zip" not in tx.f_code.co_names:
            return  # of thousands of calls that a frame has
        inst = tx.instructions[at]
        end = len(tx.stack) - (inst.opname == "CALL_KW")
        if not self.attempt.active or not isinstance(inst.arg, int) or not inst.arg:
            return
        if lists.callee(tx, inst) is zip:
            self._zip(tx, at, range(end - inst.arg, end))
        elif self._lists and any(id(v) in self._lists for v in tx.stack[end - inst.arg : end]) and not _splits(tx, inst):
            self._refuse(tx)

    def _zip(self, tx: Any, at: int, places: Sequence[int]) -> None:
        if self.attempt.code_of(tx).goes_through(at):
            for place in places:
                node = values.tensor_node(values.realized(tx.stack[place]))
                found = guess.occurring(node)
                numbers = values.is_ndarray(values.realized(tx.stack[place]))
                made = None if found is None else self._list(tx, *found, None if numbers else node.meta["example_value"])  # type: ignore[union-attr]
                self.attempt.numpy = self.attempt.numpy or (numbers and made is not None)
                tx.stack[place] = tx.stack[place] if made is None else made
        given = [values.realized(tx.stack[place]) for place in places]
        ours = [self._of(v) for v in given if not _is_flag(v)]
        unique = next((u for u in ours if u is not None), None)
        if unique is None:
            return
        if any(u is not unique for u in ours):
            self._refuse(tx)
        rows = zip(*(values.items(v) for v in given if not _is_flag(v)), strict=True)
        self._made = tx, values.new_list([values.new_tuple(list(row)) for row in rows]), unique

    def _of(self, variable: Any) -> Node | None:
        """The ``unique`` that a list, or the pieces of a tensor, have one item for each expert of; None for anything else."""
        if id(variable) in self._lists:
            return self._lists[id(variable)][1]
        pieces = [values.tensor_node(values.plain(v)) for v in values.items(variable)]
        split = pieces[0].args[0] if pieces and pieces[0] is not None and pieces[0].args else None
        if not isinstance(split, Node) or any(p is None or p.args != (split, i) for i, p in enumerate(pieces)):
            return None
        sizes = split.kwargs.get("split_size", split.kwargs.get("split_size_or_sections", split.args[1] if len(split.args) > 1 else None))
        known = {unique: [values.number_node(n) for n in items] for (unique, what), items in self._numbers.items() if what == "counts"}
        return next((unique for unique, nodes in known.items() if isinstance(sizes, list | tuple) and nodes == list(sizes)), None)

    def _refuse(self, tx: Any) -> None:
        self.attempt.tell(tx, "this loop", _BESIDE)
        self.attempt.retreat([], why=_BESIDE)

    def get_iter(self, tx: Any, loop: Callable[[Any, Node], Any]) -> Any:
        """The loop of the ``for`` that now begins, if it is one through what occurs."""
        made, self._made = self._made, None
        if made is None or made[0] is not tx:
            return None
        tx.stack[-1] = made[1]
        return loop(tx, made[2])


def _is_flag(variable: Any) -> bool:
    """``zip(..., strict=True)``."""
    return values.is_constant(variable) and isinstance(variable.as_python_constant(), bool)


def _splits(tx: Any, inst: Any) -> bool:
    """Whether a call is one of ``torch.split``, or of a tensor's method."""
    return lists.callee(tx, inst) is torch.split or values.tensor_node(lists.method(tx, inst, "split")) is not None
