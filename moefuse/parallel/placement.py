"""Where each expert lives. Pure functions of numbers: every rank computes the same table, and none of them communicates.

E experts, P ranks, L slots per rank (the most experts that any rank holds). Slot ``rank * L + local`` is the ``local``-th expert of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moefuse.errors import ParallelError


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds, in the order of its local weights.

    Attributes:
        name: ``"linear"``, ``"round_robin"`` or ``"explicit"``.
        ranks: for each rank its experts; every expert stands exactly once.

    Raises:
        ParallelError: an expert is missing, or stands twice.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = [e for rank in self.ranks for e in rank]
        if sorted(held) != list(range(len(held))):
            wrong = sorted({e for e in held if held.count(e) > 1} | (set(range(max(held, default=0) + 1)) - set(held)))
            raise ParallelError(
                f"a placement holds every expert once: of {max(held, default=0) + 1} experts, {wrong} are missing or doubled"
            )

    @property
    def experts(self) -> int:
        """E."""
        return sum(len(rank) for rank in self.ranks)

    @property
    def world(self) -> int:
        """P."""
        return len(self.ranks)

    @property
    def slots(self) -> int:
        """L."""
        return max((len(rank) for rank in self.ranks), default=0)

    @property
    def in_order(self) -> bool:
        """Whether the ranks have the blocks that ``Shard(0)`` of a DTensor means, of equal sizes but for the last ones."""
        return self.ranks == linear(self.experts, self.world).ranks

    def table(self) -> list[int]:
        """[E]: the slot of each expert."""
        out = [-1] * self.experts
        for rank, held in enumerate(self.ranks):
            for local, expert in enumerate(held):
                out[expert] = rank * self.slots + local
        return out

    def order(self) -> list[int]:
        """[E]: the experts as the ranks hold them, one rank behind the other."""
        return [e for rank in self.ranks for e in rank]

    def __str__(self) -> str:
        if self.name == "round_robin":
            return "round robin"
        return " | ".join(_spans(rank) for rank in self.ranks)


def linear(experts: int, world: int) -> Placement:
    """Blocks of ceil(E / P), as ``Shard(0)`` of a DTensor cuts them, so that checkpoints are torch's: 60 on 8 is seven times 8, then 4."""
    size = -(-experts // world)
    return Placement("linear", tuple(tuple(range(min(r * size, experts), min((r + 1) * size, experts))) for r in range(world)))


def round_robin(experts: int, world: int) -> Placement:
    """Expert e on rank e mod P."""
    return Placement("round_robin", tuple(tuple(range(rank, experts, world)) for rank in range(world)))


def explicit(owners: Sequence[int], world: int) -> Placement:
    """Expert e on rank ``owners[e]``.

    Raises:
        ParallelError: a rank that does not exist.
    """
    wrong = sorted({r for r in owners if not 0 <= r < world})
    if wrong:
        raise ParallelError(f"placement names rank {wrong[0]}, and the mesh has ranks 0 to {world - 1}")
    return Placement("explicit", tuple(tuple(e for e, owner in enumerate(owners) if owner == rank) for rank in range(world)))


def placed(placement: str | Sequence[int] | Placement, experts: int, world: int) -> Placement:
    """What the user wrote, for E experts on P ranks.

    Raises:
        ParallelError: an unknown name, or another number of experts or ranks.
    """
    if isinstance(placement, str):
        if placement not in _BY_NAME:
            raise _illegal(placement)
        return _BY_NAME[placement](experts, world)
    try:
        found = placement if isinstance(placement, Placement) else explicit(placement, world)
    except TypeError:
        raise _illegal(placement) from None
    if (found.experts, found.world) != (experts, world):
        raise ParallelError(f"placement is for {found.experts} experts on {found.world} ranks; there are {experts} on {world}")
    return found


def _illegal(placement: object) -> ParallelError:
    return ParallelError(f"placement={placement!r} is not legal; use {', '.join(map(repr, _BY_NAME))}, or a rank for each expert")


_BY_NAME = {"linear": linear, "round_robin": round_robin}


def _spans(held: Sequence[int]) -> str:
    """``0-3, 7``."""
    out: list[list[int]] = []
    for expert in held:
        if out and expert == out[-1][1] + 1:
            out[-1][1] = expert
        else:
            out.append([expert, expert])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in out) or "-"
