"""Experts that change ranks, between two calls: weights first, then the table that says where they are.

Nothing that a compiled graph holds is replaced: weights and table keep their addresses, so that CUDA graphs go on.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.errors import ParallelError
from moefuse.parallel.balance import Move, chosen, moves
from moefuse.parallel.checks import in_optimizer
from moefuse.parallel.placement import Placement
from moefuse.parallel.shard import Held, held_of, holding
from moefuse.parallel.where import Where
from moefuse.runtime import collectives
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.peers import lost_peers

Load = Mapping[str, Tensor | Sequence[Sequence[int]] | Sequence[int]]
"""Layer -> [calls, E] or [E]: how often each expert was chosen, by the tokens of this rank."""

_STAGED = 64 << 20
"""Bytes of weights that wait at a time on their way from a rank and on their way to it."""


@dataclass(frozen=True)
class Asked:
    """What ``plan.balance`` was asked for, the same on all ranks."""

    enough: float
    layers: int | None
    copies: int

    def check(self) -> None:
        """Raises for what is not legal."""
        if not _is_count(self.copies):
            raise ParallelError(f"copies={self.copies!r} is not legal; use a number of experts from 0 on")
        if self.layers is not None and not _is_count(self.layers):
            raise ParallelError(f"layers={self.layers!r} is not legal; use a number from 0 on, or None")

    def __str__(self) -> str:
        return f"copies={self.copies}, layers={self.layers}, enough={self.enough}"

    @property
    def mark(self) -> int:
        """A number for it."""
        return zlib.crc32(str(self).encode()) & 0xFFFF


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


@dataclass(frozen=True)
class Change:
    """What becomes of a layer: which experts are where, and of which all ranks have copies."""

    where: Where
    placement: Placement
    copied: tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """What becomes of a plan: layers that change, all of them that are spread, and for how many copies each has room."""

    changes: list[Change]
    every: list[Where]
    room: int


def planned(modules: Iterable[nn.Module], load: Load, asked: Asked) -> Planned:
    """What is to be moved and copied; a collective call. All ranks come to the same.

    Raises:
        ParallelError: on all ranks, if one of them refuses or asks for something else, or none has a load of any layer.
    """
    every = {module: held for module in dict.fromkeys(modules) if (held := held_of(module)) is not None and held.where.terms}
    # Of a layer that has its projections in several modules, the first.
    first = {id(held.where): module for module, held in reversed(every.items())}
    spread = {module: held.where for module, held in every.items() if first[id(held.where)] is module}
    refused, counts = "", {}
    try:
        load = _named_as(load, [where.layer for where in spread.values()])
        counts = {module: _counts(where, load) for module, where in spread.items()}
        asked.check()
        _may_move([where for module, where in spread.items() if asked.copies or counts[module] is not None])
        _may_copy(spread.values() if asked.copies else ())
    except ParallelError as error:
        refused = str(error)
    told = _of_all(spread, counts, bool(refused), asked)
    if refused:
        raise ParallelError(refused)
    if told is None:
        raise ParallelError("another rank refuses to balance, and its own error says why; nothing has moved")
    if not told:
        raise ParallelError(f"the load has {_some(load)}, and the plan {_some(where.layer for where in spread.values())}")
    found: list[tuple[float, Change]] = []
    for module, (total, calls) in told.items():
        where = spread[module]
        expert = _expert({one: held for one, held in every.items() if held.where is where})
        choice = chosen(where.placement, total, calls, expert, asked.enough, asked.copies)
        if choice.placement is not where.placement or choice.copied != where.hottest.experts:
            found.append((choice.after - choice.before, Change(where, choice.placement, choice.copied)))
    changes = [change for _, change in sorted(found, key=lambda one: one[0])[: asked.layers]]
    # Which layers have copies is to be in no graph; where none has any, none needs room.
    wanted = any(change.copied for change in changes) or any(where.hottest.more == asked.copies for where in spread.values())
    return Planned(changes, list(spread.values()), asked.copies if wanted else 0)


def _some(names: Iterable[str]) -> str:
    return ", ".join([name or "''" for name in names][:3]) or "no layer"


def _named_as(load: Load, layers: Sequence[str]) -> Load:
    """A load by the names of the plan: either's model may be in a wrapper (DDP, PEFT) that the other was not in."""
    if not isinstance(load, Mapping):
        raise ParallelError(f"a load is a mapping of layers to counts, as moefuse.load_of gives it, and not {type(load).__name__}")
    for around in ("", *_around(load)):
        inner = {name[len(around) :]: counts for name, counts in load.items()}
        if all(name.startswith(around) for name in load) and any(_fits(name, layer) for name in inner for layer in layers):
            return inner
    for around in _around(layers):
        if all(layer.startswith(around) for layer in layers) and any(_fits(around + name, layer) for name in load for layer in layers):
            return {around + name: counts for name, counts in load.items()}
    return load


