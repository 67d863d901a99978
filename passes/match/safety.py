"""Whether a region may be replaced: nothing in the program around it sees the difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.held import holds
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.masked_totals import STATISTIC
from moefuse.passes.graph.modes import autocast_dtype
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import COPIES, LOOKS_AT, SIZE_QUERIES
from moefuse.passes.infer.held import uncast
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Cast, Linear, Op, has_linear, walk, weight_leaves
from moefuse.passes.ir.facts import (
    Buffer,
    Counts,
    Fill,
    Filled,
    Hit,
    Index,
    IndexMatrix,
    Lost,
    Many,
    Mask,
    Pieces,
    Range,
    Routing,
    Rows,
    Sorted,
    Span,
    Sum,
    Table,
    Unmasked,
)
from moefuse.passes.ir.regions import Region, sources
from moefuse.passes.match.contexts import differ
from moefuse.passes.match.encodings import encoded
from moefuse.passes.match.liveness import live, unread
from moefuse.passes.match.transformed import transformed
from moefuse.program.breaks import resumed_at
from moefuse.spec import Domain

#: where the ops are at least as fast as what they replace; elsewhere the program stays as it is
_DEVICES = frozenset(("cpu", "cuda"))

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def checked(ctx: Context, region: Region) -> Region | Lost:
    """The region with what it spans of the program, if nothing in the program around it forbids the rewrite. Changes nothing."""
    bounds = ctx.sentinels.get(region.routing, set())
    if bounds - {region.num_experts}:
        return ctx.lost("missing-experts", region.anchor, present=f"below {min(bounds)}", count=str(region.num_experts))
    whole = _spanned(ctx, replace(region, expr=uncast(ctx, region.expr)))
    checks = (transformed, _mixed, encoded, _casts, _draws, _feeds_itself, _types, _modes, _mutations, _spoiled, _escapes)
    problems = (check(ctx, whole) for check in checks)
    return next((problem for problem in problems if problem is not None), whole)


def _spanned(ctx: Context, region: Region) -> Region:
    """The region with its rows' domain, leaves, nodes and writes."""
    rest = sources(region.rest.expr) if region.rest is not None else []
    leaves = tuple(dict.fromkeys((*sources(region.expr), *rest, *region.routing.sources)))
    whole = replace(region, domain=_spelling(ctx, region), leaves=leaves, own_writes=frozenset(own_writes(ctx, region)))
    nodes = slice_of(ctx, whole)
    for node in unread(ctx):
        if not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    nodes |= _bound_again(ctx, region, nodes)
    return replace(whole, nodes=frozenset(nodes), shown=_shown(ctx, whole), trained=_trained(ctx, whole))


def _bound_again(ctx: Context, region: Region, nodes: set[Node]) -> set[Node]:
    """The result again, bound behind the region by an operation that only looks at its values: ``out = out.type_as(y)``."""
    names = set(ctx.memory.storages(region.anchor))
    later = [h for h in region.holders if ctx.position[h] > ctx.position[region.anchor] and not ctx.memory.targets[h]]
    return {
        h
        for h in later
        if not nodes.isdisjoint(h.all_input_nodes) and all(not names.isdisjoint(ctx.memory.storages(i)) for i in _read_by(ctx, h))
    }


def _casts(ctx: Context, region: Region) -> Lost | None:
    """Templates look through casts that round. Behind one that does more, 16 bits would hide how far the fused op is off."""
    exprs = [region.expr] if region.rest is None else [region.expr, region.rest.expr]
    cast = next((e for expr in exprs for e in walk(expr) if isinstance(e, Cast) and not e.rounds and not e.counts), None)
    return (
        None
        if cast is None
        else ctx.lost("no-rule", cast.node, how=f"a cast to {str(cast.dtype).removeprefix('torch.')}, which does more than round them")
    )


def _draws(ctx: Context, region: Region) -> Lost | None:
    """A dropout draws once: it has to be one place of the tree, whatever reads it.

    What experts without weights add is computed once for a token, of which several slots may have chosen one of them.
    """
    drops = {id(e): e.node for e in walk(region.expr) if isinstance(e, Op) and e.name == "dropout"}
    found = next((node for node in drops.values() if list(drops.values()).count(node) > 1), None)
    if found is None and region.rest is not None:
        found = next((e.node for e in walk(region.rest.expr) if isinstance(e, Op) and e.name == "dropout"), None)
    return None if found is None else ctx.lost("random", found, op="dropout")


def _spelling(ctx: Context, region: Region) -> Domain:
    """The rows the projections ran on (sorted rows are unsorted before they are summed)."""
    projections = [e.node for e in walk(region.expr) if isinstance(e, Linear)]
    for node in projections:
        fact = ctx.facts.get(node)
        if isinstance(fact, Rows):
            return fact.domain.name  # type: ignore[return-value]
    return "masked" if region.domain == "selected" and projections else region.domain  # rows were taken behind the experts


