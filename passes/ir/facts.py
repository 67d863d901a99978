"""Facts: what a value of the graph *is* with respect to routing. One small dataclass each; rules/ turns facts into facts.

A value without a fact says nothing about routing. ``Lost`` says that routing information was there and which operation lost it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch.fx import Node

from moefuse.passes.graph.sizes import Size, product
from moefuse.passes.ir.axes import Atom, Axes
from moefuse.passes.ir.expr import Expr

_MANY = (1 << 31) - 1  # what only a dtype bounds is not bounded


@dataclass(frozen=True, eq=False)
class Routing:
    """One tensor of expert ids [tokens..., K] (or [tokens...] when there is one slot), and what is known about it.

    ``distinct``: no id is twice in a token. ``bounds``: no id is less than the first or more than the second.
    ``columns``: ``node`` holds no ids but a 0/1 mask [tokens..., (K,) ``columns``] with at most one 1 for a slot; a slot without any has no
    expert, and -1 for an id. ``shared``: the sizes of the last of the ``tokens`` dimensions that ``node`` does not have: all of
    their tokens share one row of ids (an expert for a whole sequence or image).
    ``kept``: a table [tokens, E], or (``by_slot``) values [tokens, K]; a slot whose entry of it is zero (``above``: not above this
    number, which is not negative) has no expert.
    ``valid``: booleans [tokens] or [tokens, K]; where it is False, the slots of the token (or that slot) have no expert.
    """

    node: Node
    tokens: tuple[Size, ...]
    top_k: int
    has_slots: bool
    distinct: bool
    bounds: tuple[int, int] | None = None
    columns: int | None = None
    shared: tuple[Size, ...] = ()
    kept: Node | None = None
    above: float | None = None
    by_slot: bool = False
    valid: Node | None = None

    @property
    def whole(self) -> bool:
        """Whether every slot has an expert."""
        return self.columns is None and self.kept is None and self.valid is None

    @property
    def sources(self) -> tuple[Node, ...]:
        """The tensors that it is read from, the ids (or the mask) first."""
        return tuple(n for n in (self.node, self.kept, self.valid) if n is not None)

    @property
    def num_tokens(self) -> Size:
        return product(self.tokens)

    @property
    def choices(self) -> int | None:
        """All ids are from 0 to one less than this; None if nothing says so."""
        low, high = self.bounds or (-1, -1)
        return high + 1 if low >= 0 and high < _MANY else None

    def within(self, count: int) -> bool:
        """Whether every id is that of one of so many experts."""
        return self.choices is not None and self.choices <= count


class RowNumber(int):
    """The number of an expert that stands for others: the value of ``row``, whatever that is. Equal to no constant."""

    row: Node

    def __new__(cls, value: int, row: Node) -> RowNumber:
        made = super().__new__(cls, value)
        made.row = row
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowNumber) and other.row is self.row

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.row))


@dataclass(frozen=True)
class Fact:
    """Base of facts that describe a tensor dimension by dimension."""

    axes: Axes

    def with_axes(self, axes: Axes) -> Self:
        return replace(self, axes=axes)


@dataclass(frozen=True, eq=False)
class View(Fact):
    """A plain tensor seen through views, repeats and transposes: element = ``root[...]`` by the ``d`` atoms."""

    root: Node


@dataclass(frozen=True, eq=False)
class Column(View):
    """One slot of a [tokens, K] tensor: ``base[..., slot]``."""

    base: View
    slot: int


@dataclass(frozen=True, eq=False)
class Fill(Fact):
    """A tensor of one repeated constant (zeros, full)."""

    value: float


@dataclass(frozen=True, eq=False)
class Range(Fact):
    """0, 1, 2, ... along its one axis."""

    size: Size


@dataclass(frozen=True, eq=False)
class Mask(Fact):
    """1 where slot (t, k) chose the expert: of the ``e`` axis, or ``expert`` if that axis is gone. ``weight`` multiplies it if set."""

    routing: Routing
    expert: int | None
    weight: View | None = None
    negated: bool = False


@dataclass(frozen=True, eq=False)
class Table(Fact):
    """A [tokens, E] table (or column ``expert`` of one): ``fill`` wherever the expert was not chosen.

    ``root`` holds the whole table [tokens, E] if one exists; ``slots`` the [tokens, K] weights it was made of; ``ones`` if it is 0/1;
    ``slot`` if it speaks of that slot only.
    """

    routing: Routing
    fill: float
    expert: int | None
    root: Node | None
    root_axes: Axes = ()
    slots: View | None = None
    ones: bool = False
    negated: bool = False
    slot: int | None = None


@dataclass(frozen=True, eq=False)
class Begun(Fact):
    """A table [tokens, E] of zeros in which the ``weights`` [tokens, K] of the slots in ``put`` stand so far."""

    routing: Routing
    weights: View
    put: frozenset[int]


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of one expert: all (t, k) with ``ids[t, k] == expert``, or (``by_token``) all t with any such k (or just ``slot``).

    ``order``: they come as they stand in this sorted order, a segment of it; else as they stand in the ids, or (``slots_first``) all of a
    first slot in front of those of a second one.
    """

    routing: Routing
    expert: int
    by_token: bool
    slot: int | None = None
    order: Order | None = None
    slots_first: bool = False

    def same(self, other: object) -> bool:
        """Whether these are the same rows in the same order. A token that has each expert once has one row of it either way."""
        return (
            isinstance(other, Selection)
            and other.routing is self.routing
            and (other.expert, other.slot, other.slots_first) == (self.expert, self.slot, self.slots_first)
            and (other.by_token == self.by_token or self.routing.distinct)
            and other.order is self.order
        )


