"""Tensors that are kept between calls, and therefore must not lie in memory that belongs to one of them.

``torch.compile(mode="reduce-overhead")`` runs a model once before it records it, on a stream of its own and with everything that the
thread allocates in the pool of the graph; whatever of that still lives when the run is over is an error there. A user's own pool would
be kept alive by one small table. Pools are chosen by thread, so another thread allocates from the memory that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def kept(known: dict[K, T], key: K, device: torch.device, make: Callable[[], T]) -> T:
    """``known[key]``: tensors on ``device``, from ``make()`` the first time.

    While a graph is recorded they are made and not kept: they hold nothing before that graph has run.
    """
    found = known.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make()
    found = known[key] = apart(device, make)
    return found


def apart(device: torch.device, make: Callable[[], T]) -> T:
    """``make()`` outside of every pool, what torch itself keeps of it too. Work that it launches is in order on the current stream."""
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)
    if stream == torch.cuda.default_stream(device):
        return make()

    def elsewhere() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(elsewhere).result()
