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
        """Have the second stream wait for what was launched."""
        if self.side is not None:
            self.side.fork.record(self.current)
            self.side.stream.wait_event(self.side.fork)
        self._note(FORK)

    def __enter__(self) -> None:
        self._note(ASIDE)
        if self.side is not None:
            torch.cuda.set_stream(self.side.stream)

    def __exit__(self, *_: object) -> None:
        if self.side is not None and self.current is not None:
            self.side.join.record(self.side.stream)
            torch.cuda.set_stream(self.current)
        self._note(BACK)

    def meet(self) -> None:
        """Have the current stream wait for the second one."""
        if self.side is not None and self.current is not None:
            self.current.wait_event(self.side.join)
        self._note(MEET)

    def _note(self, what: int) -> None:
        recorder = active()
        if recorder is not None:
            recorder.turn(what, self.side)
