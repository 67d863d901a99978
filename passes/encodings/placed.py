"""How a tensor may hold a weight, or its scales, by shapes alone: as which packing, as which blocks, and where in it they stand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import NAMED, Packing

_BYTES: tuple[tuple[int, ...], ...] = ((0, 4), (4, 0))
_WORDS: tuple[tuple[int, ...], ...] = (tuple(range(0, 32, 4)), (0, 16, 4, 20, 8, 24, 12, 28), *_BYTES)
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


@dataclass(frozen=True)
class Form:
    """A weight as it seems: its sizes, and which of its dimensions are those of the experts (where it has all), features and inputs."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def logical(self) -> tuple[int, ...]:
        """[E, N, K] or [N, K]."""
        return self.turned(self.sizes)

    def turned(self, of: tuple[int, ...]) -> tuple[int, ...]:
        """What there is of each dimension, in the order of the op."""
        return tuple(of[d] for d in self.order)

    def as_it_is(self, of: tuple[int, ...]) -> tuple[int, ...]:
        """The opposite of :meth:`turned`."""
        return tuple(of[self.order.index(d)] for d in range(len(of)))


def named(dtype: torch.dtype) -> list[str]:
    """What numbers of a dtype may stand for as they are."""
    own = [name for name, known in NAMED.items() if known == dtype]
    return [*own, "e4m3", "e5m2", "s8"] if dtype == torch.uint8 else own


def packings(dtype: torch.dtype) -> list[Packing]:
    """How numbers of a dtype may hold several codes."""
    ways = {torch.int32: _WORDS, torch.uint8: _BYTES, torch.int8: _BYTES}.get(dtype, ())
    return [Packing(axis, shifts, halves) for shifts in ways for axis in (1, 0) for halves in (False, True)]


def storage_in(form: Form, storage: Tensor, packing: Packing | None) -> Layout | None:
    """Where the codes of a weight [..., N', K'] stand in a storage; None if it is no such."""
    words = form.logical if packing is None else packing.words(form.logical)
    if packing is not None and form.logical[packing.axis - 2] % packing.per:
        return None
    held = form.as_it_is(words)
    if tuple(storage.shape) == held:
        return words, form.turned(storage.stride())
    return (words, form.turned(rows_of(held))) if storage.numel() == math.prod(words) and storage.is_contiguous() else None


def scales_in(form: Form, scale: Tensor) -> Iterator[tuple[tuple[int, int], Layout]]:
    """Blocks (bn, bk), and where their scales stand in a tensor."""
    seen: set[tuple[tuple[int, int], Layout]] = set()
    for held, strides in _shapes(form, scale):
        n, k = form.logical[-2:]
        sizes, steps = form.turned(held), form.turned(strides)
        if len(sizes) == 3 and sizes[0] != form.logical[0]:
            sizes, steps = (form.logical[0], *sizes[1:]), (0, *steps[1:])
        if n % sizes[-2] or k % sizes[-1]:
            continue
        block = (0 if sizes[-2] == 1 else n // sizes[-2], 0 if sizes[-1] == 1 else k // sizes[-1])
        found = block, (sizes, tuple(0 if size == 1 else step for size, step in zip(sizes, steps, strict=True)))
        if found not in seen:
            seen.add(found)
            yield found


def _shapes(form: Form, scale: Tensor) -> Iterator[Layout]:
    """The shapes that scales may have in the dimensions of a weight, one each as they are, with strides."""
    shape, whole = tuple(scale.shape), form.sizes
    if len(shape) == len(whole) and all(size and not n % size for n, size in zip(whole, shape, strict=True)):
        yield shape, scale.stride()
    if not scale.is_contiguous():
        return
    # One after another: groups of the last dimension, or one for each entry of the first ones.
    for kept in range(len(whole) + 1):
        lead = math.prod(whole[:kept])
        if lead and not scale.numel() % lead:
            more = scale.numel() // lead
            held = (*whole[:kept], *((more,) if kept < len(whole) else ()), *(1 for _ in range(len(whole) - kept - 1)))
            if kept == len(whole) - 1 or more == 1:
                yield held, rows_of(held)
    if scale.numel() == whole[-1]:
        held = (*(1 for _ in whole[:-1]), whole[-1])
        yield held, rows_of(held)


def rows_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


__all__ = ["Form", "Layout", "named", "packings", "scales_in", "storage_in"]
