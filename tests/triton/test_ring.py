"""A model of the protocol of ``hopper/ring.py`` as ``products.py`` and ``weight_grads.py`` use it, over random schedules.

The threads of a program (a producer, two groups that multiply) are generators that yield what they wait for; copies, products and draws end
later, as events. Functions have the names of the kernel's. A mutation of each rule shows that the model would find it broken.
"""

from __future__ import annotations

import random
import types
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest

from tests.strategies import THOROUGH

T = TypeVar("T")
Thread = Generator[Callable[[], bool], None, T]
"""Yields a condition without which it does not go on; each yield lets others run."""
SLOTS = 2


class BrokenError(Exception):
    """A rule of the protocol was broken."""


def always() -> bool:
    return True


class Barrier:
    """A phase is over once so many have arrived and what was expected has landed."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.copies = self.done = 0

    def passes(self, parity: int) -> bool:
        """Whether the phase of this parity is over: the running one has the other."""
        return self.done % 2 != parity

    def arrive(self) -> None:
        if self.missing == 0:
            raise BrokenError("more arrivals than a phase has")
        self.missing -= 1
        self._end()

    def expect(self, copies: int) -> None:
        self.copies += copies
        self.arrive()

    def landed(self) -> None:
        if self.copies == 0:
            raise BrokenError("a copy that was not expected")
        self.copies -= 1
        self._end()

    def _end(self) -> None:
        if not (self.missing or self.copies):
            self.done += 1
            self.missing = self.arrivals


@dataclass
class Cell:
    """A buffer: the (tile, step) that it holds, and how many products read it now."""

    holds: tuple[int, int] | None = None
    readers: int = 0

    def overwrite(self, step: tuple[int, int] | None) -> None:
        if self.readers:
            raise BrokenError("a stage is overwritten while it is read")
        self.holds = step


@dataclass(frozen=True)
class Tile:
    """So many steps; so many pieces of its rows have any."""

    steps: int
    live: int


@dataclass(frozen=True)
class Case:
    """What is launched. ``grads``: gradients of weights, whose tiles are shared out beforehand and differ in steps."""

    grads: bool
    form: str
    stages: int
    pieces: int
    tiles: tuple[Tile, ...]
    programs: int

    @property
    def readers(self) -> int:
        return 1 if self.form == "pingpong" else self.pieces


class Machine:
    """Threads and events, of which one random one goes on at a time. Whatever runs, some are slow now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.threads: list[tuple[Thread[None], Callable[[], bool], float]] = []
        self.events: list[Callable[[], None]] = []
        self.speed = 1.0

    def start(self, thread: Thread[None]) -> None:
        self.threads.append((thread, always, self._weight()))

    def later(self, event: Callable[[], None]) -> None:
        self.events.append(event)

    def run(self) -> None:
        """Until all threads are at their ends."""
        while self.threads:
            ready = [i for i, (_, may, _) in enumerate(self.threads) if may()]
            weights = [self.threads[i][2] for i in ready]
            if self.events:
                ready.append(-1)
                weights.append(self.speed)
            if not ready:
                raise BrokenError("a deadlock")
            self._go_on(self.random.choices(ready, weights)[0])
            if self.random.random() < 0.01:
                self.threads = [(thread, may, self._weight()) for thread, may, _ in self.threads]
                self.speed = self._weight()
        while self.events:
            self._go_on(-1)

    def _go_on(self, which: int) -> None:
        if which < 0:
            at = self.random.randrange(len(self.events))
            self.events[at], self.events[-1] = self.events[-1], self.events[at]
            self.events.pop()()
            return
        thread, _, weight = self.threads[which]
        try:
            self.threads[which] = thread, next(thread), weight
        except StopIteration:
            del self.threads[which]

    def _weight(self) -> float:
        return self.random.random() ** 3 + 0.02


def advance(stage: int, phase: int, stages: int) -> tuple[int, int]:
    return (0, phase ^ 1) if stage == stages - 1 else (stage + 1, phase)


