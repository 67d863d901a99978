"""A model of the protocol of ``hopper/ring.py`` as ``products.py`` and ``weight_grads.py`` use it.

The threads of a program (a producer, two groups that multiply) are those of a :class:`Machine`; copies, products and draws end later, as
events. Functions have the names of the kernel's. ``wrong`` breaks one rule.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from tests.triton.ring_machine import Barrier, BrokenError, Cell, Machine, Thread, always

SLOTS = 2


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