def _read_by(ctx: Context, node: Node) -> list[Node]:
    """The inputs whose values an operation reads; ``zeros_like(x)`` and ``y.type_as(x)`` only look at x's shape or dtype.

    The number of an expert's rows is a value of the region, though: only its run knows it.
    """
    call = ctx.calls[node]
    if call is not None and call.name in SIZE_QUERIES and isinstance(ctx.facts.get(node.all_input_nodes[0]), Rows | Index | IndexMatrix):
        return node.all_input_nodes
    if call is None or call.name not in LOOKS_AT:
        return node.all_input_nodes
    found: list[Node] = []
    torch.fx.node.map_arg([a for i, a in enumerate(call.args) if i not in LOOKS_AT[call.name]], found.append)
    return found


def slice_of(ctx: Context, region: Region) -> set[Node]:
    """Everything between the leaves and the anchor, in-place writes included.

    Of the writes to the storage of a base only the region's own: what was written before them is the base, and stays.
    """
    stop = set(region.leaves) | ({region.base} if region.base is not None else set())
    kept = {name for n in stop for name in ctx.memory.storages(n)}
    last = ctx.position[region.anchor]
    own = region.own_writes
    first = min((ctx.position[w] for w in own), default=last)
    under = set(ctx.memory.storages(region.base)) if region.base is not None else set()
    seen: set[Node] = set()
    shares = [p.node for p in region.parts] if region.base is not None else []  # ``out[rows] = y`` names the base, not what it held before
    stack = [region.anchor, *(n for n in (*region.holders, *shares) if ctx.position[n] <= last)]
    while stack:
        node = stack.pop()
        if node in seen or node in stop or ctx.first[node] in stop or ctx.calls.get(node) is None:
            continue
        before = own and ctx.position[node] < first and not under.isdisjoint(ctx.memory.storages(node))
        if before or (node not in own and any(name in under for t in ctx.memory.targets[node] for name in ctx.memory.storages(t))):
            continue
        seen.add(node)
        stack.extend(_read_by(ctx, node))
        stack.extend(i for i in node.all_input_nodes if isinstance(ctx.facts.get(i), Rows))  # of ``zeros_like(x[mask])`` the number of rows
        for name in ctx.memory.storages(node):
            stack.extend(w for w in ctx.writes.get(name, ()) if ctx.position[w] <= last and name not in kept)
    return seen | own


def own_writes(ctx: Context, region: Region) -> set[Node]:
    """The writes by which a region adds to its base."""
    if region.base is None:
        return set()
    names = set(ctx.memory.storages(region.base))
    adding = (n for n in (region.anchor, *(p.node for p in region.parts)) if n in ctx.memory.targets)
    return {n for n in adding if any(name in names for t in ctx.memory.targets[n] for name in ctx.memory.storages(t))}


def _trained(ctx: Context, region: Region) -> bool:
    """Whether gradients are recorded, and something that the region reads has one. (torch's guards are about both.)"""
    return ctx.mode[region.anchor].grad and any(v is not None and v.requires_grad for v in map(tensor, region.leaves))


def _shown(ctx: Context, region: Region) -> frozenset[Node]:
    """Leaves in memory that others have too, the graph's inputs and what it gives out, where gradients are recorded."""
    if not ctx.mode[region.anchor].grad:
        return frozenset()
    given = (_copied(ctx, n) for node in ctx.graph.find_nodes(op="output") for n in node.all_input_nodes)
    names = {name for n in given for name in ctx.memory.storages(n)}
    return frozenset(n for n in region.leaves if any(name in names or ctx.memory.outlives(name) for name in ctx.memory.storages(n)))


def _copied(ctx: Context, node: Node) -> Node:
    """What a result is a copy of: Inductor takes the copy away, so that who writes to the result writes to that."""
    call = ctx.calls.get(node)
    while call is not None and call.name in COPIES and isinstance(call.args[0], Node):
        node = call.args[0]
        call = ctx.calls.get(node)
    return node


def _types(ctx: Context, region: Region) -> Lost | None:
    """Dtypes and devices the ops accept."""
    leaves = weight_leaves(region.expr)
    values = [(leaf.held, tensor(n)) for leaf in leaves for n in leaf.nodes]
    devices = {v.device.type for _, v in values if v is not None}
    for held, v in values:
        if v is not None and held is None and v.dtype not in _FLOATS:
            return ctx.lost("dtype-unsupported", region.anchor, dtype=str(v.dtype).removeprefix("torch."), detail="expert weights")
    if devices - _DEVICES:
        return ctx.lost("device-unsupported", region.anchor, device=", ".join(sorted(devices)), detail="it has no kernel there")
    return _computed_in(ctx, region)


