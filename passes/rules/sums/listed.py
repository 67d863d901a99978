"""Lists of experts' rows, added to the tokens that a list of row numbers names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Finding, Index, Listed, Part, Rows, Sum
from moefuse.passes.rules.rows.listed import items
from moefuse.passes.rules.sums.accumulate import accumulated, add_rows


def add(ctx: Context, node: Node, target: Node, where: Any, rows: Rows | Listed) -> Finding:
    """An expert's rows, or those of several, added to the tokens they came from."""
    return add_listed(ctx, node, target, where, rows) if isinstance(rows, Listed) else add_rows(ctx, node, target, where, rows)


def add_listed(ctx: Context, node: Node, target: Node, where: Any, rows: Listed) -> Sum | None:
    """Every expert's rows added to the tokens that they came from."""
    if not isinstance(where, Listed) or len(where.items) != len(rows.items):
        return None
    places, values = items(where), items(rows)
    for place, value in zip(places, values, strict=True):
        if not isinstance(place, Index) or place.of != "token" or not isinstance(value, Rows):
            return None
        if value.domain.selection is None or not place.selection.same(value.domain.selection):
            return None
    found = accumulated(ctx, node, target, values[0])
    more = tuple(Part(value, node) for value in values[1:])
    return replace(found, parts=(*found.parts, *more)) if isinstance(found, Sum) else None