@dataclass(frozen=True, eq=False)
class Index(Fact):
    """Row numbers of a selection: into the flattened tokens (``of`` "token"), the slots of a token ("slot"), or all slots ("flat")."""

    selection: Selection
    of: str


@dataclass(frozen=True, eq=False)
class SlotMask(Fact):
    """[rows, K]: 1 where that slot of the row's token chose the expert, times ``weight`` (of the slot) if that is set."""

    selection: Selection
    negated: bool = False
    weight: Expr | None = None


@dataclass(frozen=True, eq=False)
class IndexMatrix(Fact):
    """``nonzero(mask)``: [rows, dims] with one column for each of ``columns``; ``transposed`` swaps the two."""

    selection: Selection
    columns: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Order:
    """All slots sorted by expert."""

    routing: Routing
    node: Node


@dataclass(frozen=True, eq=False)
class Sorted(Fact):
    """An index array of an Order. ``of``: "ids" sorted expert ids, "slot" the permutation, "token" its tokens, "inverse" its inverse.

    "entry": the permutation of a list of a table's entries (:class:`Entries`).
    """

    order: Order
    of: str


@dataclass(frozen=True, eq=False)
class Entries(Fact):
    """The places [entries, 2] of the entries of a routing table that are not zero: token and expert.

    ``order``: each column was sorted by itself; then these are its values (``of`` "ids"), or where those came from ("entry").
    """

    routing: Routing
    order: Order | None = None
    of: str = ""


@dataclass(frozen=True, eq=False)
class Picked(Fact):
    """Rows of a routing table, for the tokens of an Order."""

    root: Node
    order: Order


@dataclass(frozen=True, eq=False)
class Absent(Fact):
    """True for sorted slots whose id is ``count`` or more: the sentinels of expert parallelism, which belong to no expert."""

    routing: Routing
    count: int


@dataclass(frozen=True, eq=False)
class Counts(Fact):
    """Slots of each expert (``ends`` False) or their running sum (``ends`` True): entry i is that of the first ``i + first`` experts."""

    routing: Routing
    ends: bool
    first: int = 1


@dataclass(frozen=True, eq=False)
class Occurring(Fact):
    """Slots of each expert (``ends`` False) or their running sum, up to the last expert that occurs: at most ``count``, perhaps fewer."""

    routing: Routing
    ends: bool
    count: int


@dataclass(frozen=True, eq=False)
class Span(Fact):
    """How many slots the experts ``start`` to ``stop - 1`` have together: a number, or a tensor of one element."""

    routing: Routing
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Hit(Fact):
    """Not zero exactly where some slot (or slot ``slot``) chose the expert: of the ``e`` axis, or ``expert`` if that axis is gone."""

    routing: Routing
    expert: int | None
    negated: bool = False
    slot: int | None = None