def _computed_in(ctx: Context, region: Region) -> Lost | None:
    """Each projection computes in the dtype of its weight, or all in one of 16 bits from weights in float32.

    Those that are multiplied as they are held compute in one; what is beside them is asked when it is lowered.
    """
    found = [e for e in walk(region.expr) if isinstance(e, Linear)]
    dtypes = {e: (a.dtype, b.dtype) for e in found if (a := tensor(e.node)) is not None and (b := tensor(e.weight.source)) is not None}
    rounded = {e: pair for e, pair in dtypes.items() if pair[0] != pair[1] and e.weight.held is None}
    results = {result for e, (result, _) in dtypes.items() if rounded or e.weight.held is not None}
    if len(results) > 1:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in results))
        return ctx.lost("dtype-unsupported", found[0].node, dtype=names, detail="the products of one expert compute in several dtypes")
    for e, (out, held) in rounded.items():
        names = f"{out} from {held} weights".replace("torch.", "")
        rounds = autocast_dtype(ctx.mode[e.node], tensor(e.node).device.type) is not None  # type: ignore[union-attr]
        casts = "autocast inside the experts" if rounds else "rows and weights of the experts differ in dtype"
        if not holds(held, out):
            return ctx.lost("dtype-unsupported", region.anchor, dtype=names, detail=casts)
    return None


def _modes(ctx: Context, region: Region) -> Lost | None:
    """Grad mode is the same for everything that is differentiated, and for the sum.

    Autocast need not be: what it does to an operation stands in the dtype of the result, which :func:`_computed_in` asks.
    """
    mode = ctx.mode[region.anchor]
    sums = region.nodes - region.whole.nodes if region.whole is not None else frozenset()
    for node in sorted(region.nodes, key=ctx.position.__getitem__):
        value, fact = tensor(node), ctx.facts.get(node)
        counts = isinstance(fact, Counts | Hit | Span | Sorted | Range | Fill) or (isinstance(fact, Mask) and fact.weight is None)
        if value is None or not value.dtype.is_floating_point or counts or (isinstance(fact, Table) and fact.ones):
            continue
        if node.meta.get(STATISTIC):
            continue
        here = ctx.mode[node]
        # What is added without gradients has none, however it was computed; an accumulator keeps those that it had.
        grads = (
            here.grad == mode.grad or node in sums or (here.grad and not isinstance(fact, Sum | Buffer)) or not _differentiates(ctx, node)
        )
        if not grads:
            return differ(ctx, node, region.anchor)
    begun = region.base if region.own_writes and not mode.grad else None
    if begun is not None and _requires_grad(begun):  # and still does behind a sum without gradients that is made in it
        return differ(ctx, begun, region.anchor)
    return None


def _differentiates(ctx: Context, node: Node) -> bool:
    """Whether an operation would have a gradient if gradients were recorded; zeros for an accumulator have none."""
    return any(map(_requires_grad, _read_by(ctx, node)))


def _requires_grad(node: Node) -> bool:
    value = tensor(node)
    return value is not None and value.requires_grad


def _mutations(ctx: Context, region: Region) -> Lost | None:
    """No leaf is written to between its first use in the region and the anchor."""
    if region.base is not None:
        root = ctx.storage[region.base]
        if region.own_writes and (ctx.memory.outlives(root) or (root is not region.base and root not in region.nodes)):
            return _kept_elsewhere(ctx, region, root)
    read = sources(region.expr)
    for source in region.leaves:
        names = set(ctx.memory.storages(source))
        used = [n for n in region.nodes if any(not names.isdisjoint(ctx.memory.storages(i)) for i in n.all_input_nodes)]
        first = min(used, key=ctx.position.__getitem__, default=None)
        write = ctx.written_between(source, first, region.anchor) if first is not None else None
        if write is not None and (source is not region.base or source in read):
            return ctx.lost("mutation", write, name=named(source))
    return None


def _kept_elsewhere(ctx: Context, region: Region, root: Node) -> Lost:
    """The refusal of a sum that is made in memory from outside the graph."""
    if any(root in ctx.memory.storages(leaf) for leaf in region.leaves if leaf is not region.base):
        return ctx.lost("mutation", region.anchor, name=named(root))
    at = resumed_at(region.anchor.meta.get("stack_trace") or "")
    where = f"which comes from before the graph break at {at}" if at else "which this graph is given from outside"
    return ctx.lost("mutation", region.anchor, name=named(root), where=where)


