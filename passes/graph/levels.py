"""Parts of a graph that torch.func transforms: between a level's begin and end every operation is batched or differentiated once more.

The fused op has no rules for that, so nothing there is replaced; what is before, behind and beside such a part is.
"""

from __future__ import annotations

import re

from torch.fx import Graph, Node

from moefuse.passes.graph.calls import call_of

_BEGIN = re.compile(r"_(\w+)_increment_nesting|_enter_(dual)_level")
_END = re.compile(r"_(\w+)_decrement_nesting|_exit_(dual)_level")


def levels(graph: Graph) -> dict[Node, str]:
    """The nodes inside a level, each with the name of the innermost: ``grad``, ``vmap``, ``jvp``, ``dual``."""
    found: dict[Node, str] = {}
    inside: list[str] = []
    for node in graph.nodes:
        call = call_of(node)
        begin = None if call is None else _BEGIN.fullmatch(call.name)
        if begin is not None:
            inside.append(next(filter(None, begin.groups())))
        elif inside and call is not None and _END.fullmatch(call.name):
            inside.pop()
        elif inside:
            found[node] = inside[-1]
    return found
