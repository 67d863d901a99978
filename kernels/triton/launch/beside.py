"""A second stream within one call, launched or played from a record; of a higher priority: what is sent is under way before programs that
take all room begin.

    beside = Beside(device)     the second stream waits for what was launched so far
    with beside: ...            launches on it
    beside.meet()               what comes now waits for them: for those of the last block, or of an earlier one

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
        self.left = -1
        if self.side is not None:
            self.side.fork.record(self.current)
            self.side.stream.wait_event(self.side.fork)
        self._note(FORK, None if self.side is None else self.side.fork)

    def __enter__(self) -> None:
        self.left += 1
        self._note(ASIDE, None)
        if self.side is not None:
            torch.cuda.set_stream(self.side.stream)

    def __exit__(self, *_: object) -> None:
        event = self._event(self.left)
        if self.side is not None and self.current is not None and event is not None:
            event.record(self.side.stream)
            torch.cuda.set_stream(self.current)
        self._note(BACK, event)

    def meet(self, block: int | None = None) -> None:
        """Have the current stream wait for the second one, up to the end of a block since the fork; of the last one if none is named."""
        event = self._event(self.left if block is None else block)
        if self.current is not None and event is not None:
            self.current.wait_event(event)
        self._note(MEET, event)

    def _event(self, block: int) -> torch.cuda.Event | None:
        return None if self.side is None else (self.side.join, *self.side.more)[block]

    def _note(self, what: int, event: torch.cuda.Event | None) -> None:
        recorder = active()
        if recorder is not None:
            stream = 0 if self.side is None else self.side.stream.cuda_stream
            recorder.turn(what, stream, 0 if event is None else event.cuda_event, self.side)