def skip(stage: int, phase: int, steps: int, stages: int) -> tuple[int, int]:
    return (stage + steps) % stages, phase ^ ((stage + steps) // stages & 1)


def before(stage: int, stages: int) -> int:
    return stages - 1 if stage == 0 else stage - 1


class Launch:
    """What all programs of a launch share: the counters, which stay for the next one, and what was made."""

    def __init__(self, case: Case, counters: list[int], machine: Machine, wrong: str) -> None:
        self.case, self.counters, self.machine, self.wrong = case, counters, machine, wrong
        self.multiplied: dict[tuple[int, int], list[int]] = {}
        self.stored: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        for number in range(self.case.programs):
            program = Program(self, number)
            consume = program.consume_in_turn if self.case.form == "pingpong" else program.consume_shared
            for thread in (program.produce_grads() if self.case.grads else program.produce(), consume(0), consume(1)):
                self.machine.start(thread)
        self.machine.run()
        expected = {(i, n): list(range(t.steps)) for i, t in enumerate(self.case.tiles) for n in range(t.live)}
        if self.multiplied != expected or self.stored != Counter(expected.keys()):
            raise BrokenError("not every step of every tile once, in its order")
        if self.counters != [0, 0]:
            raise BrokenError(f"counters are {self.counters} after the launch")


class Program:
    """One program: its shared memory and its threads."""

    def __init__(self, launch: Launch, number: int) -> None:
        self.launch, self.number, self.case, self.machine, self.wrong = launch, number, launch.case, launch.machine, launch.wrong
        stages, readers = self.case.stages, self.case.readers
        self.rows = [[Cell() for _ in range(self.case.pieces)] for _ in range(stages)]
        self.weights = [Cell() for _ in range(stages)]
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(1 if self.wrong == "stages have one reader" else readers) for _ in range(stages)]
        self.book: list[tuple[int, ...]] = [()] * SLOTS
        self.announced = [Barrier(1) for _ in range(SLOTS)]
        self.taken = [Barrier(1 if self.wrong == "notes have one reader" else readers) for _ in range(SLOTS)]
        self.turn = [Barrier(1) for _ in range(2)]
        self.running: list[deque[list[Cell]]] = [deque(), deque()]
        self.drawing = 0

    def wait(self, barrier: Barrier, parity: int) -> Thread[None]:
        yield lambda: barrier.passes(parity)

    # The producer.

    def draw(self) -> list[int]:
        """The ticket gets its number later."""
        ticket: list[int] = []
        self.drawing += 1

        def add() -> None:
            ticket.append(self.launch.counters[0])
            self.launch.counters[0] += 1
            self.drawing -= 1

        self.machine.later(add)
        return ticket

    def drawn(self, ticket: list[int]) -> Thread[int]:
        yield lambda: bool(ticket)
        own = 0 if self.wrong == "draws begin at the first tile" else self.case.programs
        return own + ticket[0]

    def end_of_tiles(self) -> Thread[None]:
        counters = self.launch.counters
        # The order "acq_rel" puts this program's draws before.
        if self.wrong != "the end overtakes draws":
            yield lambda: self.drawing == 0
        others = counters[1]
        counters[1] += 1
        yield always
        last = self.case.programs - 1
        if self.wrong == "every program resets" or (others == last and self.wrong != "nobody resets"):
            counters[0] = 0
            yield always
            counters[1] = 0

    def announce(self, slot: int, phase: int, *note: int) -> Thread[tuple[int, int]]:
        if self.wrong != "notes are written over":
            yield from self.wait(self.taken[slot], phase)
        self.book[slot] = note
        yield always
        self.announced[slot].arrive()
        return advance(slot, phase, SLOTS)

    def copy(self, stage: int, live: int, step: tuple[int, int]) -> None:
        """The copies of a step, which land in any order."""
        cells = [self.weights[stage], *self.rows[stage][:live]]
        self.full[stage].expect(1 if self.wrong == "rows are not expected" else len(cells))
        for cell in cells:
            cell.overwrite(None)
            self.machine.later(lambda cell=cell: (cell.overwrite(step), self.full[stage].landed()))  # type: ignore[misc]

    def fill(self, i: int, tile: Tile, stage: int, phase: int) -> Thread[tuple[int, int]]:
        for k in range(tile.steps):
            if self.wrong != "stages are written over":
                yield from self.wait(self.empty[stage], phase)
            self.copy(stage, tile.live, (i, k))
            stage, phase = advance(stage, phase, self.case.stages)
            yield always
        return stage, phase

    def first_phase(self) -> int:
        return 0 if self.wrong == "the producer waits at first" else 1

    def produce(self) -> Thread[None]:
        tiles = self.case.tiles
        stage, phase = 0, self.first_phase()
        slot, slot_phase = 0, 1
        i = self.number
        following = yield from self.drawn(self.draw())
        while i < len(tiles):
            slot, slot_phase = yield from self.announce(slot, slot_phase, i, tiles[i].live)
            ticket = self.draw()
            stage, phase = yield from self.fill(i, tiles[i], stage, phase)
            i = following
            # Behind the last tile nobody needs the number.
            following = 0 if i >= len(tiles) else (yield from self.drawn(ticket))
        yield from self.end_of_tiles()
        yield from self.end(slot, slot_phase)

    def produce_grads(self) -> Thread[None]:
        tiles = self.case.tiles
        stage, phase = 0, self.first_phase()
        slot, slot_phase = 0, 1
        last = 0
        for i in range(self.number, len(tiles), self.case.programs):
            slot, slot_phase = yield from self.announce(slot, slot_phase, i, tiles[i].steps, last)
            stage, phase = yield from self.fill(i, tiles[i], stage, phase)
            last = tiles[i].steps
        yield from self.end(slot, slot_phase)

    def end(self, slot: int, slot_phase: int) -> Thread[None]:
        slot, slot_phase = yield from self.announce(slot, slot_phase, -1, 0, 0)
        if self.case.form == "pingpong" and self.wrong != "one end for two groups":
            yield from self.announce(slot, slot_phase, -1, 0, 0)

    # The groups that multiply.

    def take(self, slot: int, phase: int) -> Thread[tuple[int, ...]]:
        yield from self.wait(self.announced[slot], phase ^ 1 if self.wrong == "notes are read at once" else phase)
        note = self.book[slot]
        if not note:
            raise BrokenError("a note is read that was never written")
        yield always
        self.taken[slot].arrive()
        return note

    def release(self, stage: int, phase: int, steps: int) -> Thread[tuple[int, int]]:
        for _ in range(steps):
            if self.wrong != "unread steps are given back before they come":
                yield from self.wait(self.full[stage], phase)
            if self.wrong != "unread steps are kept":
                self.empty[stage].arrive()
            stage, phase = advance(stage, phase, self.case.stages)
        return stage, phase

    def begin_product(self, g: int, pieces: tuple[int, ...], stage: int, step: tuple[int, int]) -> None:
        """The product reads its stage until an event ends it, those of one group in their order."""
        running = self.running[g]
        cells = [self.weights[stage], *(self.rows[stage][n] for n in pieces)]
        for cell in cells:
            if cell.holds != step:
                raise BrokenError(f"{cell.holds} is read for {step}")
            cell.readers += 1
        running.append(cells)
        for n in pieces:
            self.launch.multiplied[step[0], n].append(step[1])

        def over() -> None:
            for cell in running.popleft():
                cell.readers -= 1

        self.machine.later(over)

    def product_wait(self, g: int, most: int) -> Thread[None]:
        yield lambda: len(self.running[g]) <= most

    def multiply(self, g: int, pieces: tuple[int, ...], i: int, stage: int, phase: int, steps: int) -> Thread[tuple[int, int]]:
        for n in pieces:
            self.launch.multiplied.setdefault((i, n), [])
        for k in range(steps):
            yield from self.wait(self.full[stage], phase)
            self.begin_product(g, pieces, stage, (i, k))
            yield from self.product_wait(g, 2 if self.wrong == "products are not waited for" else 1)
            if self.wrong == "a stage is given back while its product runs":
                self.empty[stage].arrive()
            elif k > 0:
                self.empty[before(stage, self.case.stages)].arrive()
            stage, phase = advance(stage, phase, self.case.stages)
        return stage, phase

    def complete(self, g: int, stage: int, steps: int) -> Thread[None]:
        if self.wrong != "the last product is not waited for":
            yield from self.product_wait(g, 0)
        if self.wrong not in ("the last stage is kept", "a stage is given back while its product runs") and steps > 0:
            self.empty[before(stage, self.case.stages)].arrive()

    def store(self, pieces: tuple[int, ...], i: int) -> Thread[None]:
        for _ in range(self.machine.random.randrange(12)):
            yield always
        self.launch.stored.update((i, n) for n in pieces)

    def consume_shared(self, g: int) -> Thread[None]:
        """Of both kernels: their notes differ."""
        stage, phase = 0, self.consumers_phase()
        slot, slot_phase = 0, 0
        i, *note = yield from self.take(slot, slot_phase)
        while i >= 0:
            live, steps = (2, note[0]) if self.case.grads else (note[0], self.case.tiles[0].steps)
            if live <= g:
                stage, phase = yield from self.release(stage, phase, steps)
            else:
                stage, phase = yield from self.multiply(g, (g,), i, stage, phase, steps)
                yield from self.complete(g, stage, steps)
                yield from self.store((g,), i)
            slot, slot_phase = advance(slot, slot_phase, SLOTS)
            i, *note = yield from self.take(slot, slot_phase)

    def skip(self, stage: int, phase: int, steps: int) -> tuple[int, int]:
        if self.wrong == "steps of the other are not skipped":
            return stage, phase
        to = skip(stage, phase, steps, self.case.stages)
        return (to[0], phase) if self.wrong == "skipped steps do not count for the phase" else to

    def consumers_phase(self) -> int:
        return 1 if self.wrong == "consumers do not wait at first" else 0

    def consume_in_turn(self, g: int) -> Thread[None]:
        """Of both kernels: gradients skip the steps of the tile before when a tile begins, products those of the next one when it ends."""
        stage, phase = 0, self.consumers_phase()
        parity = {"both begin": 1, "nobody begins": 0}.get(self.wrong, 1 - g)
        slot_phase = 0
        each = 0 if self.case.grads or not self.case.tiles else self.case.tiles[0].steps
        if g == 1:
            stage, phase = self.skip(stage, phase, each)
        i, *note = yield from self.take(g, slot_phase)
        while i >= 0:
            live, steps, last = (self.case.pieces, *note) if self.case.grads else (note[0], each, 0)
            stage, phase = self.skip(stage, phase, steps if self.wrong == "a tile's own steps are skipped" else last)
            if self.wrong != "turns are not waited for":
                yield from self.wait(self.turn[g], parity)
            parity ^= 1
            if self.wrong == "turns end before steps are seen":
                self.turn[1 - g].arrive()
            stage, phase = yield from self.multiply(g, tuple(range(live)), i, stage, phase, steps)
            if self.wrong not in ("turns end before steps are seen", "turns do not end"):
                self.turn[1 - g].arrive()
            yield from self.complete(g, stage, steps)
            yield from self.store(tuple(range(live)), i)
            stage, phase = self.skip(stage, phase, each)
            slot_phase ^= 1
            i, *note = yield from self.take(g, slot_phase)


