"""Lowering of a region whose experts are spread over ranks: tokens travel to them, and what they computed travels back.

The same ops on the weights that this rank holds, between ``moefuse::ep_dispatch`` and ``moefuse::ep_combine``. What is proved before is the
region on the full weights (``lower.py``); that the two are one function is the meaning of these ops (``moefuse/ops/parallel.py``), as long
as the weights are views of the sharded ones, expert by expert, which is read from their strides (``passes/graph/sharded.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.encoding import parse
from moefuse.ops.meaning.token_codes import Rounding
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import fake, module_path, tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.sharded import SLICES, Local, NotLocalError, gather_of, is_gathered, local_view, origin
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.ir.expr import Expr, Gate, Leaf, SharedVector, Slice, SlotWeight, Token, computed_in, walk, weight_leaves
from moefuse.passes.ir.form import form_of
from moefuse.passes.ir.hidden_units import Hidden, of_part
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.alike import check_alike
from moefuse.passes.lower.held import encoding_of
from moefuse.passes.lower.lower import BySlot, Lowered, Lowering
from moefuse.passes.match.templates import Body
from moefuse.runtime.groups import Terms, of_weight, weight_of
from moefuse.spec import Tier

_ROUNDS = ("allgather",)
"""Transports by which P times the tokens of a rank arrive, and that may travel in parts."""
_AS_ONE = (*_ROUNDS, "symm")
"""Transports whose dispatch, experts and combine are one op."""


ROUNDED_FROM = {"one host": 16 << 20, "several": 1 << 20}
"""Bytes of a rank's tokens. Rounding them is one more launch, 10 to 30 us where the host is behind; on two H200 the layer is 1.03x to 1.05x
as fast from 16 MiB on, launched too (benchmarks/results/row-codes-h200x2.json). Between hosts 1 MiB takes 20 us and more."""


def pays_to_round(most: Sequence[object], row: int, hosts: int) -> bool:
    """Whether tokens of ``row`` bytes are rounded before they travel, by what all ranks have alike: the most tokens of one on each way,
    where that is a number, and the number of hosts."""
    known = [n for n in most if isinstance(n, int)]
    least = ROUNDED_FROM["several" if hosts > 1 else "one host"]
    return min(known) * row >= least if known else hosts > 1


def keeps_less(text: str) -> bool:
    """Whether training keeps fewer rows than may come."""
    terms = Terms.parse(text)
    return terms.bound == "exact" or (terms.bound != "most" and terms.transport in _SHARES)


_SHARES = ("allgather", "symm")
"""Transports whose rows are of all ranks alike, so that a rank's even share of their slots is known."""


@dataclass(frozen=True)
class Hop:
    """One way that tokens travel, over one mesh. ``place``: the table of experts; None where every rank has a slice of each."""

    place: Node | None
    slots: int
    terms: str


@dataclass(frozen=True)
class Sharding:
    """Where the experts of a region are: ``hops`` in the order that tokens take them, and how many experts this rank has at their end."""

    hops: tuple[Hop, ...]
    held: int
    hidden: Hidden | None = None
    """What ranks with slices of experts have parts of."""

    @property
    def sliced(self) -> str:
        """The terms under which every rank has a slice of the experts that are here; empty if it has them whole."""
        return next((hop.terms for hop in self.hops if hop.place is None), "")

    @property
    def placed(self) -> Hop | None:
        """The way to ranks that have other experts; None if each has all of them."""
        return next((hop for hop in self.hops if hop.place is not None), None)

    @property
    def gathers(self) -> bool:
        """Whether weights are to go to the tokens."""
        return any(Terms.parse(hop.terms).transport == "gather" for hop in self.hops)

    def of(self, experts: str) -> Sharding:
        """The same, by terms that say which experts run there: ranks whose Python numbers differ find out before tokens travel."""
        return replace(self, hops=tuple(replace(hop, terms=of_weight(hop.terms, experts)) for hop in self.hops))

    def travels_by(self, *transports: str) -> bool:
        """Whether tokens take one way, which is one of these."""
        return len(self.hops) == 1 and Terms.parse(self.hops[0].terms).transport in transports

    def describe(self, experts: int) -> str:
        """For the report."""
        return ", ".join(Terms.parse(hop.terms).describe(self.held, experts) for hop in self.hops)


