"""The weight that selects an expert, read out of a routing table."""

from __future__ import annotations

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.ir.expr import Gate
from moefuse.passes.ir.facts import Table


def gate(node: Node, table: Table) -> Gate | None:
    """The weight a table gives the row's expert; None where its experts stand between its tokens."""
    if table.slots is not None:
        return Gate(node, table.slots.root, True, False, table.expert)
    source = table.root if table.root is not None else node
    kinds = [[a.kind for a in axis if a.kind == "e" or not same(a.size, 1)] for axis in table.root_axes]
    last = not kinds or kinds[-1] == ["e"]
    turned = not last and kinds[0] == ["e"]
    return Gate(node, source, False, table.ones, table.expert, turned) if last or turned or table.ones else None
