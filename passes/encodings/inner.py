"""Tensors of a class of their own that are made of others, by their own flattening: what they are made of, and others of their class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private

Path = tuple[str, ...]
Fill = Callable[["Inner"], Tensor]


@dataclass(frozen=True, eq=False)
class Inner:
    """One of the plain tensors that a tensor is made of, and the attributes that lead to it."""

    path: Path
    value: Tensor

    @property
    def name(self) -> str:
        return ".".join(self.path)


def is_made_of_others(value: object) -> bool:
    """Whether a tensor has no numbers of its own, and says which tensors have them."""
    return isinstance(value, Tensor) and _torch_private.made_of_others(value) is not None


def inner(value: Any, path: Path = ()) -> Iterator[Inner]:
    """The plain tensors that a tensor is made of, in its own order."""
    names = _torch_private.made_of_others(value)
    if names is None:
        yield Inner(path, value)
    for name in names or ():
        yield from inner(getattr(value, name), (*path, name))


def kind(value: Any) -> tuple[object, ...]:
    """Equal for tensors that differ in their numbers alone: class, what it notes beside tensors, and what they are made of, in layout."""
    names = _torch_private.made_of_others(value)
    own = (value.dtype, tuple(value.shape), value.stride(), value.device)
    if names is None:
        return own
    notes = repr(value.__tensor_flatten__()[1])
    return (type(value), *own, notes, *((name, kind(getattr(value, name))) for name in names))


def like(value: Any, fill: Fill, sizes: tuple[int, ...] | None = None, path: Path = ()) -> Any:
    """A tensor of the same class and with the same notes, of tensors that ``fill`` gives; of other ``sizes``, if these are.

    Raises:
        Exception: whatever the class says of such tensors.
    """
    names = _torch_private.made_of_others(value)
    if names is None:
        return fill(Inner(path, value))
    notes = value.__tensor_flatten__()[1]
    parts = {name: like(getattr(value, name), fill, None, (*path, name)) for name in names}
    shape = torch.Size(value.shape if sizes is None else sizes)
    strides = value.stride() if sizes is None else torch.empty(shape, device="meta").stride()
    return type(value).__tensor_unflatten__(parts, notes, shape, strides)


__all__ = ["Fill", "Inner", "Path", "inner", "is_made_of_others", "kind", "like"]
