"""Dead-code elimination: of a region once its result is there, and of a captured loop once its layers are fused.

What makes it right: a node goes only with everything that reads it, so no node is left without an input. Beyond that

- of a region (``sweep``) every operation is understood, so what it computes is the replacement's; a write goes only if its storage goes
  too, or if it adds to the base whose new value is the replacement (``Region.own_writes``). No write to what outlives the graph does.
- of a whole graph (``erase``) only what neither the result nor any effect needs: writes, random draws, operators and methods of unknown
  effect are effects, and a write is needed where something that is needed may show it (match/liveness.py).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import pairwise

import torch
from torch.fx import Node

from moefuse.passes.graph.modes import ambient, modes
from moefuse.passes.graph.op_classes import MODES, SIZE_QUERIES
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.liveness import live
from moefuse.passes.match.promises import promised


def sweep(ctx: Context, region: Region) -> None:
    """Erase nodes of a region that nothing reads any more; size queries of them and their assertions go with them."""

    def writes_outside(node: Node, doomed: Set[Node]) -> bool:
        names = {name for t in ctx.memory.targets.get(node, ()) for name in ctx.memory.storages(t)}
        return any(name not in doomed and (ctx.memory.outlives(name) or node not in region.own_writes) for name in names)

    _eliminate(ctx, region.nodes | _queries(ctx, region.nodes), writes_outside)


def erase(ctx: Context, scoped: set[Node]) -> None:
    """Erase what nothing reads any more, and the assertions about sizes that are gone with it.

    Args:
        ctx: the graph, already rewritten.
        scoped: what was recorded under assumptions; grad modes are switched back for operations that are gone only here.
    """
    _eliminate(ctx, set(ctx.graph.nodes) - live(ctx))
    _drop_idle_modes(ctx, scoped)


def _eliminate(ctx: Context, dead: Set[Node], stays: Callable[[Node, Set[Node]], bool] = lambda *_: False) -> None:
    """Erase the largest set of ``dead`` nodes that no other node reads, and of which none ``stays`` where the set is erased."""
    while kept := {n for n in dead if any(u not in dead for u in n.users) or stays(n, dead)}:
        dead = dead - kept
    for node in reversed([n for n in ctx.graph.nodes if n in dead]):
        ctx.graph.erase_node(node)


def _queries(ctx: Context, nodes: Set[Node]) -> set[Node]:
    """Size queries of the nodes, arithmetic on them, and the assertions that end there.

    Dynamo reads the length of ``torch.where(mask)[0]`` from a second, otherwise unused item of the tuple.
    """
    found: set[Node] = set()
    stack = [u for n in nodes for u in n.users if u not in nodes]
    while stack:
        node = stack.pop()
        if node in found or node in nodes:
            continue
        call = ctx.calls.get(node)
        if call is None or promised(ctx, node) or not (call.name in SIZE_QUERIES or call.name == "getitem" or _symbolic(node)):
            continue
        found.add(node)
        stack.extend(node.users)
    return found


def _symbolic(node: Node) -> bool:
    """Whether a node computes with sizes only."""
    value = node.meta.get("example_value")
    return value is not None and isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | bool | int)


def _drop_idle_modes(ctx: Context, scoped: set[Node]) -> None:
    """Switches of a mode that were made in a scope for operations that are gone, and contexts in it that change nothing."""
    count = -1
    while count != len(ctx.graph.nodes):
        count = len(ctx.graph.nodes)
        _drop_idle_contexts(ctx, scoped)
        _drop_idle_switches(ctx, scoped)


def _drop_idle_contexts(ctx: Context, scoped: set[Node]) -> None:
    """Contexts with nothing in them, or that begin and end without a change."""
    calls = {node: ctx.calls.get(node) for node in ctx.graph.nodes}
    mode, order = modes(calls), list(calls)
    before = dict(pairwise(reversed(order)))
    ends = {
        node.all_input_nodes[0]: node for node, call in calls.items() if call is not None and call.name in MODES and node.all_input_nodes
    }
    for begin, end in ends.items():
        same = mode[begin] == (mode[before[begin]] if begin in before else ambient()) and mode[end] == mode[before[end]]
        if {begin, end} <= scoped and (same or before[end] is begin):
            ctx.graph.erase_node(end)
            ctx.graph.erase_node(begin)
            return


def _drop_idle_switches(ctx: Context, scoped: set[Node]) -> None:
    """Grad modes that were switched in a scope for operations that are gone."""
    order = [n for n in ctx.graph.nodes if n.op not in ("placeholder", "get_attr")]
    now = torch.is_grad_enabled()
    kept: list[tuple[Node, bool]] = []
    for node in order:
        call = ctx.calls.get(node)
        switches = call is not None and call.name == "_set_grad_enabled" and isinstance(call.args[0], bool)
        if switches and kept and kept[-1][1] and kept[-1][0] in scoped:
            ctx.graph.erase_node(kept.pop()[0])
        kept.append((node, switches))
    for node, switches in kept:
        if not switches:
            continue
        wanted = bool(node.args[0])
        if wanted == now and node in scoped:
            ctx.graph.erase_node(node)
        now = wanted
