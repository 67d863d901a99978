"""What each rank of a mesh holds of the Parameters of a layer's experts, and how that is put together again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moefuse.parallel import views
from moefuse.parallel.copies import OnGradient
from moefuse.parallel.hottest import Hottest
from moefuse.parallel.placement import Placement
from moefuse.parallel.table import Table
from moefuse.parallel.units import Cut
from moefuse.runtime.groups import Terms, of_weight
from moefuse.runtime.transports.weights import all_slices, slice_of


@dataclass(frozen=True)
class Slices:
    """Every rank of a mesh dimension has a part of each expert.

    Attributes:
        terms: under which tokens travel between them.
        cuts: of each Parameter, by its name in the site, where it is cut; None for one that every rank has whole.
    """

    terms: str
    cuts: Mapping[str, Cut | None]


@dataclass(frozen=True)
class Where:
    """The mesh, what each of its ranks holds, and the terms under which tokens travel.

    Attributes:
        terms: of tokens between ranks that have other experts; empty if every rank has all of them.
        slices: set if a dimension of the mesh, the last one, slices experts.
        layer: for people.
        replicated: whether the ranks of the first dimension of the mesh have the same experts.
        on_gradient: what is done in each backward pass with gradients of Parameters; see ``copies.py``.
        model: its number among those that have experts on the same mesh.
        moved: whether experts have changed ranks since.
        holders: the modules that hold rows of it (``shard.holding``).
        hottest: copies of experts, for inference.
    """

    mesh: DeviceMesh
    placement: Placement
    terms: str
    slices: Slices | None = None
    layer: str = ""
    replicated: bool = False
    on_gradient: OnGradient | None = None
    model: int = 1
    moved: bool = field(default=False, compare=False)
    holders: list[weakref.ref[nn.Module]] = field(default_factory=list, compare=False, repr=False)
    hottest: Hottest = field(default_factory=Hottest, compare=False, repr=False)

    @property
    def mine(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return self.placement.ranks[Terms.parse(self.terms).group.rank if self.terms else 0]

    @property
    def experts(self) -> int:
        """E."""
        return self.placement.experts

    @property
    def slots(self) -> int:
        """How many rows this rank holds: its experts, and empty ones where the placement is not that of a DTensor."""
        return len(self.mine) if self.placement.in_order else self.placement.slots

    @functools.cached_property
    def table(self) -> Table:
        """Where each expert is."""
        return Table(self.placement.table(), self.layer, self.model)

    def move(self, placement: Placement) -> None:
        """From now on the ranks hold experts so, as many as before; tensors of the table stay where they are."""
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "moved", True)
        self.table.move(placement.table())

    def cut(self, name: str) -> Cut | None:
        """Where a Parameter of the experts is cut."""
        return None if self.slices is None else self.slices.cuts[name]

    def stays(self, name: str) -> bool:
        """Whether every rank has all of a Parameter."""
        return not self.terms and self.cut(name) is None

    def part(self, name: str, rows: Tensor) -> Tensor:
        """Of ``rows`` [held, ...], this rank's experts in full, what this rank holds."""
        cut = self.cut(name)
        if cut is None or self.slices is None:
            return rows
        group = Terms.parse(self.slices.terms).group
        return slice_of(rows, cut.axis + 1, cut.blocks, group.rank, group.size)

    def spans(self, name: str, shape: Sequence[int]) -> tuple[int, list[tuple[int, int, int]]]:
        """Of one expert's Parameter [...], what this rank holds: (dimension, [(start, stop, where it stands here)])."""
        cut = self.cut(name)
        if cut is None or self.slices is None:
            return 0, [(0, shape[0], 0)]
        group = Terms.parse(self.slices.terms).group
        size = shape[cut.axis] // (cut.blocks * group.size)
        starts = [(block * group.size + group.rank) * size for block in range(cut.blocks)]
        return cut.axis, [(start, start + size, block * size) for block, start in enumerate(starts)]

    def of(self, name: str) -> views.Of:
        """How a Parameter is gathered."""
        cut = self.cut(name)
        slices = None if cut is None or self.slices is None else (str(cut.axis + 1), str(cut.blocks), of_weight(self.slices.terms, name))
        return ((self.table, str(self.placement.slots), of_weight(self.terms, name)) if self.terms else None), slices, self.mesh.ndim

    def sharded(self, name: str, rows: Tensor, like: nn.Parameter) -> nn.Parameter:
        """A Parameter [E, ...] of which this rank holds its part of ``rows``; with gaps between ranks, [P * L, ...] with empty rows."""
        experts = self.placement.experts
        if not self.placement.in_order:
            empty = rows.new_zeros((self.placement.slots - rows.shape[0], *rows.shape[1:]))
            rows, experts = torch.cat([rows, empty]), self.placement.world * self.placement.slots
        shape = torch.Size((experts, *rows.shape[1:]))
        local = self.part(name, rows).contiguous()
        made = DTensor.from_local(local, self.mesh, self._placements(name), run_check=False, shape=shape, stride=_strides(shape))
        return nn.Parameter(made, requires_grad=like.requires_grad)

    def as_torch_has_it(self, name: str) -> bool:
        """Whether a Parameter, as a DTensor, is the whole weights in their order: a checkpoint of it is the model's."""
        cut = self.cut(name)
        return self.placement.in_order and (cut is None or cut.blocks == 1)

    def whole(self, name: str, held: Tensor) -> Tensor:
        """[E, ...] of what the ranks hold of a Parameter; a collective call."""
        with torch.no_grad():
            return views.gather(held, self.of(name))

    def in_order(self, name: str, held: Tensor) -> DTensor:
        """The same as a DTensor as torch has it: of which each rank holds the part that its placements say. A collective call."""
        return distribute_tensor(self.whole(name, held), self.mesh, self._placements(name), src_data_rank=None)

    def row(self, name: str, row: Tensor) -> Tensor:
        """One expert's Parameter of which this rank holds ``row``: that, if it is all, else a DTensor over those who slice it."""
        cut = self.cut(name)
        if cut is None or self.slices is None:
            return row
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[-1]]  # type: ignore[index]
        if cut.blocks == 1:
            return DTensor.from_local(row, mesh, [Shard(cut.axis)], run_check=False)
        whole = all_slices(Terms.parse(self.slices.terms).group, row, cut.axis, cut.blocks)
        return distribute_tensor(whole, mesh, [Shard(cut.axis)], src_data_rank=None)

    def _placements(self, name: str) -> list[Shard | Replicate]:
        cut = self.cut(name)
        over: list[Shard | Replicate] = [Replicate()] if self.replicated else []
        over += [Shard(0)] if self.terms else []
        if self.slices is not None:
            over.append(Replicate() if cut is None else Shard(cut.axis + 1))
        return over


def _strides(shape: torch.Size) -> tuple[int, ...]:
    out = [1]
    for size in reversed(shape[1:]):
        out.insert(0, out[0] * size)
    return tuple(out)
