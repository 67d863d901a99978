"""What a program writes beside its experts where an expert has tokens, made right where it has none.

``if n == 0: continue`` in front of ``counts[e] += n`` is gone from the graph, so the write runs for every expert. It adds zero then; any
other value is masked by what the program asked. This is for numbers about the experts: what has gradients has them of values under the mask
of the same expert alone, so that they are zero, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.op_classes import MODES
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.graph.values import tensors_in
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Hit, Mask, RowNumber, Table
from moefuse.passes.lower.run_numbers import worth
from moefuse.passes.match.liveness import live, pure
from moefuse.passes.prove.concerns import Chosen, of_size
from moefuse.passes.prove.discharge import Claim, Unchanged
from moefuse.passes.rules.routing.nonempty import all_dims, any_of, hit_of


def unconditional(ctx: Context, claims: Sequence[Claim]) -> set[Node]:
    """The writes that stay in the graph and that scopes recorded, as far as they could be made harmless."""
    needed = live(ctx)
    sizes: dict[Any, Chosen] | None = None
    fine: dict[Node, bool] = {}
    for claim in claims:
        for node in sorted((n for n in claim.assumption.nodes if n in needed and n in ctx.position), key=ctx.position.__getitem__):
            call = ctx.calls[node]
            if call is None or claim.routing is None:
                continue
            if call.name == "_set_grad_enabled":
                fine[node] = fine.get(node, True) and _switched_back(ctx, claim)
            if not call.inplace and not _bound_again(claim, node, call):
                continue
            sizes = _sizes(ctx) if sizes is None else sizes
            fine[node] = fine.get(node, True) and _guarded(ctx, claim, node, call, sizes)
    return {node for node, harmless in fine.items() if harmless}


def _sizes(ctx: Context) -> dict[Any, Chosen]:
    """For each number of rows: whose."""
    found: dict[Any, Chosen] = {}
    for node, fact in ctx.facts.items():
        known = of_size(ctx, node, fact)
        if known is not None:
            found.setdefault(*known)
    return found


def _guarded(ctx: Context, claim: Claim, node: Node, call: Call, sizes: dict[Any, Chosen]) -> bool:
    if not call.inplace:
        return _same_again(ctx, claim, node, sizes)
    target = call.targets[0]
    if len(call.targets) != 1:
        return False
    if ctx.storage[target] in claim.assumption.nodes:
        return call.name in ("add", "sub", "mul", "div") and _inside(ctx, claim, ctx.storage[target])
    if call.name == "setitem" and len(node.args) == 3 and _itself(ctx, node):
        return True
    if not _under_its_mask(ctx, claim, node.args[-1]):
        return False
    if call.name in ("add", "sub") and len(node.args) == 2 and not node.kwargs and node.args[0] is target:
        return _adds_nothing(ctx, claim, node.args[1], sizes) or _masked(ctx, claim, node)
    return call.name == "setitem" and len(node.args) == 3 and _selected(ctx, claim, node)


def _bound_again(claim: Claim, node: Node, call: Call) -> bool:
    """``total = total + n``, which is read behind the scope."""
    of_two = call.name in ("add", "sub") and len(node.args) == 2 and not node.kwargs
    return of_two and any(new is node for _, _, new in claim.assumption.carried)


def _same_again(ctx: Context, claim: Claim, node: Node, sizes: dict[Any, Chosen]) -> bool:
    """Whether such a sum is the tensor that it adds to where no slot chose the claim's expert."""
    before, value = node.args
    old, new = tensor(before), tensor(node)
    if old is None or new is None or old.dtype != new.dtype or shape_of(old) != shape_of(new) or not _under_its_mask(ctx, claim, value):
        return False
    names = [name for n in (node, before) for name in ctx.memory.storages(n)]  # type: ignore[arg-type]
    if any(name in ctx.writes or ctx.memory.outlives(name) for name in names):
        return False  # the other way keeps the tensor itself: whoever writes to one of them could tell
    if not _adds_nothing(ctx, claim, value, sizes) and not _masked(ctx, claim, node):
        return False
    ctx.scratch(Unchanged).of[node] = before  # type: ignore[assignment]
    return True


def _switched_back(ctx: Context, claim: Claim) -> bool:
    """Whether a scope leaves the grad mode that it found: ``with torch.no_grad():`` around a counter."""
    order = list(ctx.position)
    at = [ctx.position[n] for n in claim.assumption.nodes if n in ctx.position and (c := ctx.calls[n]) is not None and c.name in MODES]
    return min(at) > 0 and ctx.mode[order[min(at) - 1]] == ctx.mode[order[max(at)]]


def _inside(ctx: Context, claim: Claim, storage: Node) -> bool:
    """Whether memory that a scope makes is read in the scope alone."""
    nodes = claim.assumption.nodes
    aliases = [n for n in ctx.aliases.get(storage, ()) if not n._erased]
    return all(a in nodes and all(u in nodes or u not in ctx.position for u in a.users) for a in aliases)


