"""Tensors that are kept between calls, and therefore must not lie in memory that belongs to one of them.

``torch.compile(mode="reduce-overhead")`` runs a model once before it records it, on a stream of its own and with everything that the
thread allocates in the pool of the graph; whatever of that still lives when the run is over is an error there. A user's own pool would
be kept alive by one small table. Pools are chosen by thread, so another thread allocates from the memory that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """``make()``, which returns tensors on ``device`` that outlive the call. Work that it launches is in order on the current stream.

    Not for use while a graph is recorded: what is written there holds nothing before that graph has run.
    """
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
