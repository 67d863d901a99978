"""Which expert goes to which rank, by measured load. Pure functions of numbers: every rank computes the same, and none communicates.

Two things take a rank's time: with many tokens the rows of its experts, in tiles, with few the weights of those that are read at all. The
usual measure, rows, is wrong for decoding: there every expert that has a token costs the same. Tiles and weights are added up, as was
measured of small experts.

A rank keeps as many experts as it has, so that no Parameter changes its shape. Experts are swapped, the best pair first, between the rank
that takes longest and others, which moves few of them (EPLB, DeepSeek 2025, packs all of them anew).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moefuse.parallel.cost import products_us, reading_us
from moefuse.parallel.placement import Placement
from moefuse.tuning.problem import power_of_two

ENOUGH = 1.01
"""Ranks are balanced where the busiest takes so many times what they take on average."""
_LIGHT = 4
"""Ranks with the least to do that are asked first for an expert in return."""

TILES = (16, 128)
"""Least and most rows of a tile, which has twice as many as an expert has on average. Tiles of 128 for 512 tokens a rank, 8 of 128 experts
by Zipf(1.2), took 255 us on two H200; balanced by rows, or tiles of 64, it were 266."""
Work = float
"""Microseconds of an expert in a call."""


@dataclass(frozen=True)
class Move:
    """An expert that changes places; slots are ``rank * L + local``."""

    expert: int
    source: int
    target: int


class Parts(NamedTuple):
    """Microseconds of experts in a call.

    Attributes:
        rows: of their rows.
        tiles: of the tiles of these, of which the last ones are not full.
        reads: of reading their weights.
    """

    rows: list[Work]
    tiles: list[Work]
    reads: list[Work]

    @property
    def work(self) -> list[Work]:
        """Tiles and reading."""
        return [tiles + reads for _, tiles, reads in zip(*self, strict=True)]


def parts_of(counts: Sequence[int], calls: int, numbers: int, itemsize: int, tile: int | None = None) -> Parts:
    """What each of E experts takes in a call of a layer.

    Args:
        counts: [E], how often each was chosen, in all calls, by the tokens of all ranks.
        calls: in how many calls that was.
        numbers: of the weights of one expert on one rank.
        itemsize: bytes of one of them.
        tile: rows of one; None: those that kernels take for so many experts.
    """
    total = sum(counts)
    each = total / max(calls, 1)
    tile = tile_of(each / max(len(counts), 1)) if tile is None else tile
    row, read = products_us(1, numbers), reading_us(numbers * itemsize)
    shares = [count / max(total, 1) for count in counts]
    rows = [each * share for share in shares]
    return Parts([n * row for n in rows], [in_tiles(n, tile) * row for n in rows], [(1 - (1 - share) ** each) * read for share in shares])


def tile_of(mean: float) -> int:
    """Rows of a tile where experts have so many on average."""
    least, most = TILES
    return min(max(power_of_two(2 * mean), least), most)


def in_tiles(rows: float, size: int) -> float:
    """Rows of the tiles of an expert that has so many on average, where numbers of rows are about normal."""
    spread = math.sqrt(2 * rows)
    if not spread:
        return 0.0
    full = max(int(rows - 6 * spread) // size, 0)
    above = [0.5 * math.erfc((tile * size + 0.5 - rows) / spread) for tile in range(full, int(rows + 4 * spread) // size + 1)]
    return size * (full + math.fsum(above))


def work_of(counts: Sequence[int], calls: int, numbers: int, itemsize: int) -> list[Work]:
    """What each takes in all."""
    return parts_of(counts, calls, numbers, itemsize).work


def hottest(counts: Sequence[int], most: int) -> tuple[int, ...]:
    """The experts that are chosen most, in their order; of those that are not chosen none."""
    order = sorted(range(len(counts)), key=lambda e: (-counts[e], e))
    return tuple(sorted(e for e in order[:most] if counts[e]))


@dataclass(frozen=True)
class Choice:
    """What becomes of a layer. ``before``, ``after``: microseconds of its busiest rank in a call, by the load; ``copied``: experts that all
    ranks are to have."""

    placement: Placement
    before: Work
    after: Work
    copied: tuple[int, ...] = ()


def chosen(
    before: Placement, counts: Sequence[int], calls: int, expert: tuple[int, int], enough: float = ENOUGH, copies: int = 0
) -> Choice:
    """What a layer gains most by, given (numbers, bytes of one) of an expert.

    Copies are made where the busiest rank is done earlier by more than a layer is worth balancing for, also if rows cost nothing while
    weights are read, and the other way round: 512 tokens of large experts on two H200 took 717 us with a copy, by which rows and weights in
    all were less, and 688 without (``benchmarks/copies.py``).
    """
    parts = parts_of(counts, calls, *expert)
    work = parts.work
    placement = balanced(before, work, enough)
    plain = Choice(placement, max(times(before, work)), max(times(placement, work)))
    if not (copied := hottest(counts, copies)):
        return plain
    others = sum(counts) - sum(counts[e] for e in copied)
    # Of the tokens of each rank a like part.
    tile = tile_of(sum(counts) / max(calls, 1) / len(counts))
    each = parts_of([*(counts[e] for e in copied), others], calls * before.world, *expert, tile)
    also = Parts(*(part[:-1] for part in each))
    rest = Parts(*([0.0 if e in copied else us for e, us in enumerate(part)] for part in parts))
    spread = balanced(before, rest.work, enough)
    after = _busiest(spread, rest, also)
    if all(here * enough < there for here, there in zip(after, _busiest(placement, parts, Parts([], [], [])), strict=True)):
        return Choice(spread, plain.before, after[0], copied)
    return plain


def _busiest(placement: Placement, parts: Parts, also: Parts) -> tuple[Work, Work]:
    """Of the busiest rank, where each computes ``also`` as well: if tiles and reading add up; if rows hide reading, or it them."""
    rows, tiles, reads = ([us + sum(more) for us in times(placement, part)] for part, more in zip(parts, also, strict=True))
    return max(map(sum, zip(tiles, reads, strict=True))), max(map(max, zip(rows, reads, strict=True)))


def times(placement: Placement, work: Sequence[Work]) -> list[float]:
    """Microseconds of each rank in a call."""
    return [sum(work[e] for e in held) for held in placement.ranks]


def balanced(placement: Placement, work: Sequence[Work], enough: float = ENOUGH) -> Placement:
    """A placement whose busiest rank takes no longer than before, and where possible ``enough`` times the mean; each rank has as many
    experts as before. Experts that stay keep their slots."""
    held = [list(rank) for rank in placement.ranks]
    every = times(placement, work)
    while True:
        busiest = max(range(len(every)), key=every.__getitem__)
        if every[busiest] <= enough * sum(every) / len(every):
            break
        others = sorted((r for r in range(len(every)) if r != busiest), key=every.__getitem__)
        swap = _best(held, every, work, busiest, others[:_LIGHT]) or _best(held, every, work, busiest, others[_LIGHT:])
        if swap is None:
            break
        mine, other, its = swap
        given, taken = held[busiest][mine], held[other][its]
        less = work[given] - work[taken]
        every[busiest], every[other] = every[busiest] - less, every[other] + less
        held[busiest][mine], held[other][its] = taken, given
    ranks = tuple(_in_place(before, after) for before, after in zip(placement.ranks, held, strict=True))
    return placement if ranks == placement.ranks else replace(placement, name="balanced", ranks=ranks)


def _best(
    held: Sequence[Sequence[int]], every: Sequence[float], work: Sequence[Work], busiest: int, others: Sequence[int]
) -> tuple[int, int, int] | None:
    """(slot of the busiest rank, another rank, its slot): the swap after which the two take the least; None where each takes longer.

    That is the one whose experts differ by what is nearest to half of the difference of the ranks.
    """
    found, least = None, every[busiest] * (1 - 1e-9)
    for other in others:
        order = sorted(range(len(held[other])), key=lambda its: work[held[other][its]])
        known, half = [work[held[other][its]] for its in order], (every[busiest] - every[other]) / 2
        for mine, expert in enumerate(held[busiest]):
            at = bisect.bisect(known, work[expert] - half)
            for its in order[max(at - 1, 0) : at + 1]:
                less = work[expert] - work[held[other][its]]
                takes = max(every[busiest] - less, every[other] + less)
                if takes < least:
                    found, least = (mine, other, its), takes
    return found


def _in_place(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The experts of a rank, those that stay where they were."""
    new = iter(sorted(set(after) - set(before)))
    return tuple(expert if expert in after else next(new) for expert in before)


def moves(before: Placement, after: Placement) -> list[list[Move]]:
    """What changes places, in rings: each expert of one goes where the next of it was, so that a ring can be moved by itself."""
    slots, at = after.table(), {slot: expert for expert, slot in enumerate(before.table())}
    left = {slot: expert for slot, expert in at.items() if slots[expert] != slot}
    rings = []
    while left:
        slot, ring = next(iter(left)), []
        while slot in left:
            expert = left.pop(slot)
            ring.append(Move(expert, slot, slots[expert]))
            slot = slots[expert]
        rings.append(ring)
    return rings