def run(case: Case, seed: int, wrong: str = "") -> None:
    """Two launches, one after the other, with the same counters."""
    counters = [0, 0]
    machine = Machine(seed)
    for _ in range(2):
        Launch(case, counters, machine, wrong).run()


KINDS = {
    "products, shared": (False, "shared", (2,)),
    "products, pingpong": (False, "pingpong", (1, 2)),
    "gradients, shared": (True, "shared", (2,)),
    "gradients, pingpong": (True, "pingpong", (1,)),
}


def case_of(kind: str, stages: int, seed: int) -> Case:
    """A random case: often fewer steps than stages, and of gradients some tiles without any."""
    draw = random.Random(f"{kind}{stages}{seed}")
    grads, form, pieces = KINDS[kind]
    most = draw.choice((1, 3, stages, 10, 20))
    each = draw.randint(1, most)
    many = draw.choice(pieces)
    rows = draw.choice((0.0, 0.4, 1.0))  # how often the second piece has none

    def tile() -> Tile:
        if grads:
            return Tile(draw.choice((0, draw.randint(0, most))), many)
        return Tile(each, 1 if draw.random() < rows else many)

    return Case(grads, form, stages, many, tuple(tile() for _ in range(draw.randint(0, 12))), draw.choice((1, 1, 2, 3)))


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_the_protocol(kind: str, stages: int) -> None:
    for seed in range(1000 if THOROUGH else 60):
        case = case_of(kind, stages, seed)
        try:
            run(case, seed)
        except BrokenError as broken:
            raise AssertionError(f"{broken}: {case}, seed {seed}") from broken


