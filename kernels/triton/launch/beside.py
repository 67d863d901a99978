"""A second stream within one call, launched or played from a record; of a higher priority: what is sent is under way before programs that
take all room begin.

    beside = Beside(device)     the second stream waits for what was launched so far
    with beside: ...            launches on it
    beside.meet()               what comes now waits for them

Nothing is allocated on it, and what its launches read is held until the streams have met.
"""

from __future__ import annotations

import torch

from moefuse.kernels.triton.launch.record import active
from moefuse.kernels.triton.launch.steps import ASIDE, BACK, FORK, MEET
from moefuse.runtime import overlap


class Beside:
    """Of the current stream. Where kernels are interpreted there is one stream, and all is done in order."""

    def __init__(self, device: torch.device) -> None:
        self.current = self.side = None
        if device.type == "cuda":
            self.current = torch.cuda.current_stream(device)
            self.side = overlap.side_of(self.current, ahead=True)
        self.fork()

    def fork(self) -> None:
        """Have the second stream wait for what was launched since."""
        if self.side is not None:
            self.side.fork.record(self.current)
            self.side.stream.wait_event(self.side.fork)
        _note(FORK, self.side)

    def __enter__(self) -> None:
        _note(ASIDE, self.side)
        if self.side is not None:
            torch.cuda.set_stream(self.side.stream)

    def __exit__(self, *_: object) -> None:
        if self.side is not None and self.current is not None:
            self.side.join.record(self.side.stream)
            torch.cuda.set_stream(self.current)
        _note(BACK, self.side)

    def meet(self) -> None:
        """Have the current stream wait for the second one."""
        if self.side is not None and self.current is not None:
            self.current.wait_event(self.side.join)
        _note(MEET, self.side)


def _note(what: int, side: overlap.Side | None) -> None:
    recorder = active()
    if recorder is not None:
        recorder.turn(what, side)
