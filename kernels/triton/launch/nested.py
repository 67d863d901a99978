"""Tensors in lists and tuples of arguments, and what stands for them in a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

SEQUENCES = (list, tuple)


class Slot(int):
    """The place of a tensor among those of a call: the arguments, then all results in their order."""


def replaced(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """A value with others in the place of what is of a kind, in lists and tuples as well."""
    if isinstance(value, kind):
        return change(value)
    if not isinstance(value, SEQUENCES):
        return value
    parts = [change(v) if isinstance(v, kind) else replaced(kind, change, v) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value."""
    found: list[Tensor] = []
    replaced(Tensor, found.append, value)
    return found
