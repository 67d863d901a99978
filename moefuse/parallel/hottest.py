"""Copies of a layer's hottest experts on every rank, for inference: each rank computes them for its own tokens.

They are rows behind a rank's own, [L + R, ...] in memory of which the Parameter is the first L: ``state_dict``, optimizers and checkpoints
know nothing of them. A rank's table says that a copied expert is where its tokens are, so that tables differ between ranks, which no graph
sees. What is written to a Parameter makes copies old: they are asked for in every call, by version and address, and given up; steps of
optimizers are seen, too, for the fused ones change no version.

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
    def new(self) -> bool:
        """Whether nothing has been written since; also of a Parameter that is gone."""
        parameter, part = self.parameter(), self.part
        if parameter is None:
            return True
        is_part = _torch_private.local_part(parameter) is part and part.data_ptr() == self.rows.data_ptr()
        return is_part and self.versions == (parameter._version, part._version)


@dataclass(frozen=True)
class Copies:
    """What a layer has beside its Parameters.

    Attributes:
        experts: whose copies they are.
        table: of this rank, [E]: slots are ``rank * (L + R) + local``.
        slots: L + R.
        wide: of each Parameter.
    """

    experts: tuple[int, ...]
    table: Table
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
        made: the last ones.
        old: whether their experts have been written since, and nothing reads them.
        stepped: whether an optimizer has made a step with these experts since.
        captured: whether a CUDA graph that was captured knows where weights are.
        left: memory in which experts had moved before they were somewhere else.
    """

    made: Copies | None = None
    old: bool = False
    stepped: bool = False
    captured: bool = False
    left: list[StorageWeakRef] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(Hottest())

    @property
    def experts(self) -> tuple[int, ...]:
        """Those that have copies, old ones too."""
        return () if self.made is None else self.made.experts

    def current(self) -> Copies | None:
        """What a call may read; None: what the Parameters are."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.captured = True
            return None
        if self.made is None or self.old:
            return None
        if self.stepped or not all(wide.new for wide in self.made.wide):
            self.old = True
            warnings.warn(
                f"experts of {self.made.table.layer or 'a layer'} have been written since the hottest were copied: tokens go to the ranks "
                "that have them until plan.refresh(), or plan.balance(load, copies=..), copies them anew",
                stacklevel=2,
            )
            return None
        return self.made

    def room(self, parameters: Sequence[Any], more: int, moved: bool) -> list[Tensor]:
        """[L + R, ...] of each Parameter, which becomes the first rows of it; what there was for another R = ``more`` is gone, and copies
        with it. Parameters whose addresses a CUDA graph knows stay where they are.

        Args:
            moved: whether experts of the layer have changed places before.
        """
        found, made = [], self.made
        for part in map(_torch_private.local_part, parameters):
            rows, count = None if made is None else made.rows(part), len(part) + more
            if not more and (rows is None or self.captured):
                rows = part
            elif rows is None or len(rows) != count or rows.data_ptr() != part.data_ptr():
                rows = part.new_empty((count, *part.shape[1:]))
                rows[: len(part)] = part
                self._leave(part, rows[: len(part)], moved)
            found.append(rows)
        self.made = made if more else None
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
            parameters: of the layer, all that there are, in the same order on all ranks.
            every: what :meth:`room` gave for them.
            base: the table that all ranks have alike, ``rank * L + local``.
        """
        parts = [_torch_private.local_part(parameter) for parameter in parameters]
        held = len(parts[0])
        wide = []
        for parameter, part, rows in zip(parameters, parts, every, strict=True):
            for copy, expert in enumerate(experts, held):
                rank, local = divmod(base.slots[expert], held)
                if rank == group.rank:
                    rows[copy] = rows[local]
                collectives.broadcast(rows[copy], rank, group.process_group)
            wide.append(Wide(weakref.ref(parameter), part, rows, (parameter._version, part._version)))
        slots = own_table(base.slots, held, experts, group.rank)
        table = Table(slots, base.layer, base.model) if self.made is None else self.made.table
        table.move(slots)
        self.made, self.old, self.stepped = Copies(tuple(experts), table, held + len(experts), tuple(wide)), False, False
        _watch_optimizers()
        _copied.add(self)


_copied: weakref.WeakSet[Hottest] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Steps of fused optimizers are no writes for torch's versions."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer in _copied:
        if layer.made is not None and any(id(wide.parameter()) in written for wide in layer.made.wide):
            layer.stepped = True


def own_table(slots: Sequence[int], held: int, copied: Sequence[int], rank: int) -> list[int]:
    """[E]: where a rank sends tokens of each expert, ``rank * (L + R) + local``; ``slots`` [E] is without copies, L = ``held``."""
    wide = held + len(copied)
    found = [slot // held * wide + slot % held for slot in slots]
    for copy, expert in enumerate(copied):
        if slots[expert] // held != rank:
            found[expert] = rank * wide + held + copy
    return found