def _spoiled(ctx: Context, region: Region) -> Lost | None:
    """Nothing that the region reads is written to behind it where gradients are recorded.

    What the program keeps for its gradients, and so whether they are those of the old or the new values, is another matter for the op.
    """
    if not region.trained:
        return None
    results = {name for h in region.holders for name in ctx.memory.storages(h)}
    kept = {name for leaf in region.leaves for name in ctx.memory.storages(leaf)}
    reads = {i for n in region.nodes for i in n.all_input_nodes if not _only_number(ctx, n) or not kept.isdisjoint(ctx.memory.storages(i))}
    for source in sorted(reads, key=ctx.position.__getitem__):
        write = None if results & set(ctx.memory.storages(source)) else ctx.memory.written_behind(source, region.anchor)
        if write is not None:
            return ctx.lost("mutation", write, name=named(source))
    return None


def _only_number(ctx: Context, node: Node) -> bool:
    """Whether an operation reads its inputs for a number of slots, which no gradient needs."""
    fact = ctx.facts.get(node)
    return isinstance(fact, Span) or (isinstance(fact, Fill) and tensor(node) is None)


def _feeds_itself(ctx: Context, region: Region) -> Lost | None:
    """No input of the region is computed from what its experts computed."""
    inside = {n for n in region.nodes if _expert_value(ctx.facts.get(n))} | {e.node for e in walk(region.expr) if isinstance(e, Linear)}
    first = min((ctx.position[n] for n in inside), default=0)
    for source in (s for s in region.leaves if ctx.calls.get(s) is not None):
        stack, seen = [source], {source}
        while stack:
            node = stack.pop()
            if node in inside:
                return ctx.lost("value-escapes", source, name=named(node))
            new = [i for i in node.all_input_nodes if i not in seen and ctx.position[i] >= first]
            seen.update(new)
            stack.extend(new)
    return None


def _mixed(ctx: Context, region: Region) -> Lost | None:
    """No input of the region is computed from the rows of one of its experts: what that is depends on which tokens were routed there."""
    first = ctx.position[region.routing.node]
    for source in (s for s in region.leaves if ctx.calls.get(s) is not None):
        stack, seen = [source], {source}
        while stack:
            node = stack.pop()
            fact = ctx.facts.get(node)
            if isinstance(fact, Lost) and any(_of_routing(ctx.facts.get(i), region.routing) for i in node.all_input_nodes):
                return fact
            new = [i for i in node.all_input_nodes if i not in seen and ctx.position[i] > first]
            seen.update(new)
            stack.extend(new)
    return None


def _of_routing(fact: Any, routing: Routing) -> bool:
    """Whether a fact is rows that a routing chose."""
    return isinstance(fact, Rows) and fact.domain.routing is routing


def _escapes(ctx: Context, region: Region) -> Lost | None:
    """Nothing the experts computed is read outside the region."""
    last = ctx.position[region.anchor]
    outside = [
        (node, user)
        for node in sorted(region.nodes, key=ctx.position.__getitem__)
        if node in region.holders or _expert_value(ctx.facts.get(node))
        for user in node.users
        if user not in region.nodes and not _asks_size(ctx, user) and not (node in region.holders and ctx.position[user] > last)
    ]
    needed = live(ctx) if outside else set()
    for node, user in (pair for pair in outside if pair[1] in needed):
        call = ctx.calls.get(user)
        code = "hook" if call is not None and call.name == "register_hook" else "value-escapes"
        return ctx.lost(code, node if user.op == "output" else user, name=named(node))
    return _stale(ctx, region)


def _asks_size(ctx: Context, node: Node) -> bool:
    call = ctx.calls.get(node)
    return call is not None and call.name in SIZE_QUERIES


def _stale(ctx: Context, region: Region) -> Lost | None:
    """Nothing but the result's readers finds a version of the accumulator that the region made."""
    last, holders = ctx.position[region.anchor], set(region.holders)
    results = {name for h in region.holders for name in ctx.memory.storages(h)}
    first: dict[Node, int] = {}
    for node in region.nodes:
        for name in (name for t in ctx.memory.targets[node] for name in ctx.memory.storages(t) if name in results):
            first[name] = min(first.get(name, last), ctx.position[node])
    finds = [
        (alias, user)
        for name, start in first.items()
        for alias in ctx.aliases[name]
        if ctx.position[alias] <= last
        for user in alias.users
        if user not in region.nodes and ctx.position[user] > start and not _asks_size(ctx, user)
        if not (alias in holders and ctx.position[user] > last)
    ]
    needed = live(ctx) if finds else set()
    found = next((alias for alias, user in finds if user in needed), None)
    return None if found is None else ctx.lost("alias", region.anchor, name=named(found))


def _expert_value(fact: Any) -> bool:
    """Whether a fact is something an expert computed."""
    if isinstance(fact, Many):
        return any(_expert_value(f) for f in fact.items)
    if isinstance(fact, Rows):
        return has_linear(fact.expr)
    return isinstance(fact, Sum | Unmasked | Buffer | Pieces | Filled | Lost)
