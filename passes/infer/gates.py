"""The weight that selects an expert, read out of a routing table."""

from __future__ import annotations

from torch.fx import Node

from moefuse.passes.ir.expr import Gate
from moefuse.passes.ir.facts import Table


def gate(node: Node, table: Table) -> Gate:
    """The weight a table gives the row's expert."""
    if table.slots is not None:
        return Gate(node, table.slots.root, True, False, table.expert)
    source = table.root if table.root is not None else node
    return Gate(node, source, False, table.ones, table.expert)
