"""Parameters in float32 behind a cast to 16 bits: the op takes them as they are and rounds them as it reads them, so no copy is kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from moefuse.ops.meaning.held import holds
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sharded import is_root
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Expr, Leaf, rewritten, weight_leaves
from moefuse.passes.ir.facts import View


def rounds(node: Node, x: Node) -> bool:
    """Whether ``node`` rounds ``x`` from float32 to 16 bits, with its gradient."""
    before, after = tensor(x), tensor(node)
    if before is None or after is None or before.device != after.device:
        return False
    return holds(before.dtype, after.dtype) and not (before.requires_grad and not after.requires_grad)


def uncast(ctx: Context, expr: Expr) -> Expr:
    """The expression of the Parameters, if every weight and vector of it is a Parameter in float32, behind a cast or not."""
    leaves = weight_leaves(expr)
    found = {id(leaf): _uncast(ctx, leaf) for leaf in leaves}
    if all(found[id(leaf)] is leaf for leaf in leaves) or None in found.values():
        return expr
    return rewritten(expr, lambda n: n, lambda leaf: found.get(id(leaf)) or leaf, lambda n: n)


def _uncast(ctx: Context, leaf: Leaf) -> Leaf | None:
    value = tensor(leaf.source)
    if value is not None and value.dtype == torch.float32:
        return leaf
    parts = [_before(ctx, n) for n in leaf.parts or (leaf.source,)]
    first = parts[0]
    if first is None or any(part is None or part[1] != first[1] for part in parts):
        return None
    dims = first[1]
    if leaf.stacked and dims[0] != 0:
        return None
    sources = tuple(part[0] for part in parts if part is not None)
    order = tuple(dims[d] for d in leaf.order)
    return replace(leaf, source=sources[0], order=order, parts=sources if leaf.parts else ())


def _before(ctx: Context, node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """The Parameter that a node is a cast of, or of a view of, and which of its dimensions are the node's; None if it is written to."""
    call = ctx.calls.get(node)
    source = call.args[0] if call is not None and call.name == "to" else None
    view = ctx.fact(source) if isinstance(source, Node) and rounds(node, source) else None
    if not isinstance(view, View) or not is_root(view.root) or ctx.writes.get(ctx.storage[view.root]):
        return None
    if any(len(axis) != 1 or axis[0].kind != "d" for axis in view.axes):
        return None
    return view.root, tuple(axis[0].index for axis in view.axes)
