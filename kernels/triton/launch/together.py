"""One allocation for small arrays that only launches see: an allocation costs the host as much as a launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SMALL, MOST, ALIGNED = 1 << 17, 1 << 19, 256
"""Bytes of the largest such array, and of all (others are let go of after their last use); what each begins at a multiple of."""


def together(arrays: Iterable[tuple[int, Any]]) -> tuple[list[tuple[int, int]], int]:
    """(where each small array begins, bytes of all); nothing, where there are no two.

    Args:
        arrays: slots with (size, stride, dtype).
    """
    places, end = [], 0
    for slot, kind in arrays:
        size = extent(*kind)
        if size <= SMALL and end + size <= MOST:
            places.append((slot, end))
            end += -(-size // ALIGNED) * ALIGNED
    return (places, max(end, 1)) if len(places) > 1 else ([], 0)


def extent(size: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> int:
    """Bytes from the first element to the last."""
    if 0 in size:
        return 0
    return int((1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))) * dtype.itemsize)