@pytest.mark.parametrize("kind", KINDS)
def test_programs_without_tiles(kind: str) -> None:
    """More programs than tiles, or no tile at all."""
    for tiles in (0, 1, 3):
        case = case_of(kind, 3, tiles)
        steps = case.tiles[0].steps if case.tiles else 2
        run(replace(case, tiles=(Tile(steps, case.pieces),) * tiles, programs=5), tiles)


BOTH, SHARED, IN_TURN = tuple(KINDS), ("products, shared", "gradients, shared"), ("products, pingpong", "gradients, pingpong")
PRODUCTS = ("products, shared", "products, pingpong")
WRONG: dict[str, tuple[str, ...]] = {
    "the producer waits at first": BOTH,
    "consumers do not wait at first": BOTH,
    "stages are written over": BOTH,
    "rows are not expected": BOTH,
    "a stage is given back while its product runs": BOTH,
    "products are not waited for": BOTH,
    "the last product is not waited for": BOTH,
    "the last stage is kept": BOTH,
    "notes are written over": BOTH,
    "notes are read at once": BOTH,
    "stages have one reader": SHARED,
    "notes have one reader": SHARED,
    "unread steps are given back before they come": ("products, shared",),
    "unread steps are kept": ("products, shared",),
    "turns are not waited for": IN_TURN,
    "turns end before steps are seen": IN_TURN,
    "turns do not end": IN_TURN,
    "both begin": IN_TURN,
    "nobody begins": IN_TURN,
    "one end for two groups": IN_TURN,
    "steps of the other are not skipped": IN_TURN,
    "skipped steps do not count for the phase": IN_TURN,
    "a tile's own steps are skipped": ("gradients, pingpong",),
    "draws begin at the first tile": PRODUCTS,
    "nobody resets": PRODUCTS,
    "every program resets": PRODUCTS,
    "the end overtakes draws": PRODUCTS,
}


