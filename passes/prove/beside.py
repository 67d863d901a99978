"""What a program does with the rows of experts beside the experts: it counts them, or adds up something else for them.

The experts of such a loop are one op then, and the sizes that depend on data stay in the graph, which so has to break.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from moefuse.errors import CODES
from moefuse.passes.graph.calls import call_of, fake, location, module_path, tensor
from moefuse.passes.graph.op_classes import ASSERTS, METADATA
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.infer.state import Context
from moefuse.passes.match.interpret import interpret
from moefuse.passes.prove.concerns import of_size
from moefuse.report.entries import Skipped

_WHAT = "how many tokens an expert has"


def beside(graph: Graph) -> Skipped | None:
    """The first statement of a rewritten graph that uses how many rows chose an expert, or those rows; None if there is none."""
    ctx = interpret(graph)
    own = {node for node, fact in ctx.facts.items() if of_size(ctx, node, fact) is not None and unbacked_in(fake(node))}
    for reader in _readers(ctx, own):
        found = next(n for n in reader.all_input_nodes if n in own)
        call = call_of(reader)
        place = found if call is None else reader
        if tensor(found) is not None and call is not None:
            detail = f"`{call.name}` reads their rows beside the experts; a mask does it for all rows, `(weights * (ids == e)).sum(-1)`"
        else:
            reads = "the program keeps that number" if call is None else f"`{call.name}` reads that number beside the experts"
            detail = f"{reads}; `(ids == e).sum()` is one that stays in the graph"
        return Skipped("not-captured", CODES["not-captured"].format(what=_WHAT, detail=detail), module_path(place), location(place))
    return None


def _readers(ctx: Context, own: set[Node]) -> Iterator[Node]:
    checks = _checks(ctx)
    for node in ctx.graph.nodes:
        call = ctx.calls[node]
        known = call is not None and (call.name in METADATA or node in own or node in checks)
        if not known and any(n in own for n in node.all_input_nodes):
            yield node
        if call is not None and call.name in METADATA and any(n in own for n in node.all_input_nodes):
            own.add(node)


def _checks(ctx: Context) -> set[Node]:
    """What is computed for assertions alone, which Dynamo writes for every such size."""
    found: set[Node] = set()
    for node in reversed(list(ctx.graph.nodes)):
        call = ctx.calls[node]
        if call is not None and (call.name in ASSERTS or (node.users and all(u in found for u in node.users))):
            found.add(node)
    return found
