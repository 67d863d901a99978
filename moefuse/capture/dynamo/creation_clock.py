"""When the objects of a traced program were made, on a clock that counts such events."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

_clock = itertools.count(1)
_created: dict[int, tuple[Any, int]] = {}


def now() -> int:
    """Later than everything made so far, earlier than everything made from now on."""
    return next(_clock)


def record(made: Any) -> None:
    """Remember when something was made. Not as an attribute: Dynamo copies a variable by calling its class with all of its attributes."""
    _created[id(made)] = weakref.ref(made, functools.partial(_forget, id(made))), next(_clock)


def _forget(key: int, dead: Any) -> None:
    if _created.get(key, (None, 0))[0] is dead:
        del _created[key]


def created_inside(variable: Any, clock: int) -> bool:
    """Whether the program made this object itself, and after ``clock``."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    kind = variable.mutation_type
    return isinstance(kind, ValueMutationNew | AttributeMutationNew) and getattr(kind, "moefuse_created", 0) > clock


def iterator_created_inside(iterator: Any, clock: int) -> bool:
    """Whether the program made this iterator, or started this generator's frame, after ``clock``."""
    if getattr(iterator, "mutation_type", None) is not None and created_inside(iterator, clock):
        return True
    known, created = _created.get(id(iterator), (None, 0))
    return known is not None and known() is iterator and created > clock and getattr(iterator, "source", None) is None
