"""The steps of a record, and the numbers in which C++ plays them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moefuse.kernels.triton.launch import operations
from moefuse.kernels.triton.launch.driver_launch import laid_out
from moefuse.kernels.triton.launch.together import together

MAKE, SHARE, AT, FIXED, VIEW, ZERO, LAUNCH, CALL, DROP, TURN, COPY, END = range(12)
"""``Do`` in player.cpp."""
FORK, ASIDE, BACK, MEET = range(4)
"""``Turn`` in player.cpp: what is done with a second stream (``beside.py``)."""


class Place(NamedTuple):
    """Where a tensor begins: so many bytes behind what is in a slot."""

    slot: int
    behind: int


class Step(NamedTuple):
    """What is done, with what, the slots that it fills, and the places that it reads.

    ``what``: of MAKE (size, stride, dtype), of LAUNCH the launch, of CALL the names and then numbers, of all else numbers. A TURN to MEET
    reads all that was read, which so is there until then.
    """

    do: int
    what: Any
    made: Sequence[int] = ()
    reads: Sequence[Place] = ()


def written(it: Any, results: Sequence[int], listed: bool) -> tuple[list[int], list[str], list[Any]]:
    """A record (``record.Recorder``) in numbers, the names in it, and the memory that it needs.

    Args:
        results: the slots of what the call returns.
        listed: it returns a list of tensors.

    Raises:
        NotImplementedError: a launch that only Triton can make.
    """
    return _Writer(it, results).all(listed)


class _Writer:
    def __init__(self, it: Any, results: Sequence[int]) -> None:
        self.it, self.results = it, results
        self.last = {place.slot: n for n, step in enumerate(it.steps) for place in step.reads}
        tensors = {place.slot for step in it.steps if step.do in (VIEW, CALL) for place in step.reads}.union(results)
        launched = [(step.made[0], step.what) for step in it.steps if step.do == MAKE and step.made[0] in self.last.keys() - tensors]
        self.places, self.bytes = together(launched)
        self.numbers: list[int] = []
        self.names: list[str] = []
        self.launches: list[int] = []
        self.kept: list[Any] = [*it.kept]
        self.at: dict[Place, int] = {}
        self.count = 0

    def all(self, listed: bool) -> tuple[list[int], list[str], list[Any]]:
        it, numbers = self.it, self.numbers
        drops = self._drops()
        if self.places:
            numbers += (SHARE, it.slot(), self.bytes, len(self.places), *(n for pair in self.places for n in pair))
        for n, step in enumerate(it.steps):
            self._step(step)
            numbers += [number for slot in drops.get(n, ()) for number in (DROP, slot)]
        numbers += (END, int(listed), len(self.results), *self.results)
        head = [it.count, len(it.guards), len(it.fixed), len(numbers), len(self.names) // 2, self.count]
        return [*head, *it.guards, *(n for pair in it.fixed.items() for n in pair), *numbers, *self.launches], self.names, self.kept

    def _drops(self) -> dict[int, list[int]]:
        """The slots of tensors that nobody reads after a step."""
        found: dict[int, list[int]] = {}
        for slot, n in self.last.items():
            if slot >= self.it.arguments and slot in self.it.held and slot not in self.results and slot not in dict(self.places):
                found.setdefault(n, []).append(slot)
        return found

    def _slot(self, place: Place) -> int:
        """A slot with the address of a place."""
        if not place.behind:
            return place.slot
        if place not in self.at:
            self.at[place] = self.it.slot()
            self.numbers += (AT, self.at[place], *place)
        return self.at[place]

    def _step(self, step: Step) -> None:
        numbers = self.numbers
        if step.do == MAKE:
            [slot], (shape, strides, dtype) = step.made, step.what
            wanted = slot in self.last or slot in self.results
            if wanted and slot not in dict(self.places):
                numbers += (MAKE, slot, operations.dtype_code(dtype), len(shape), *shape, *strides)
        elif step.do == LAUNCH:
            laid = laid_out(step.what, [self._slot(place) for place in step.reads])
            self.kept.append((laid, step.what))
            self.launches += laid.numbers
            numbers += (LAUNCH, self.count)
            self.count += 1
        elif step.do == CALL:
            names, what = step.what
            numbers += (CALL, len(self.names) // 2, *what)
            self.names += names
        elif step.do == TURN:
            numbers += (TURN, *step.what)
        elif step.do in (COPY, ZERO):
            numbers += (step.do, *[self._slot(place) for place in step.reads], *step.what)
        else:
            numbers += (step.do, *step.made, *(place.slot for place in step.reads), *step.what)
