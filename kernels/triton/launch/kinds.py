"""What a record depends on of the arguments of a call, as keys of a dictionary."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from torch import Tensor

from moefuse.kernels.triton.launch.nested import SEQUENCES

_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))


def kind_of(value: Any, tensors: list[Any]) -> Any:
    """What a record depends on of one argument, whose tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15
    if not isinstance(value, SEQUENCES):
        return value
    if type(value) is list and len(value) > 1 and isinstance(value[0], Tensor):
        tensors += value
        return kind_of_list(value, [*map(Tensor.data_ptr, value)])
    return tuple([kind_of(v, tensors) for v in value])


def kind_of_list(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Any:
    """The same of a list with a tensor for each expert, whose shapes and dtypes are equal (the op checks them)."""
    # One pass of each kind over the tensors is quicker than one tuple per tensor, and quickest where their shape says it all.
    first, every = tensors[0], None
    if min(first.shape) < 2 or not all(map(Tensor.is_contiguous, tensors)):
        strides = {*map(Tensor.stride, tensors)}
        every = strides.pop() if len(strides) == 1 else tuple(map(Tensor.stride, tensors))
    return len(tensors), first.dtype, first.shape, every, _aligned(tuple(addresses))


@functools.lru_cache(maxsize=4096)
def _aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of 16. Known ones are found in a sixth of the time that looking at each takes."""
    return not any(address & 15 for address in addresses)


def exact_kinds(data: Sequence[Tensor | list[Tensor]], tensors: Sequence[Tensor], addresses: Sequence[int]) -> Iterable[Any]:
    """The kind of each argument where nothing has been checked: shape, strides, dtype, device and alignment of every tensor.

    Args:
        data: tensors and lists of tensors.
        tensors, addresses: all of them, and where they begin, in the order of ``data``.
    """
    at = 0
    for value in data:
        if isinstance(value, Tensor):
            yield value.dtype, value.shape, value.stride(), value.device, addresses[at] & 15
            at += 1
            continue
        end = at + len(value)
        yield _exact_kind(value, addresses[at:end]) if len(value) > 1 else tuple(exact_kinds(value, value, addresses[at:end]))
        at = end


def _exact_kind(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Any:
    shapes = _runs(map(_SHAPE, tensors))
    strides = None  # follow from the shape of a contiguous tensor, but those of dimensions without a second element
    if any(min(shape, default=0) < 2 for shape, _ in shapes) or not all(map(Tensor.is_contiguous, tensors)):
        strides = _runs(map(Tensor.stride, tensors))
    return shapes, strides, _runs(map(_DTYPE, tensors)), _runs(map(_DEVICE, tensors)), _alignments(tuple(addresses))


def _runs(values: Iterable[Any]) -> tuple[Any, ...]:
    """Each value with how many times it follows itself: as much as all values say, and short where a list holds experts."""
    every = [*values]
    if len({*every}) == 1:
        return ((every[0], len(every)),)
    return tuple([(value, len([*same])) for value, same in groupby(every)])


@functools.lru_cache(maxsize=4096)
def _alignments(addresses: Sequence[int]) -> Any:
    """What each address is beyond a multiple of 16; 0 if none is."""
    return tuple([address & 15 for address in addresses]) if any(address & 15 for address in addresses) else 0