def sharding(region: Region) -> Sharding | None:
    """Where the experts of a region are; None where no weight of it is sharded.

    Raises:
        NotLocalError: some are, and the region cannot run where they are.
    """
    leaves = weight_leaves(region.expr)
    first = gather_of(n for leaf in leaves for n in (leaf.parts or (leaf.source,)))
    if first is None:
        return None
    if Terms.parse(first.args[-1]).transport == "gather":  # type: ignore[arg-type]
        return Sharding(*_hops(first))
    if region.rest is not None:
        raise NotLocalError("some of the experts have no weights")
    found = {leaf: hops_of(leaf, region.num_experts) for leaf in leaves}
    sliced = any(hop.place is None for hops, _ in found.values() for hop in hops)
    hidden = Hidden(region.expr) if sliced else None
    added = {leaf: found.pop(leaf) for leaf in hidden.behind} if hidden is not None else {}
    whole = [leaf for leaf, (hops, _) in found.items() if not hops]
    if any(leaf.zeros for leaf in found if leaf not in whole):
        raise NotLocalError("some of the experts have no adapter")
    spread = {found[leaf] for leaf in found if leaf not in whole}
    if len(spread) != 1:
        raise NotLocalError("its weights are sharded in different ways")
    where = Sharding(*spread.pop(), hidden)
    if where.sliced:
        _of_slices(region, whole)
    placed = tuple(hop for hop in where.hops if hop.place is not None)
    if any(hops != (placed, where.held) for hops in added.values()):
        raise NotLocalError("its weights are sharded in different ways")
    if placed:
        alike = (node for leaf in whole for node in leaf.nodes)
        check_alike((*alike, *(e.source for e in walk(region.expr) if isinstance(e, SharedVector))))
    return where


def _of_slices(region: Region, whole: list[Leaf]) -> None:
    """What ranks with slices of experts have whole is behind their sums, or nowhere."""
    shared = next((e for e in walk(region.expr) if isinstance(e, SharedVector)), None)
    if shared is not None:
        raise NotLocalError(f"{named(shared.source)} is one tensor for all experts, of which ranks have slices")
    if whole:
        name = named((whole[0].parts or (whole[0].source,))[0])
        raise NotLocalError(f"{name} is whole on every rank, and of weights beside it ranks have slices")


def hops_of(leaf: Leaf, experts: int) -> tuple[tuple[Hop, ...], int]:
    """How tokens travel to the ranks that have a weight, in the order that they do; and of how many experts this rank has it.

    Slices come first: what is added up over them has a row for each token of a rank, and not for those that arrive.
    """
    call = origin((leaf.parts or (leaf.source,))[0])
    return ((), experts) if call is None else _hops(call)


def _hops(call: Node) -> tuple[tuple[Hop, ...], int]:
    hops: list[Hop] = []
    while is_gathered(call):
        place, slots, terms = (None, 0, call.args[3]) if call.target is SLICES else call.args[1:]
        hops.append(Hop(place, slots, weight_of(terms)[0]))  # type: ignore[arg-type]
        call = call.args[0]  # type: ignore[assignment]
    return tuple(sorted(hops, key=lambda hop: hop.place is not None)), int(shape_of(fake(call))[0])