def _around(names: Iterable[str]) -> list[str]:
    """The modules around what a name says, each as the beginning of a name, the innermost first."""
    parts = next(iter(names), "").split(".")
    return [".".join(parts[:n]) + "." for n in range(len(parts) - 1, 0, -1)]


def _fits(name: str, layer: str) -> bool:
    """Whether a report means a layer: it may name a module in it or around it."""
    return not name or f"{name}.".startswith(f"{layer}.") or f"{layer}.".startswith(f"{name}.")


def _counts(where: Where, load: Load) -> Tensor | None:
    """[calls, E] of a layer."""
    named = [name for name in load if _fits(name, where.layer)]
    if not named:
        return None
    wrong = f"the load of {where.layer or 'the layer'} has to be counts [calls, {where.experts}], integers from 0 on"
    try:
        found = torch.as_tensor(load[where.layer if where.layer in load else max(named, key=len)], device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ParallelError(wrong) from None
    counts = found[None] if found.dim() == 1 else found
    if counts.dim() != 2 or counts.is_floating_point() or counts.shape[1] > where.experts or bool((counts < 0).any()):
        raise ParallelError(wrong)
    return nn.functional.pad(counts.long(), (0, where.experts - counts.shape[1]))


def _may_move(layers: Iterable[Where]) -> None:
    every: dict[int, Where] = {}
    for where in layers:
        if where.experts % where.placement.world:
            raise ParallelError(
                f"{where.layer} has {where.experts} experts on {where.placement.world} ranks: balance needs equally many on each"
            )
        for parameter in _parameters(where):
            every[id(parameter)] = where
            if parameter.grad is not None:
                raise ParallelError(
                    f"experts of {where.layer} (of the model, or a deepcopy of it) have gradients, which stay where they are: "
                    "balance behind zero_grad()"
                )
            _is_no_shard(where, parameter)
            if parameter.is_meta or parameter.is_inference():
                what = "no values yet" if parameter.is_meta else "been made in inference mode, where torch writes nothing else"
                raise ParallelError(f"experts of {where.layer} have {what}: they cannot move")
    kind = in_optimizer(set(every))
    if kind is not None:
        layer = next(iter(every.values())).layer
        raise ParallelError(f"an optimizer ({kind}) has experts, as of {layer}, and its states do not move: balance is for inference")


def _is_no_shard(where: Where, parameter: Any) -> None:
    if len(parameter.placements) != where.mesh.ndim:
        raise ParallelError(f"FSDP has sharded the experts of {where.layer} once more: balance does not know its shards")


def _may_copy(layers: Iterable[Where]) -> None:
    for where in layers:
        terms = Terms.parse(where.terms)
        if where.slices is not None:
            raise ParallelError(f"ranks have slices of the experts of {where.layer}: copies are of whole experts")
        if terms.tokens == "replicated" or terms.transport == "gather":
            why = "every rank has all tokens" if terms.tokens == "replicated" else "weights go to the tokens"
            raise ParallelError(f"{why} of {where.layer}, where copies of experts save nothing")
        if where.hottest.captured:
            raise ParallelError(
                f"a CUDA graph was captured of {where.layer}, and knows where its experts are: make copies first, and capture it then"
            )


def _parameters(where: Where) -> list[Any]:
    """What holds rows of a layer, copies of the model's too, each once: modules may share them."""
    own = (module._parameters[name] for module, held in holding(where).items() for name in held.names.values())
    return list({id(parameter): parameter for parameter in own}.values())


def _of_all(
    spread: Mapping[nn.Module, Where], counts: Mapping[nn.Module, Tensor | None], refused: bool, asked: Asked
) -> dict[nn.Module, tuple[list[int], int]] | None:
    """([E] of the tokens of all ranks, the calls in which they were counted) of each layer that some rank has a load of, in one exchange
    for each mesh; None if some rank refuses.

    Raises:
        ParallelError: ranks ask for different things.
    """
    found: dict[nn.Module, tuple[list[int], int]] = {}
    stopped = False
    for mesh in dict.fromkeys(where.mesh for where in spread.values()):
        some = {module: where for module, where in spread.items() if where.mesh == mesh}
        parts = [_told(where, counts.get(module)) for module, where in some.items()]
        said = torch.tensor([int(refused), asked.mark, asked.mark**2])
        sums = torch.cat([*parts, said]).to(_parameters(next(iter(some.values())))[0].to_local().device)
        with lost_peers(next(iter(some.values())).layer, "plan.balance, which every rank has to call"):
            for dim in range(mesh.ndim):
                collectives.all_reduce(sums, mesh.get_group(dim))
        *every, others = sums.cpu().split([*map(len, parts), len(said)])
        stops, marks, squares = others.tolist()
        stopped = stopped or bool(stops)
        if not stopped and marks**2 != squares * mesh.size():  # Cauchy and Schwarz
            raise ParallelError(f"ranks call plan.balance with different arguments, this one with {asked}; nothing has moved")
        for (module, where), (*total, calls, ranks) in zip(some.items(), map(Tensor.tolist, every), strict=True):
            # Where ranks have equal tokens, all of them have counted the same.
            each = ranks if Terms.parse(where.terms).tokens == "replicated" else 1
            if ranks:
                found[module] = [count // each for count in total], max(calls // ranks, 1)
    return None if stopped else found


def _told(where: Where, counts: Tensor | None) -> Tensor:
    """[E + 2]: what ranks add up for a layer, its counts, the calls, and whether this rank has any."""
    told = torch.zeros(where.experts + 2, dtype=torch.int64)
    if counts is not None:
        told[:-2] = counts.sum(0)
        told[-2:] = torch.tensor([len(counts), 1])
    return told


def _expert(holders: Mapping[nn.Module, Held]) -> tuple[int, int]:
    """(numbers, bytes of one) of an expert on a rank."""
    locals_: list[Any] = [module._parameters[name] for module, held in holders.items() for name in held.names.values()]
    rows = [p.to_local() for p in locals_]
    return sum(math.prod(row.shape[1:]) for row in rows), max(row.dtype.itemsize for row in rows)


@torch.inference_mode(False)
@torch.no_grad()
def carry_out(plan: Planned) -> None:
    """Have the ranks hold experts so; a collective call, in which copies of the model (``deepcopy``) take part."""
    copied = {id(change.where): change.copied for change in plan.changes}
    # What has the memory of before stays as it was: states that were taken are right where nothing had moved.
    rooms = []
    for where in plan.every:
        with _leaving(where, "plan.balance"):
            rooms.append(where.hottest.make_room(_parameters(where), plan.room, where.moved))
    for change in plan.changes:
        with _leaving(change.where, "plan.balance"):
            move(change)
    for where, rows in zip(plan.every, rooms, strict=True) if plan.room else ():
        with _leaving(where, "plan.balance"):
            _copy(where, copied.get(id(where), where.hottest.experts[: plan.room]), rows)


@contextmanager
def _leaving(where: Where, what: str) -> Iterator[None]:
    """Whoever raises in here has left the order of collectives."""
    try:
        with lost_peers(where.layer, what):
            yield
    except BaseException as error:
        Terms.parse(where.terms).group.standing.leave(f"experts of {where.layer} were on their way between ranks: {error}")
        raise


def move(change: Change) -> None:
    """Weights first, then the table."""
    where = change.where
    rings = moves(where.placement, change.placement)
    for parameter in _parameters(where) if rings else ():
        _exchange(parameter.to_local(), rings, Terms.parse(where.terms).group, where.placement.slots)
    if rings:
        where.move(change.placement)


def _copy(where: Where, experts: Sequence[int], rows: Sequence[Tensor]) -> None:
    where.hottest.copy(experts, _parameters(where), rows, where.table, Terms.parse(where.terms).group)


@torch.inference_mode(False)
@torch.no_grad()
def refresh(modules: Iterable[nn.Module]) -> None:
    """Copies are what experts are now; a collective call."""
    for where in dict.fromkeys(held.where for module in modules if (held := held_of(module)) is not None):
        if where.hottest.more:
            parameters = _parameters(where)
            for parameter in parameters:
                _is_no_shard(where, parameter)
            with _leaving(where, "plan.refresh, which every rank has to call"):
                rows = where.hottest.make_room(parameters, where.hottest.more, where.moved)
                _copy(where, where.hottest.experts, rows)


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
