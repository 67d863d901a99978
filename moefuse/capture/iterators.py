"""Iterators as instructions see them: those that an instruction may take items from, and those that it makes."""

from __future__ import annotations

from typing import Any

from moefuse.capture.bytecode import CONSUMED, kind
from moefuse.capture.dynamo import creation_clock, lists, modules, values

_MAKES = frozenset(("GET_ITER", "GET_YIELD_FROM_ITER"))


class Iterators:
    """Those of one attempt at a frame, while scopes are open."""

    def __init__(self) -> None:
        self._making: Any = None

    def before(self, tx: Any, inst: Any) -> list[Any]:
        """The iterators that an instruction may take items from: what it works on, or gives to a function that Dynamo does not trace."""
        if self._making is tx:
            self._making = None
            creation_clock.record(values.plain(tx.stack[-1]))
        found = kind(inst)
        if inst.opname in _MAKES or (found == "call" and lists.calls_iter(tx, inst)):
            self._making = None if values.iterates(tx.stack[-1]) else tx
            return []
        if inst.opname in CONSUMED:
            place = CONSUMED[inst.opname]
            return [v for v in map(values.plain, tx.stack[-place:][:1]) if values.iterates(v)]
        callee, given = lists.call(tx, inst) if found in ("call", "spread") else (None, [])
        return [] if modules.inlines(callee) else [v for v in given if values.iterates(v)]
