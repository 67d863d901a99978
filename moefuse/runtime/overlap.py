"""Work on a side stream, beside what the current stream does: it forks from it, and joins it later.

What makes it right:

* **Inputs**: the side stream waits for everything that the current stream was given before the fork; the caller holds its inputs until
  after the join, and nothing is written over them between.
* **Buffers**: what the side work allocates comes from the side stream's own memory, so neither is ever given a buffer that the other
  one still uses. A buffer freed there is used again only by later side work, which waits for a later fork, and the fork stands behind
  every reader of it: a current stream has a side stream of its own. (``record_stream`` would say the same to the allocator by an event
  for each tensor and call.)
* **CUDA graphs**: fork and join are events, which capture turns into edges; no stream is waited for by the host.
* **Collectives** never run here: the side work is one expert that every token takes. What goes ahead (``side_of``) is of one call, which
  ends when the streams have met; it may send rows, for which the other rank waits by a flag and no collective.

MOEFUSE_OVERLAP=0 forbids it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse.machine import environment

Work = Callable[[], Tensor]


@dataclass(frozen=True)
class Side:
    """A side stream and its two events, which are recorded anew in each call."""

    stream: torch.cuda.Stream
    fork: torch.cuda.Event
    join: torch.cuda.Event


_SIDES: dict[tuple[int, int, bool], Side] = {}
"""By device and current stream; and whether it goes ahead."""


def side_of(current: torch.cuda.Stream, ahead: bool = False) -> Side:
    """The side stream of a stream; ``ahead``: another one, whose programs find room before those of the stream."""
    key = current.device_index, current.cuda_stream, ahead
    side = _SIDES.get(key)
    if side is None:
        stream = torch.cuda.Stream(current.device, priority=-1 if ahead else 0)
        side = _SIDES[key] = Side(stream, torch.cuda.Event(), torch.cuda.Event())
    return side


def enabled() -> bool:
    """Whether the environment allows it; read on every call, as it is what people set to find out."""
    return not environment.is_off("MOEFUSE_OVERLAP")


def fork(device: torch.device, work: Work) -> Tensor:
    """work() on the side stream. Nothing may read the result, or write what the work reads, on the current stream before :func:`meet`."""
    current = torch.cuda.current_stream(device)
    side = side_of(current)
    side.fork.record(current)
    side.stream.wait_event(side.fork)
    with torch.cuda.stream(side.stream):
        try:
            return work()
        finally:  # a capture must not end with a stream that never came back, whatever was raised
            side.join.record(side.stream)


def meet(device: torch.device) -> None:
    """Have the current stream wait for what was forked from it."""
    current = torch.cuda.current_stream(device)
    current.wait_event(side_of(current).join)
