"""Loops over the rows of a mask: which ``for`` is one, the rows it hands out, and rows that stand for others."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moefuse.capture import guess, modules
from moefuse.capture.attempt import Attempt
from moefuse.capture.bytecode import GENERATOR
from moefuse.capture.dynamo import values
from moefuse.capture.occurrences import Occurrences
from moefuse.capture.opened import Loop
from moefuse.capture.scopes import Scopes
from moefuse.passes.graph import symbols
from moefuse.passes.graph.assumptions import Assumption

MAX_BODIES = 1024
"""Loop bodies that one frame may unroll, at about a tenth of a second each."""


class Loops:
    """The loops of one attempt at a frame."""

    def __init__(self, attempt: Attempt, scopes: Scopes) -> None:
        self.attempt, self.scopes = attempt, scopes
        self.occurrences = Occurrences(attempt)
        self._iterators: dict[int, tuple[Any, Loop]] = {}
        self._lists: dict[int, tuple[Any, Loop]] = {}
        self._next: tuple[Any, Loop, Any] | None = None
        self._bodies = 0
        self._advancing: list[Any] = []

    def rows(self, tx: Any, variable: Any) -> Any:
        """The rows of a mask as a list of numbers for ``tolist()``, where only a ``for`` will read that list; else None."""
        source = guess.mask_of(values.tensor_node(variable)) if self.attempt.active else None
        if source is None or not self._only_for(tx):
            return self.occurrences.listed(tx, variable)
        value = values.tensor_node(variable).meta["example_value"]  # type: ignore[union-attr]
        if value.dim() != 1:
            return None
        loop = self._loop(tx, source)
        made = values.new_list([values.constant(i) for i in range(loop.count)])
        self._lists[id(made)] = (made, loop)
        return made

    def get_iter(self, tx: Any, at: int) -> None:
        """``for row in mask.nonzero():`` becomes a loop over all rows."""
        listed = self._lists.get(id(tx.stack[-1]))
        loop = self.occurrences.get_iter(tx, self._loop) if listed is None else listed[1]
        if loop is not None:
            self._next = (tx, loop, None)
            return
        top = values.realized(tx.stack[-1])
        node = values.tensor_node(top)
        source = guess.mask_of(node)
        if node is None or source is None or tx.f_code.co_flags & GENERATOR:
            return
        value = node.meta["example_value"]
        if not self.attempt.code_of(tx).plain_for(at) or value.dim() > 2 or (value.dim() == 2 and value.shape[1] != 1):
            return
        loop = self._loop(tx, source)
        if not self.attempt.ledger.unroll and loop.count > 2:
            loop.like = value
        rows = [self._hand_out(tx, loop, value, i) for i in range(1 if loop.represented else loop.count)]
        self._spend(tx, len(rows))
        tx.stack[-1] = values.new_list(rows)
        self._next = (tx, loop, None)

    def _loop(self, tx: Any, mask: Node) -> Loop:
        """A loop over the rows that a mask may have."""
        loop = Loop(mask, guess.end(mask), self.attempt.place(tx), self.attempt.location(tx))
        if loop.count < guess.length(mask):
            self.attempt.assume(tx, Assumption("end", loop.place, loop.location, mask, row=loop.count))
        self.attempt.loops_made.append(loop)
        return loop

    def _hand_out(self, tx: Any, loop: Loop, value: Any, row: int) -> Any:
        made = values.row_tensor(tx, [row] if value.dim() == 2 else row, value)
        loop.handed.append((row, values.tensor_node(made)))  # type: ignore[arg-type]
        return made

    def _spend(self, tx: Any, bodies: int) -> None:
        """Unrolling has a price; beyond some point it is not worth it."""
        self._bodies += bodies
        if self._bodies > MAX_BODIES:
            self.attempt.retreat([], why=f"more than {MAX_BODIES} loop bodies, at {self.attempt.location(tx)}")

    def for_iter(self, tx: Any) -> None:
        self._advancing.append(tx)
        known = self._iterators.get(id(tx.stack[-1]))
        if known is not None:
            if known[1].represented and known[1].done == len(known[1].handed):
                self._next_representative(tx, known[1])
            self._next = (tx, known[1], tx.stack[-1])

    def _next_representative(self, tx: Any, loop: Loop) -> None:
        """Hand out the first row that goes another way than those before, or end the loop."""
        try:
            known = {loop.outcomes(row): row for row, _ in reversed(loop.handed)}
            classes: dict[int | None, list[int]] = {}
            for row in range(loop.count):
                classes.setdefault(known.get(loop.outcomes(row)), []).append(row)
        except Exception:  # whatever the user's condition raises on plain tensors
            self.attempt.unroll("a condition on the row cannot be evaluated for other rows")
        following = classes[None][0] if None in classes else modules.witness_wanted(loop, classes)
        if following is not None:
            iterator = values.realized(tx.stack[-1])
            iterator.items = [*iterator.items, self._hand_out(tx, loop, loop.like, following)]
            return
        loop.finished = True
        for assumption in loop.assumptions:
            assumption.members = tuple(classes.get(assumption.row, (assumption.row,)))
        if loop.lists:
            problem = modules.bind(tx, loop)
            if problem is not None:
                self.attempt.unroll(problem)

    def read(self, tx: Any, variable: Any) -> Any:
        """A number is read out of a tensor: where that is a representative's row, Python may do anything with it but select a module.

        ``e = row.item()`` with an ``e`` that is nothing but an index of tensors stays the row: the tensor returned is that number.
        """
        node = values.tensor_node(variable)
        if node is None or symbols.known_tensor(node.meta.get("example_value")) is None:
            return None
        loops = self.attempt.represented()
        if len(loops) == 1 and self._only_indexes(tx, loops[0], node):
            loops[0].numbers.add(node)
            loops[0].assumptions[-1].numbers.add(node)
            return variable
        if loops and (len(loops) > 1 or not modules.selects(tx, loops[0], node)):
            self.attempt.unroll("the body reads the number of its row")
        return None

    def _only_indexes(self, tx: Any, loop: Loop, node: Node) -> bool:
        code, at = self.attempt.code_of(tx), tx.instruction_pointer
        following = code.instructions[at]
        scalar = not node.meta["example_value"].dim()
        return scalar and following.opname == "STORE_FAST" and code.only_indexes(following.argval) and modules.is_row(loop, node)

    def subscript(self, tx: Any) -> None:
        """``container[index]`` is about to run: a row that stands for its number must be the index of a tensor."""
        loops = self.attempt.represented()
        if any(loop.numbers for loop in loops):
            index = values.tensor_node(values.plain(tx.stack[-1]))
            if any(index in loop.numbers for loop in loops) and values.tensor_node(values.realized(tx.stack[-2])) is None:
                self.attempt.unroll("the number of a row is the index of something that is no tensor")

    def formatted(self, tx: Any, inst: Any) -> None:
        """``f"expert_{row}"`` is about to run: the text of a tensor without dimensions is that of its number."""
        at = -2 if inst.opname == "FORMAT_WITH_SPEC" or (inst.opname == "FORMAT_VALUE" and inst.arg & 4) else -1
        if not self.attempt.open or (inst.opname == "FORMAT_VALUE" and inst.arg & 3):
            return
        node = values.tensor_node(values.plain(tx.stack[at]))
        number = symbols.known_tensor(node.meta.get("example_value")) if node is not None else None
        if number is None or number.dim() or number.dtype not in (torch.int64, torch.int32):
            return
        if self.attempt.represented():
            self.attempt.unroll("the body writes the number of its row into a string")
        tx.stack[at] = values.constant(int(number))

    def iterate(self, tx: Any) -> None:
        """The instruction behind GET_ITER or FOR_ITER: remember the iterator, or open the scope of an iteration."""
        if self._advancing and any(t is tx for t in self._advancing):
            self._advancing = [t for t in self._advancing if t is not tx]
            self._element(tx)
        if self._next is None or self._next[0] is not tx:
            return
        _, loop, iterator = self._next
        self._next = None
        if iterator is None:
            top = values.realized(tx.stack[-1])
            if not values.is_list_iterator(top):
                self.attempt.refuse(loop.row(), "this Python iterates in a way that moefuse does not know")
            tx.stack[-1] = top
            self._iterators[id(top)] = (top, loop)
            return
        if loop.done == (len(loop.handed) if loop.represented else loop.count):
            return
        assumption = loop.row()
        loop.done += 1
        loop.assumptions.append(assumption)
        self.scopes.enter(tx, assumption, self._head(tx), tx.stack[:-1], loop)

    def _element(self, tx: Any) -> None:
        """A ``for`` may have got an element of counts whose length depends on data: then this iteration runs if there is one."""
        if len(tx.stack) < 2 or tx.f_code.co_flags & GENERATOR:
            return
        for known in self.attempt.elements:
            at = known.given(*tx.stack[-2:])
            if at is not None and at not in known.done:
                known.done.add(at)
                assumption = Assumption("element", self.attempt.place(tx), self.attempt.location(tx), known.length.subject, row=at)
                self.scopes.enter(tx, assumption, self._head(tx), tx.stack[:-1])
                return

    def _head(self, tx: Any) -> int:
        """The FOR_ITER that has just run."""
        at = tx.instruction_pointer - 1
        while tx.instructions[at].opname != "FOR_ITER":
            at -= 1
        return int(at)

    def _only_for(self, tx: Any) -> bool:
        """Whether the result of the running call is only looped over."""
        code, at = self.attempt.code_of(tx), tx.instruction_pointer
        following = code.instructions[at]
        if following.opname == "GET_ITER":
            return code.plain_for(at)
        return following.opname == "STORE_FAST" and code.only_looped_over(following.argval, at)