def _adds_nothing(ctx: Context, claim: Claim, value: Any, sizes: dict[Any, Chosen]) -> bool:
    """Whether a value is zero where no slot chose the claim's expert."""
    if not isinstance(value, Node):
        return False
    expr = worth(ctx, value)
    if expr is not None:
        gone = {symbol: 0 for symbol in expr.free_symbols if _covers(claim, sizes.get(symbol))}
        return bool(expr.xreplace(gone) == 0)
    fact = hit_of(ctx.facts.get(value))
    counts = isinstance(fact, Hit) and not fact.negated and fact.expert is not None
    return counts and _covers(claim, (fact.routing, fact.expert, fact.slot))


def _under_its_mask(ctx: Context, claim: Claim, value: Any) -> bool:
    """Whether all that a value has gradients of is under the mask of the claim's expert, so that they are zero where no slot chose it."""
    stack: list[Any] = [value]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen or not any(t.requires_grad for t in tensors_in(fake(node))):
            continue
        seen.add(node)
        call = ctx.calls.get(node)
        if call is None or not pure(ctx, node):
            return False
        under = call.name == "where" and len(call.args) == 3 and _is_its_mask(ctx, claim, call.args[0])
        stack.extend(call.args[2:] if under else node.all_input_nodes)
    return True


def _is_its_mask(ctx: Context, claim: Claim, mask: Any) -> bool:
    """Whether a mask is true for nothing but slots of the claim's expert."""
    fact = ctx.facts.get(mask)
    hit = any_of(fact, all_dims(fact, None)) if isinstance(fact, Mask | Table) else None
    if hit is None or hit.expert is None or ctx.storage[mask] in ctx.writes:
        return False
    return _covers(claim, (hit.routing, hit.expert, hit.slot))


def _covers(claim: Claim, chosen: Chosen | None) -> bool:
    if chosen is None or claim.routing is not chosen[0] or claim.expert != chosen[1]:
        return False
    return claim.slot is None or claim.slot == chosen[2]


def _itself(ctx: Context, node: Node) -> bool:
    """``counts[e] += n`` is ``view = counts[e]; view += n; counts[e] = view``: the last step changes nothing."""
    target, index, value = node.args
    made = value
    while isinstance(made, Node) and (call := ctx.calls.get(made)) is not None and call.inplace:
        made = call.targets[0]
    call = ctx.calls.get(made) if isinstance(made, Node) else None
    same = call is not None and call.name == "getitem" and call.args == (target, index)
    return same and isinstance(value, Node) and isinstance(target, Node) and ctx.storage[value] is ctx.storage[target]


def _masked(ctx: Context, claim: Claim, node: Node) -> bool:
    """``used[e] += 1``: what is added, or zero."""
    target, value = node.args
    held, some = tensor(target), _some(ctx, claim, node)
    if held is None or some is None or isinstance(value, bool | complex):
        return False
    emit = Emitter(ctx.graph, node, some, {})
    if isinstance(value, Node):
        if tensor(value) is None:
            return False
        node.update_arg(1, emit(torch.where, some, value, 0))
    elif isinstance(value, int) or held.dtype.is_floating_point:
        node.update_arg(1, emit(torch.where, some, emit(torch.full_like, target, value), 0))
    else:
        return False
    return True


def _selected(ctx: Context, claim: Claim, node: Node) -> bool:
    """``counts[e] = n``: the new value, or the one that is there."""
    target, index, value = node.args
    held, places = tensor(target), index if isinstance(index, tuple) else (index,)
    if held is None or not all(type(i) is int or i == slice(None) or type(ctx.number(i)) is int for i in places):
        return False
    some = _some(ctx, claim, node)
    if some is None:
        return False
    emit = Emitter(ctx.graph, node, some, {})
    old = emit(torch.Tensor.__getitem__, target, index)
    if isinstance(value, Node):
        new = tensor(value)
        if new is None or new.dim() > fake(old).dim() or any(s != 1 for s in shape_of(new)[: new.dim() - fake(old).dim()]):
            return False
        made = emit(torch.Tensor.to, value, held.device, held.dtype)
    elif isinstance(value, bool | int | float):
        made = emit(torch.full_like, old, value)
    else:
        return False
    node.update_arg(2, emit(torch.where, some, made, old))
    return True


def _some(ctx: Context, claim: Claim, before: Node) -> Node | None:
    """A tensor of one element in front of a node: whether some slot chose the claim's expert."""
    routing = claim.routing
    if routing is None or routing.kept is not None or routing.valid is not None or isinstance(claim.expert, RowNumber):
        return None
    ids = ctx.now(routing.node)
    if ids._erased or ctx.storage.get(ids, ids) in ctx.writes or (claim.slot is not None and not routing.has_slots):
        return None
    emit = Emitter(ctx.graph, before, ids, {})
    if routing.columns is not None:
        ids = emit(torch.select, ids, -1, claim.expert)
    if claim.slot is not None:
        ids = emit(torch.select, ids, -1, claim.slot)
    return emit(torch.any, ids if routing.columns is not None else emit(torch.eq, ids, claim.expert))
