"""Lists that grow in a scope: ``outputs.append(expert(rows))`` behind ``if n == 0: continue``, or a comprehension with an ``if``.

Whether an expert without tokens adds its empty rows makes no difference to ``torch.cat``, and to hardly anything else. So a list that
grew in a scope may be joined, be appended to, and be asked whether it is empty; whatever else looks into it is a refusal.
"""

from __future__ import annotations

from typing import Any

import torch

from moefuse.capture.attempt import Attempt
from moefuse.capture.bytecode import empties
from moefuse.capture.dynamo import lists, values
from moefuse.passes.graph.assumptions import Assumption

_JOINS = (torch.cat, torch.concat, torch.concatenate)


class Appends:
    """The lists of one attempt at a frame that have grown in a scope."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._now: tuple[Any, Any] | None = None
        self._allowed = False
        self._first: dict[int, Assumption] = {}
        self._kept: list[Any] = []

    def before(self, tx: Any, at: int) -> None:
        """An instruction is about to run that may append to a list, or look into one."""
        inst = tx.instructions[at]
        self._now, self._allowed = None, False
        if inst.opname == "CALL" and (self.attempt.open or self._first):
            self._now = lists.appends(tx, inst)
        elif inst.opname == "LIST_APPEND" and (self.attempt.open or self._first):
            self._now = values.realized(tx.stack[-1 - inst.arg]), tx.stack[-1]
        if not self._first:
            return
        if self._now is not None:
            self._allowed = True
        elif inst.opname.startswith("CALL"):
            function = lists.callee(tx, inst)
            self._allowed = function in _JOINS or (function is len and self._asks(tx, at + 1, tx.stack[-1]))
        elif (inst.opname == "TO_BOOL" or "JUMP" in inst.opname) and tx.stack and self._asks(tx, at, tx.stack[-1]):
            tx.stack[-1] = values.constant(True)

    def takes(self, variable: Any, assumption: Assumption) -> bool:
        """Whether a change of an old object in a scope is a tensor appended to a list; remembers it."""
        if self._now is None or self._now[0] is not variable:
            return False
        node = values.tensor_node(values.plain(self._now[1]))
        if node is None:
            return False
        assumption.appended.append(node)
        if id(variable) not in self._first:
            self._first[id(variable)], self._allowed = assumption, True
            self._kept.append(variable)
            lists.watch(variable, lambda: self._looked(assumption))
        return True

    def _looked(self, assumption: Assumption) -> None:
        if not self._allowed:
            self.attempt.refuse(assumption, "the list that it appends to is looked into")

    def _asks(self, tx: Any, at: int, variable: Any) -> bool:
        """Whether what follows only asks if a list is empty; assumes that it is not."""
        variable = values.plain(variable)
        if not lists.watches(variable) or not empties(tx.instructions, at):
            return False
        nodes = [values.tensor_node(values.plain(v)) for v in vars(variable)["items"]]
        place, location = self.attempt.place(tx), self.attempt.location(tx)
        if None in nodes or not nodes:
            self.attempt.refuse(Assumption("list", place, location, None), "it asks for the length of a list of other things than tensors")
        self.attempt.assume(tx, Assumption("list", place, location, nodes[0], items=tuple(nodes)))  # type: ignore[arg-type]
        return True
