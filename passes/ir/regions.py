"""What the passes find: a mixture of experts, or why it is none."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.ir.expr import Expr, Gate, SharedVector, SlotWeight, Token, walk, weight_leaves
from moefuse.passes.ir.facts import (
    Lost,
    Part,
    Routing,
)
from moefuse.spec import Domain


@dataclass(frozen=True, eq=False)
class Weightless:
    """Experts behind the last one with weights: each adds ``expr`` of its token (often the token itself), routing weight included."""

    expr: Expr
    numbers: range


@dataclass(frozen=True)
class Outside:
    """What becomes of ids outside [0, E).

    ``wraps``: a negative one counts from the end. ``first``: it belongs to expert 0. ``low``, ``high``: what is beyond raises, if set.
    """

    wraps: bool = False
    first: bool = False
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, eq=False)
class Summed:
    """Weights that experts read as sums of one and its low-rank terms: where the first is made, and why.

    ``sums``: all that are made, each once. ``kept``: their gradients need them; not where only others read them.
    """

    node: Node
    why: str
    sums: tuple[Node, ...]
    kept: bool = True


@dataclass(frozen=True, eq=False)
class Region:
    """One mixture of experts of the program. Lifting says what it computes, and the safety check what of the program it spans.

    Attributes:
        anchor: the operation after which the result is complete; the new op goes behind it.
        holders: nodes that hold the result (several when it was accumulated in place).
        expr: what expert e adds for one (token, slot), routing weight included; leaves cover all experts.
        base: a tensor that the sum was added to, or None.
        parts: each expert's share, where the program adds one after another.
        rest: what experts without weights add, if there are such.
        nodes: everything computed only for this region, leaves excluded.
        leaves: tensors the region reads.
        own_writes: the writes among ``nodes`` by which it adds to its base, which go with it.
        replaced: what the experts give stands in place of the rows of ``base`` that chose one.
        per_slot: the result has a row for each slot, not their sum.
        outside: what becomes of ids that belong to no expert; None if that is nothing, as for the ops.
        whole: the same with low-rank terms added to its weights, as the program has them; None where they are not.
        summed: of the weights that have low-rank terms added to them, the first that is made; None where none is.
        shown: leaves that whoever called the graph may write to before the backward pass.
        unrounded: what its projections round of quantised activations is not to be rounded.
        trained: gradients may be recorded of what it reads.
    """

    anchor: Node
    holders: tuple[Node, ...]
    domain: Domain
    routing: Routing
    expr: Expr
    num_experts: int
    base: Node | None
    parts: tuple[Part, ...] = ()
    rest: Weightless | None = None
    nodes: frozenset[Node] = frozenset()
    leaves: tuple[Node, ...] = ()
    own_writes: frozenset[Node] = frozenset()
    per_slot: bool = False
    replaced: bool = False
    outside: Outside | None = None
    shown: frozenset[Node] = frozenset()
    whole: Region | None = None
    summed: Summed | None = None
    unrounded: bool = False
    trained: bool = False

    @property
    def all_experts(self) -> int:
        """Experts, those without weights included."""
        return self.num_experts if self.rest is None else self.rest.numbers.stop

    @property
    def by_slot(self) -> bool:
        """Whether a slot is what the ops have to see as a token: rows come or go one for each slot."""
        return self.per_slot or any(isinstance(e, Token) and e.by_slot for e in walk(self.expr))

    @property
    def value(self) -> Node:
        """A node whose fake value is the result's (an assignment by index has none of its own)."""
        return next((h for h in (self.anchor, *self.holders) if tensor(h) is not None), self.anchor)


@dataclass(frozen=True, eq=False)
class Refused:
    """A sum over experts that is not rewritten, the routing it belongs to, and where it would be, if it was understood."""

    lost: Lost
    routing: Routing | None
    anchor: Node | None = None


def sources(expr: Expr) -> list[Node]:
    """Every tensor an expression reads, weights included."""
    out: dict[Node, None] = {}
    for e in walk(expr):
        match e:
            case Token() | SlotWeight() | SharedVector():
                out[e.source] = None
            case Gate(ones=False):
                out[e.source] = None
    for leaf in weight_leaves(expr):
        out.update(dict.fromkeys(leaf.nodes))
        out.update(dict.fromkeys(n for of in (leaf.held.leaves if leaf.held is not None else ()) for n in of.nodes))
    return list(out)
