"""Copies of a layer's hottest experts on every rank, for inference: each rank computes them for its own tokens.

They are rows behind a rank's own, [L + R, ...] in memory of which the Parameter is the first L: ``state_dict``, optimizers and checkpoints
know nothing of them. A rank's table says that a copied expert is where its tokens are, so that tables differ between ranks, which no graph
sees. What is written to a Parameter makes copies old: they are asked for in every call, by version and address, and given up.

A CUDA graph that a user captures asks nobody when it is replayed. So while one is captured layers read no copies; and since it knows where
weights are, none are made behind it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


@dataclass
class Hottest:
    """The copies that a layer has.

    Attributes:
        made: the last ones.
        old: whether their experts have been written since.
        captured: whether a CUDA graph that was captured knows where weights are.
    """

    made: Copies | None = None
    old: bool = False
    captured: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {}

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
        if not all(wide.new for wide in self.made.wide):
            self.old = True
            warnings.warn(
                f"experts of {self.made.table.layer or 'a layer'} have been written since the hottest were copied: tokens go to the ranks "
                "that have them until plan.refresh(), or plan.balance(load, copies=..), copies them anew",
                stacklevel=2,
            )
            return None
        return self.made

    def forget(self, parameters: Iterable[Any]) -> None:
        """There are no copies any more, and no memory of them; Parameters whose addresses a CUDA graph knows stay where they are."""
        if self.made is None:
            return
        self.made = None
        for part in map(_torch_private.local_part, parameters):
            if not self.captured and part.untyped_storage().nbytes() > part.numel() * part.dtype.itemsize:
                part.data = part.clone()

    @torch.no_grad()
    def copy(self, experts: Sequence[int], parameters: Sequence[Any], base: Table, group: Group) -> None:
        """Make copies; a collective call. Where there have been as many before, they are where those were.

        Args:
            parameters: of the layer, all that there are, in the same order on all ranks.
            base: the table that all ranks have alike, ``rank * L + local``.
        """
        before, held = self.made, len(_torch_private.local_part(parameters[0]))
        slots = own_table(base.slots, held, experts, group.rank)
        self.made, wide = None, []
        for parameter in parameters:
            part = _torch_private.local_part(parameter)
            rows = None if before is None else before.rows(part)
            if rows is None or len(rows) != held + len(experts) or rows.data_ptr() != part.data_ptr():
                rows = part.new_empty((held + len(experts), *part.shape[1:]))
                rows[:held] = part
                part.data = rows[:held]
            for copy, expert in enumerate(experts, held):
                rank, local = divmod(base.slots[expert], held)
                if rank == group.rank:
                    rows[copy] = rows[local]
                collectives.broadcast(rows[copy], rank, group.process_group)
            wide.append(Wide(weakref.ref(parameter), part, rows, (parameter._version, part._version)))
        table = Table(slots, base.layer, base.model) if before is None else before.table
        table.move(slots)
        self.made, self.old = Copies(tuple(experts), table, held + len(experts), tuple(wide)), False


def own_table(slots: Sequence[int], held: int, copied: Sequence[int], rank: int) -> list[int]:
    """[E]: where a rank sends tokens of each expert, ``rank * (L + R) + local``; ``slots`` [E] is without copies, L = ``held``."""
    wide = held + len(copied)
    found = [slot // held * wide + slot % held for slot in slots]
    for copy, expert in enumerate(copied):
        if slots[expert] // held != rank:
            found[expert] = rank * wide + held + copy
    return found