class Spread(Lowering):
    """Builds the replacement of a region whose experts are spread.

    ``grad``: something is differentiated. If nothing is, ``limit``: bytes that what arrives of other ranks may take; None if all of it
    may come at once.
    """

    def __init__(self, region: Region, emit: Emitter, where: Sharding, grad: bool, limit: int | None) -> None:
        super().__init__(region, emit)
        self.where = where = where.of(f"[{form_of(region.expr)}]")
        self.grad = grad
        self.as_one = where.travels_by(*_AS_ONE) and not (grad and keeps_less(where.hops[0].terms))
        self.limit = limit if self.as_one and not grad and where.travels_by(*_ROUNDS) else None
        self.layer = module_path(region.anchor) or "the experts"
        self.arrived: dict[Hashable, Node] = {}
        self.way_back: list[tuple[list[Node], Node, Hop]] = []
        self.hidden = where.hidden
        self.rounding: Rounding | None = None
        self.inner: Spread = self  # who builds the experts
        self.spare = 0  # experts of zeros behind those that are here, with no token

    def travel(self, tier: Tier) -> str:
        """For the report: whether a limit is kept, and what travels."""
        if self.inner.rounding is not None:
            return ", tokens in 8 bits"
        if self.limit is None:
            return ""
        return ", in rounds" if tier == "fused" and self.inner.as_one else ", all tokens at once"

    def by_slot(self, region: Region, top_k: int) -> Lowering:
        self.inner = SpreadBySlot(region, self.emit, self.where, top_k, self.grad, self.limit)
        return self.inner

    def either(self) -> Lowered:
        lowered = super().either()
        result = lowered.result
        for handle, tokens, hop in reversed(self.way_back):
            result = self.emit(torch.ops.moefuse.ep_combine.default, result, handle, tokens, hop.terms, self.layer, place=hop.place)
        return replace(lowered, result=result)

    def fused(self, body: Body) -> Lowered:
        held = any(p is not None and (p.terms or p.weight.held is not None) for p in body.projections)
        self.as_one = self.as_one and not held
        if not self.as_one:
            dtype = computed_in(self.region.expr) or self.dtype(body.first.weight)
            self.rounding = self.rounds(body, dtype)
            self.send([(body.token, dtype)], [body.weight])
        return super().fused(body)

    def rounds(self, body: Body, dtype: torch.dtype) -> Rounding | None:
        """How tokens are rounded before they travel: as the experts would, that have no other use of them; None if they are not."""
        firsts = [(p.weight.held, p.terms) for p in (body.first, body.up) if p is not None]
        found = {None if held is None or terms else encoding_of(held, self.region.unrounded).activation for held, terms in firsts}
        how = found.pop()
        if body.weight_on_input or found or how is None or self.differentiated(body, dtype):
            return None
        width = fake(super().tokens(body.token, dtype)).shape[-1]
        if not isinstance(width, int) or not how.packs(width) or how.width(width) >= width * dtype.itemsize:
            return None
        tokens, ways = shape_of(fake(super().ids()))[0], [Terms.parse(hop.terms) for hop in self.where.hops]
        ways = [way for way in ways if way.transport != "all_reduce"]
        most = [tokens if way.most == "equal" else way.most for way in ways]
        pays = bool(ways) and pays_to_round(most, width * dtype.itemsize, max(way.group.spans for way in ways))
        return replace(how, came=str(dtype).removeprefix("torch.")) if pays else None

    def differentiated(self, body: Body, dtype: torch.dtype) -> bool:
        """Whether what is dispatched wants gradients, or the experts do: as the op finds when it runs, and other ranks with it."""
        sent = (super().tokens(body.token, dtype), super().slot_weights(body.weight), *self.trained())
        return self.grad and any(fake(node).requires_grad for node in sent)

    def codes(self, body: Body) -> tuple[list[Node], list[str]]:
        """As of :class:`Lowering`; the first projections get tokens as they came."""
        codes, encodings = super().codes(body)
        if self.rounding is None:
            return codes, encodings
        came = [replace(parse(text), activation=self.rounding) if text and i < 2 else text for i, text in enumerate(encodings)]
        return codes, list(map(str, came))

    def op(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """One op that has tokens travel, or that of the experts alone."""
        if not self.as_one:
            kept = next((hop.terms for hop in self.where.hops if hop.place is not None and keeps_less(hop.terms)), None)
            if kept is None:
                return super().op()
            room = self.emit(torch.ops.moefuse.room.default, self.ids()) if Terms.parse(kept).bound == "exact" else None
            return torch.ops.moefuse.bounded_experts.default, {"room": room, "terms": kept, "layer": self.layer}
        (hop,) = self.where.hops
        more = {"place": hop.place, "slots": hop.slots, "terms": hop.terms, "layer": self.layer, "limit": self.limit}
        return torch.ops.moefuse.ep_experts.default, more

    def vectors(self, leaf: Leaf | None) -> list[Node]:
        """What is added behind a sum over hidden units is added by one rank of those that have slices."""
        found = super().vectors(leaf)
        if self.hidden is None or leaf not in self.hidden.behind:
            return found
        return [self.emit(torch.ops.moefuse.on_one_rank.default, vector, self.where.sliced) for vector in found]

    def grouped(self) -> Lowered:
        found = list(walk(self.region.expr))
        tokens: list[tuple[Token, torch.dtype | None]] = [(e, None) for e in found if isinstance(e, Token)]
        self.send(tokens, [e for e in found if isinstance(e, SlotWeight | Gate)])
        self.spare = int(self.where.held == 0)  # grouped products are of one expert at least
        return super().grouped()

    def _rows(self, expr: Expr) -> Any:
        if self.hidden is not None and isinstance(expr, Slice):
            return super()._rows(of_part(expr, Terms.parse(self.where.sliced).group.size))
        return super()._rows(expr)

    def dropped(self, rows: Node, probability: float) -> Node:
        """Drawn for slots in the order in which all ranks have them: ranks that draw alike would drop the same of different rows."""
        ones = self.emit(torch.ones_like, rows)
        return self.emit(torch.mul, rows, self.emit(torch.index_select, super().dropped(ones, probability), 0, self.order()[0]))

    def send(self, tokens: list[tuple[Token, torch.dtype | None]], weights: list[Expr | None]) -> None:
        """Dispatch all that the experts read of a token, in one op."""
        rows: dict[Hashable, Node] = {}
        for token, dtype in tokens:
            rows.setdefault(_key(token, dtype), self.rounded(super().tokens(token, dtype)))
        for weight in filter(_differs, weights):
            rows.setdefault(_key(weight), super().slot_weights(weight))
        ids = super().ids()
        first = list(dict.fromkeys(rows.values()))
        sent, trained = list(first), self.trained()
        for hop in self.where.hops:
            out = self.emit(torch.ops.moefuse.ep_dispatch.default, sent, ids, hop.place, hop.slots, hop.terms, self.layer, trained)
            parts = [self.emit(operator.getitem, out, i) for i in range(len(fake(out)))]
            self.way_back.append((parts[len(sent) + 1 :], self.emit(torch.ops.aten.sym_size.int, ids, 0), hop))
            sent, ids = parts[: len(sent)], parts[len(sent)]
        got = dict(zip(first, sent, strict=True))
        self.arrived = {key: got[node] for key, node in rows.items()} | {"ids": ids}

    def rounded(self, tokens: Node) -> Node:
        """What is sent of tokens: 8 bits of each number, where their experts have no more of it."""
        if self.rounding is None:
            return tokens
        return self.emit(torch.ops.moefuse.row_codes.default, tokens, str(replace(self.rounding, came="")))

    def trained(self) -> list[Node]:
        """This rank's parts of the weights: where one is trained, it is so on every rank, which nothing says of tokens."""
        found: dict[Node, None] = {}
        for leaf in weight_leaves(self.region.expr):
            parts = leaf.parts or (leaf.source,)
            call = origin(parts[0])
            while call is not None and is_gathered(call):
                call = call.args[0]  # type: ignore[assignment]
            if not leaf.detached:
                found |= dict.fromkeys(parts if call is None else [call])
        shared = (e.source for e in walk(self.region.expr) if isinstance(e, SharedVector))
        return [node for node in (*found, *shared) if tensor(node) is not None]

    def ids(self) -> Node:
        return self.arrived.get("ids") or super().ids()

    def tokens(self, token: Token, dtype: torch.dtype | None) -> Node:
        return self.arrived[_key(token, dtype)] if self.arrived else super().tokens(token, dtype)

    def kept_tokens(self, token: Token, dtype: torch.dtype | None) -> Node:
        return self.tokens(token, dtype) if self.arrived else super().kept_tokens(token, dtype)

    def slot_weights(self, weight: Expr | None) -> Node:
        return self.arrived[_key(weight)] if self.arrived and _differs(weight) else super().slot_weights(weight)

    def numbers(self, leaf: Leaf, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Node:
        if origin(leaf.parts[0]) is not None:
            return self.sources(leaf)[0]
        return self.own(super().numbers(leaf, dtype, device))

    def shared(self, source: Node) -> Node:
        placed = self.where.placed
        if placed is None or tensor(source) is None:
            return source
        return self.once(source, lambda: self.emit(torch.ops.moefuse.own_experts.default, source, None, None, 0, placed.terms))

    def own(self, whole: Node) -> Node:
        """[held, ..]: this rank's rows of what every rank has of all experts, and one of zeros for each that is spare."""
        placed = self.where.placed
        if placed is None:
            return whole
        how = placed.place, placed.slots
        mine = self.once(placed, lambda: self.emit(torch.ops.moefuse.own_numbers.default, *how, self.where.held, placed.terms))
        return self.padded(self.emit(torch.ops.moefuse.own_experts.default, whole, mine, *how, placed.terms))

    def padded(self, rows: Node) -> Node:
        if not self.spare:
            return rows
        return self.emit(torch.nn.functional.pad, rows, (0, 0) * (fake(rows).dim() - 1) + (0, self.spare))

    def here(self) -> int:
        return self.where.held + self.spare

    def apart(self, leaf: Leaf) -> bool:
        return False

    def sources(self, leaf: Leaf) -> list[Node]:
        parts = list(leaf.parts or (leaf.source,))
        if origin(parts[0]) is None:
            return [self.once(leaf, lambda: self.whole(leaf))]
        local = local_view(parts, self.region.num_experts, *self.units(leaf))
        rows = self.padded(self.read(local))
        return [self.emit(torch.detach, rows) if leaf.detached else rows]

    def units(self, leaf: Leaf) -> tuple[int, int]:
        """Where a weight has hidden units, of which this rank has some."""
        return (0, 1) if self.hidden is None else self.hidden.units.get(leaf, (0, 1))

    def whole(self, leaf: Leaf) -> Node:
        """What this rank's experts have of a weight of which every rank has all: with experts where the leaf has them."""
        if leaf.parts and len(set(leaf.parts)) == 1 and not leaf.zeros:
            one = self.emit(torch.unsqueeze, self.shared(leaf.parts[0]), 0)
            return self.emit(torch.Tensor.expand, one, self.here(), *(-1 for _ in fake(one).shape[1:]))
        found = super().sources(leaf)
        rows = found[0] if len(found) == 1 and leaf.stacked and not leaf.zeros else self.emit(torch.stack, found)
        if not leaf.along or rows is not found[0]:
            return self.own(rows)
        return self.emit(torch.movedim, self.own(self.emit(torch.movedim, rows, leaf.along, 0)), 0, leaf.along)

    def read(self, local: Local) -> Node:
        """[held, ..]: what a view is of this rank's part of a Parameter."""
        view = local.view
        if local.whole:
            return local.node
        found = view.as_slices()
        if found is None:
            return self.emit(torch.as_strided, local.node, (self.where.held, *view.sizes), (local.step, *view.strides), view.start)
        cut, axes = found
        node = local.node
        if any(part != slice(0, n, 1) for part, n in zip(cut, view.whole, strict=True)):
            node = self.emit(operator.getitem, node, (slice(None), *cut))
        if list(axes) != sorted(axes):
            node = self.emit(torch.permute, node, (0, *(axis + 1 for axis in axes)))
        return node if tuple(fake(node).shape[1:]) == view.sizes else self.emit(torch.reshape, node, (self.where.held, *view.sizes))

    @staticmethod
    def dtype(leaf: Leaf) -> torch.dtype:
        value = tensor(leaf.source)
        assert value is not None
        return value.dtype


class SpreadBySlot(Spread, BySlot):
    """A region in which every slot is a token of its own."""

    def __init__(self, region: Region, emit: Emitter, where: Sharding, top_k: int, grad: bool, limit: int | None) -> None:
        Spread.__init__(self, region, emit, where, grad, limit)
        self.top_k = top_k


def _differs(weight: Expr | None) -> bool:
    """Whether routing weights are anything but ones."""
    return weight is not None and not (isinstance(weight, Gate) and weight.ones and not weight.slots)


def _key(what: Expr | None, dtype: torch.dtype | None = None) -> Hashable:
    if isinstance(what, Token):
        return "token", what.source, what.width, dtype
    return "weight", None if what is None else id(what)
