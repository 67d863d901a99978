"""Experts that change ranks, between two calls: weights first, then the table that says where they are.

Nothing that a compiled graph holds is replaced: weights and table keep their addresses, so that CUDA graphs go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse.errors import ParallelError
from moefuse.parallel.balance import Move, balanced, moves, unbalance, work_of
from moefuse.parallel.checks import in_optimizer
from moefuse.parallel.placement import Placement
from moefuse.parallel.shard import Held, held_of, holding
from moefuse.parallel.where import Where
from moefuse.runtime import collectives
from moefuse.runtime.groups import Group, Terms

Load = Mapping[str, Tensor | Sequence[Sequence[int]] | Sequence[int]]
"""Layer -> [calls, E] or [E]: how often each expert was chosen, by the tokens of this rank."""

_STAGED = 64 << 20
"""Bytes of weights that wait at a time on their way from a rank and on their way to it."""


@dataclass(frozen=True)
class Balanced:
    """What becomes of a layer. ``before``, ``after``: how many times longer than on average its busiest rank takes, by the load."""

    where: Where
    placement: Placement
    before: float
    after: float


def planned(modules: Iterable[nn.Module], load: Load, enough: float) -> list[Balanced]:
    """What is to be moved, the layers that gain most first; a collective call. All ranks come to the same."""
    found = []
    for module in dict.fromkeys(modules):
        held = held_of(module)
        counts = _counts(held.where, load) if held is not None and held.where.terms else None
        if held is None or counts is None:
            continue
        _may_move(held.where)
        total, calls = _of_all(held.where, module, counts)
        work = work_of(total, calls, *_expert(module, held))
        placement = balanced(held.where.placement, work, enough)
        if placement is not held.where.placement:
            found.append(Balanced(held.where, placement, unbalance(held.where.placement, work), unbalance(placement, work)))
    return sorted(found, key=lambda one: one.after - one.before)


def _counts(where: Where, load: Load) -> Tensor | None:
    """[calls, E] of a layer; a report may name a module in it or around it."""
    named = [name for name in load if f"{name}.".startswith(f"{where.layer}.") or f"{where.layer}.".startswith(f"{name}.") or not name]
    if not named:
        return None
    found = torch.as_tensor(load[where.layer if where.layer in load else max(named, key=len)], device="cpu")
    counts = found[None] if found.dim() == 1 else found
    if counts.dim() != 2 or counts.is_floating_point() or counts.shape[1] > where.experts or bool((counts < 0).any()):
        raise ParallelError(f"the load of {where.layer or 'the layer'} has to be counts [calls, {where.experts}], integers from 0 on")
    return nn.functional.pad(counts.long(), (0, where.experts - counts.shape[1]))


def _may_move(where: Where) -> None:
    if where.experts % where.placement.world:
        raise ParallelError(
            f"{where.layer} has {where.experts} experts on {where.placement.world} ranks: balance needs equally many on each"
        )
    for module in holding(where):
        own: list[Any] = [module._parameters[name] for name in _held(module).names.values()]
        if any(p.grad is not None for p in own):
            raise ParallelError(f"experts of {where.layer} have gradients, which stay where they are: balance behind zero_grad()")
        kind = in_optimizer({id(p) for p in own})
        if kind is not None:
            raise ParallelError(
                f"an optimizer ({kind}) has the experts of {where.layer}, and its states do not move: balance is for inference"
            )
        if any(isinstance(p, DTensor) and len(p.placements) != where.mesh.ndim for p in own):
            raise ParallelError(f"FSDP has sharded the experts of {where.layer} once more: balance does not know its shards")


def _of_all(where: Where, module: nn.Module, counts: Tensor) -> tuple[list[int], int]:
    """([E] of the tokens of all ranks, the calls in which they were counted)."""
    parameter: Any = next(p for p in module._parameters.values() if isinstance(p, DTensor))
    sums = torch.cat([counts.sum(0), torch.tensor([len(counts)])]).to(parameter.to_local().device)
    for dim in range(where.mesh.ndim):
        collectives.all_reduce(sums, where.mesh.get_group(dim))
    *total, calls = sums.tolist()
    # Each rank has counted the same calls, and where ranks have equal tokens, all of them the same tokens.
    ranks = where.mesh.size()
    return [count // ranks for count in total] if Terms.parse(where.terms).tokens == "replicated" else total, max(calls // ranks, 1)


def _expert(module: nn.Module, held: Held) -> tuple[int, int]:
    """(numbers, bytes of one) of an expert on a rank."""
    locals_: list[Any] = [module._parameters[name] for name in held.names.values()]
    rows = [p.to_local() for p in locals_]
    return sum(math.prod(row.shape[1:]) for row in rows), max(row.dtype.itemsize for row in rows)


@torch.no_grad()
def move(change: Balanced) -> None:
    """Have the ranks hold a layer's experts so; a collective call, in which copies of the model (``deepcopy``) take part."""
    where = change.where
    group, rings = Terms.parse(where.terms).group, moves(where.placement, change.placement)
    try:
        for module in holding(where):
            for name in _held(module).names.values():
                parameter: Any = module._parameters[name]
                _exchange(parameter.to_local(), rings, group, where.placement.slots)
    except BaseException as error:
        group.standing.leave(f"experts of {where.layer} were on their way between ranks: {error}")
        raise
    where.move(change.placement)


def _held(module: nn.Module) -> Held:
    held = held_of(module)
    assert held is not None
    return held


def _exchange(rows: Tensor, rings: Sequence[Sequence[Move]], group: Group, slots: int) -> None:
    """Move the rows [L, ...] of a Parameter."""
    most = max(_STAGED // max(rows[:1].numel() * rows.dtype.itemsize, 1), 1)
    some: list[Move] = []
    for ring in rings:
        if some and len(some) + len(ring) > most:
            _exchange_some(rows, some, group, slots)
            some = []
        some += ring
    _exchange_some(rows, some, group, slots)


def _exchange_some(rows: Tensor, some: Sequence[Move], group: Group, slots: int) -> None:
    mine = group.rank
    going = sorted((m for m in some if m.source // slots == mine), key=lambda m: m.target)
    coming = sorted((m for m in some if m.target // slots == mine), key=lambda m: (m.source // slots, m.target))
    to = [sum(m.target // slots == rank for m in going) for rank in range(group.size)]
    come = [sum(m.source // slots == rank for m in coming) for rank in range(group.size)]
    sent = rows[[m.source % slots for m in going]]
    every = rows.new_empty((len(coming), *rows.shape[1:]))
    collectives.all_to_all(every, sent, group.process_group, come, to)
    rows[[m.target % slots for m in coming]] = every