@pytest.mark.parametrize(("wrong", "kind"), [(wrong, kind) for wrong, kinds in WRONG.items() for kind in kinds])
def test_the_model_catches(wrong: str, kind: str) -> None:
    """Each mutation breaks a rule in some schedule; what is right in the same ones, other tests show."""
    assert fails(wrong, kind), f"the model does not notice: {wrong}"


def fails(wrong: str, kind: str) -> bool:
    for seed in range(300):
        try:
            run(case_of(kind, 2 + seed % 7, seed), seed, wrong)
        except BrokenError:
            return True
    return False


def test_the_arithmetic_is_the_kernels() -> None:
    """The kernel's own functions, run by Python, against the model's."""
    from moefuse.kernels.triton.hopper.available import known

    if not known():
        pytest.skip("this Triton has no Gluon that the kernels are written for")
    from moefuse.kernels.triton.hopper import ring

    def python(function: Any) -> Any:
        where = types.SimpleNamespace(where=lambda which, yes, no: yes if which else no)
        return types.FunctionType(function.fn.__code__, {"gl": where})

    assert ring.SLOTS.value == SLOTS
    for stages in range(2, 9):
        for stage in range(stages):
            assert python(ring.before)(stage, stages) == before(stage, stages)
            for phase in (0, 1):
                assert python(ring.advance)(stage, phase, stages) == advance(stage, phase, stages)
                for steps in range(40):
                    assert python(ring.skip)(stage, phase, steps, stages) == skip(stage, phase, steps, stages)
