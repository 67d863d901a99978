"""A loop body that was traced for one module of a list, written out for the others; see moefuse/capture/modules.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.ir.expr import ExpertVector, Expr, Gate, Leaf, Linear, SharedVector, SlotWeight, Token, rewritten, walk
from moefuse.passes.ir.facts import Part, RowNumber

Siblings = Mapping[Node, Assumption]
"""Row of a representative -> the assumption that knows its siblings."""


def instances(siblings: Siblings, part: Part, parts: list[Part]) -> list[tuple[int, Expr]] | None:
    """(expert, its expression) for every expert that a part stands for; None if the second trace does not say the same as the first."""
    number, expr = part.rows.domain.expert, part.rows.expr
    known = siblings.get(number.row) if isinstance(number, RowNumber) else None
    if known is None or known.witness is None or not any(source in known.siblings for source in _sources(expr)):
        return [(number if number is not None else 0, expr)]
    witness = [p for p in parts if isinstance(p.rows.domain.expert, RowNumber) and p.rows.domain.expert.row is known.witness_node]
    if len(witness) != 1 or _sources(instance(expr, known, known.witness)) != _sources(witness[0].rows.expr):
        return None
    return [(m, instance(expr, known, m)) for m in known.members]


def instance(expr: Expr, known: Assumption, member: int) -> Expr:
    """The expression with the weights and the number of another expert in place of the representative's."""

    def source(node: Node) -> Node:
        return known.siblings[node][member] if node in known.siblings else node

    def number(expert: int | None) -> int | None:
        return member if isinstance(expert, RowNumber) and expert.row is known.row_node else expert

    def leaf(old: Leaf) -> Leaf:
        return replace(old, expert=number(old.expert)) if old.stacked else replace(old, source=source(old.source))

    return rewritten(expr, source, leaf, number)


def _sources(expr: Expr) -> list[Node]:
    """Every tensor that an expression reads, in the order of its tree."""
    out: list[Node] = []
    for e in walk(expr):
        match e:
            case Token() | SlotWeight() | SharedVector() | Gate():
                out.append(e.source)
            case Linear():
                out.append(e.weight.source)
                out += [] if e.weight.held is None else [of.source for of in e.weight.held.leaves]
            case ExpertVector():
                out.append(e.vector.source)
    return out