@dataclass(frozen=True, eq=False)
class Present(Fact):
    """The experts that some slot (or slot ``slot``) chose, each once, out of ``count``."""

    routing: Routing
    count: int
    slot: int | None = None


@dataclass(frozen=True, eq=False)
class Weight(Fact):
    """A stacked expert weight [E, ...] with its first dim fixed to ``expert`` or indexed by the rows of the axes (``order`` if sorted)."""

    root: Node
    expert: int | None
    routing: Routing | None = None
    order: Order | None = None


@dataclass(frozen=True, eq=False)
class Domain:
    """Which rows a value has: "selected", "masked", "slots", "sorted" or "dense"."""

    name: str
    routing: Routing | None = None
    selection: Selection | None = None
    order: Order | None = None
    expert: int | None = None
    slot: int | None = None

    def same(self, other: Domain) -> bool:
        if self.name != other.name or (self.routing is not None and other.routing is not None and self.routing is not other.routing):
            return False
        if self.selection is not None:
            return self.selection.same(other.selection)
        if self.expert is not None and other.expert is not None and self.expert != other.expert:
            return False
        if self.slot is not None and other.slot is not None and self.slot != other.slot:
            return False
        return self.order is None or other.order is None or self.order is other.order


@dataclass(frozen=True, eq=False)
class Rows(Fact):
    """Rows of a domain, each the value of ``expr``. Row atoms, then feature atoms ``f`` (absent for a scalar per row)."""

    domain: Domain
    expr: Expr


@dataclass(frozen=True, eq=False)
class Inverse:
    """An uninitialised tensor that becomes the inverse of a permutation by assignment."""


@dataclass(frozen=True, eq=False)
class Part:
    """One expert's share of an accumulator. ``of``: the share before the accumulator was multiplied."""

    rows: Rows
    node: Node
    of: Part | None = None


@dataclass(frozen=True, eq=False)
class Sum(Fact):
    """An accumulator over experts: ``base`` (None: zeros) plus the parts so far. ``once``: rows were assigned or read-modify-written.

    ``replaced``: the parts stand where rows of ``base`` stood.
    """

    base: Node | None
    parts: tuple[Part, ...]
    once: bool = False
    replaced: bool = False


@dataclass(frozen=True, eq=False)
class Unmasked:
    """An accumulator with an expert's rows on every token; a mask takes those that chose it: the middle of ``where(hit, out + y, out)``."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """Rows of experts (or sums, each over some of them) beside each other along ``dim``: what is left to do is add them."""

    items: tuple[Rows | Sum, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class Listed(Fact):
    """The rows of several experts, or their row numbers, one expert's behind another's."""

    items: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Buffer(Fact):
    """An accumulator read at a selection by ``read``, perhaps with rows already added: the middle of ``out[idx] += rows``."""

    target: Node
    selection: Selection
    read: Node
    rows: Rows | None = None


@dataclass(frozen=True, eq=False)
class Pieces(Fact):
    """A tensor of all sorted slots, in which the segments of the first experts are filled in."""

    order: Order
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Filled(Fact):
    """A tensor of all slots as they stand in the ids, in which the rows of some experts are filled in."""

    routing: Routing
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Combined(Fact):
    """The whole region: a weighted sum over the chosen experts of each token. Atoms: ``t`` then ``f``."""

    rows: Rows
    base: Node | None = None


@dataclass(frozen=True, eq=False)
class PerSlot:
    """A row for each slot, which nothing adds to others: the region ends there, and views of it are plain tensors."""

    rows: Rows


@dataclass(frozen=True, eq=False)
class Many:
    """A tuple or list of facts (chunk, where, sort, unbind)."""

    items: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Lost:
    """Routing information ended here: refusal code, the node, and what fills the code's message."""

    code: str
    node: Node
    details: dict[str, Any] = field(default_factory=dict)


def feature(size: int) -> Atom:
    """The atom of a feature dimension."""
    return Atom("f", 0, size)


Finding = Fact | Inverse | Unmasked | Stacked | PerSlot | Many | Lost | None
"""What a rule returns: what its operation's result is, why nobody knows it any more, or nothing about routing."""
