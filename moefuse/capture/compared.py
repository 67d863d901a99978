"""Numbers that only the run knows, asked for by ``in`` and ``is``: to Dynamo a symbolic number is unlike all others."""

from __future__ import annotations

from typing import Any

from moefuse.capture.attempt import Attempt
from moefuse.capture.dynamo import values


def asked(attempt: Attempt, tx: Any, kind: str) -> Any:
    """``is`` or ``in`` is about to run, of what lies on the stack; its answer where Dynamo would find another."""
    return _identity(attempt, tx) if kind == "identity" else _contains(attempt, tx)


def _identity(attempt: Attempt, tx: Any) -> None:
    # Equal small numbers are one object.
    if all(map(values.number_like, tx.stack[-2:])):
        _of_the_run(attempt, tx, tx.stack[-2:])
        # Dynamo's own code asks by == as well.
        if not any(map(values.of_the_run, tx.stack[-2:])) and not values.polyfilled(tx.f_code):
            tx.stack[-2:] = map(values.settled, tx.stack[-2:])


def _contains(attempt: Attempt, tx: Any) -> Any:
    # Dynamo looks for a constant among the constants alone, and so says of symbolic numbers that none is equal.
    search, container = map(values.realized, tx.stack[-2:])
    items = values.members(container)
    _of_the_run(attempt, tx, [*items, search] if items else [])
    if not values.is_constant(search) or not any(map(values.symbolic, items)):
        return None
    found = values.contains(tx, items, search)
    negated = tx.instructions[tx.instruction_pointer].argval == 1
    tx.stack[-2:] = [values.constant(0), values.new_tuple([])]
    return values.negated(tx, found) if negated else found


def _of_the_run(attempt: Attempt, tx: Any, variables: list[Any]) -> None:
    if attempt.active and any(map(values.of_the_run, variables)):
        attempt.tell(tx, "this question", "it asks for such a number by `in` or `is`; compare with == instead")
        attempt.retreat([], why="a symbolic number is asked for by `in` or `is`")
