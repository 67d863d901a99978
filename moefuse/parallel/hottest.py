"""Copies of a layer's hottest experts on every rank, for inference: each rank computes them for its own tokens.

They are rows behind a rank's own, [L + R, ...] in memory of which the Parameter is the first L: ``state_dict``, optimizers and checkpoints
know nothing of them. A rank's table says that a copied expert is where its tokens are, so that tables differ between ranks, which no graph
sees. What is written to a Parameter makes copies old: they are asked for in every call, by version and address, and tokens go to experts'
own ranks again, by another table in the same memory; steps of optimizers are seen, too, for fused ones change no version.

All layers of a plan have room for as many copies, so that which of them have any is in their tables and not in graphs.

A CUDA graph that a user captures asks nobody when it is replayed. So while one is captured layers read no copies; and since it knows where
weights are, none are made behind it.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from moefuse import _torch_private
from moefuse.parallel.table import Table
from moefuse.runtime import collectives
from moefuse.runtime.groups import Group, Terms, of_weight, weight_of


class Wide(NamedTuple):
    """One Parameter's rows [L + R, ...], and what its part [L, ...] was when copies were made.

    Attributes:
        versions: of the Parameter and its part: what writes to a DTensor does not count as a write to its part.
    """

    parameter: weakref.ref[Any]
    part: Tensor
    rows: Tensor
    versions: tuple[int, int]

    @property
    def there(self) -> bool:
        """Whether the Parameter is the first of these rows; also of one that is gone."""
        parameter, part = self.parameter(), self.part
        return parameter is None or (_torch_private.local_part(parameter) is part and part.data_ptr() == self.rows.data_ptr())

    @property
    def written(self) -> bool:
        """Whether it was written since."""
        parameter = self.parameter()
        return parameter is not None and self.versions != (parameter._version, self.part._version)


@dataclass(frozen=True)
class Room:
    """What a layer has beside its Parameters.

    Attributes:
        table: of this rank, [E]: slots are ``rank * (L + R) + local``.
        plain: these slots without copies.
        slots: L + R.
        wide: of each Parameter.
    """

    table: Table
    plain: tuple[int, ...]
    slots: int
    wide: tuple[Wide, ...]

    def rows(self, part: Tensor) -> Tensor | None:
        """[L + R, ...] of a Parameter's part; None of another's."""
        return next((wide.rows for wide in self.wide if wide.part is part), None)

    def of(self, terms: str) -> tuple[Table, str, str]:
        """How they are gathered, as ``views.Of`` has it of experts; ``terms`` of the Parameter."""
        known, name = weight_of(terms)
        return self.table, str(self.slots), of_weight(replace(Terms.parse(known), copied=True).text, name)


@dataclass(eq=False)
class Hottest:
    """The copies that a layer has.

    Attributes:
        more: R.
        experts: those that all ranks are to have, at most R.
        room: where they are.
        old: whether experts have been written since copies were made, which nobody reads then.
        stepped: whether an optimizer has made a step with them since.
        captured: whether a CUDA graph that was captured knows where weights are.
        left: memory in which experts had moved before they were somewhere else.
    """

    more: int = 0
    experts: tuple[int, ...] = ()
    room: Room | None = None
    old: bool = False
    stepped: bool = False
    captured: bool = False
    left: list[StorageWeakRef] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(Hottest())

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured, which knows where weights are from then on. Those of torch's own ask first."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.captured = True
            return True
        return False

    def current(self) -> Room | None:
        """What a call reads; None: what the Parameters are."""
        if self.is_captured():
            return None
        room = self.room
        if room is None:
            return None
        there = all(wide.there for wide in room.wide)
        if not there:
            self.room = None
        if self.experts and not self.old and (not there or self.stepped or any(wide.written for wide in room.wide)):
            self.old = True
            room.table.move(room.plain)
            room.table.note = ", whose copies of hot experts are old"
            warnings.warn(
                f"experts of {room.table.layer or 'a layer'} have been written since the hottest were copied: tokens go to the ranks that "
                "have them until all ranks call plan.refresh(), or plan.balance(load, copies=..)",
                stacklevel=2,
            )
        return self.room

    def make_room(self, parameters: Sequence[Any], more: int, moved: bool) -> list[Tensor]:
        """[L + R, ...] of each Parameter, which becomes the first rows of it; what there was for another R = ``more`` is gone, and copies
        with it. Parameters whose addresses a CUDA graph knows stay where they are.

        Args:
            moved: whether experts of the layer have changed places before.
        """
        found = []
        for part in map(_torch_private.local_part, parameters):
            rows, count = None if self.room is None else self.room.rows(part), len(part) + more
            if not more and (rows is None or self.captured):
                rows = part
            elif rows is None or len(rows) != count or rows.data_ptr() != part.data_ptr():
                rows = part.new_empty((count, *part.shape[1:]))
                rows[: len(part)] = part
                rows[len(part) :].view(torch.uint8).zero_()  # they are read where a region is verified
                self._leave(part, rows[: len(part)], moved)
            found.append(rows)
        if not more:
            self.more, self.experts, self.room = 0, (), None
        return found

    def _leave(self, part: Tensor, there: Tensor, moved: bool) -> None:
        """A Parameter is somewhere else from now on. Where experts have moved before, states that alias its old memory name others."""
        if moved:
            self.left = [*(was for was in self.left if not was.expired()), StorageWeakRef(part.untyped_storage())]
        part.data = there

    def has_left(self, given: Tensor) -> bool:
        """Whether this is memory in which the layer's experts were before, and after they had moved in it."""
        return bool(self.left) and StorageWeakRef(given.untyped_storage()) in self.left

    def copy(self, experts: Sequence[int], parameters: Sequence[Any], every: Sequence[Tensor], base: Table, group: Group) -> None:
        """Make copies; a collective call.

        Args:
            experts: at most R.
            parameters: of the layer, all that there are, in the same order on all ranks.
            every: what :meth:`make_room` gave for them.
            base: the table that all ranks have alike, ``rank * L + local``.
        """
        parts = [_torch_private.local_part(parameter) for parameter in parameters]
        held, slots = len(parts[0]), len(every[0])
        wide = []
        for parameter, part, rows in zip(parameters, parts, every, strict=True):
            for copy, expert in enumerate(experts, held):
                rank, local = divmod(base.slots[expert], held)
                if rank == group.rank:
                    rows[copy] = rows[local]
                collectives.broadcast(rows[copy], rank, group.process_group)
            wide.append(Wide(weakref.ref(parameter), part, rows, (parameter._version, part._version)))
        mine, plain = (own_table(base.slots, held, slots, copied, group.rank) for copied in (experts, ()))
        table = Table(mine, base.layer, base.model) if self.room is None else self.room.table
        table.move(mine)
        table.note = ""
        self.room = Room(table, tuple(plain), slots, tuple(wide))
        self.more, self.experts, self.old, self.stepped = slots - held, tuple(experts), False, False
        _watch_optimizers()
        _copied.add(self)


_copied: weakref.WeakSet[Hottest] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Steps of fused optimizers are no writes for torch's versions."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    copied = [layer for layer in _copied if layer.room is not None]
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} if copied else set()
    for layer in copied:
        if any(id(wide.parameter()) in written for wide in layer.room.wide):  # type: ignore[union-attr]
            layer.stepped = True


def own_table(slots: Sequence[int], held: int, wide: int, copied: Sequence[int], rank: int) -> list[int]:
    """[E]: where a rank sends tokens of each expert, ``rank * (L + R) + local``; ``slots`` [E] is without copies, ``rank * L + local``."""
    found = [slot // held * wide + slot % held for slot in slots]
    for copy, expert in enumerate(copied, held):
        if slots[expert] // held != rank:
            found[expert] = rank * wide + copy
    return found
