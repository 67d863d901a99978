"""The product that a router's logits are, as ``moefuse::router_logits``, where the user asks for a fused router.

It pays for few tokens, whose product is too small for a library's kernels, and where the program casts 16-bit tokens and weights to float32
in front of the product: both are copied for it at every call, the op multiplies them as they are. Sums are float32 as before, in another
order. A number of tokens that is a symbol is not few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.recipe import few_rows
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import call_of, tensor
from moefuse.passes.graph.matmuls import READ, Operands, operands
from moefuse.passes.graph.op_classes import KEEPS, RESHAPES
from moefuse.passes.infer.state import Context
from moefuse.passes.lower.devices import unsupported
from moefuse.passes.lower.layout import same_strides

_VIEWS = RESHAPES | KEEPS
_HALVES = (torch.bfloat16, torch.float16)


def replaced(ctx: Context, logits: Any) -> bool:
    """Replace the product in front of ``logits``, if nothing else reads it and the op has a kernel that is quicker.

    ``ctx``: the graph as it was before any router was replaced.
    """
    found = _product(logits)
    if found is None or found[0] not in ctx.position:
        return False
    node, product = found
    value, bias = tensor(node), product.bias
    if value is None or value.requires_grad or not _plain(value, product):
        return False
    x, w = _before_cast(ctx, product.x, node), _before_cast(ctx, product.weight, node)
    if not _pays(value, tensor(x), tensor(w)):
        return False
    emit = Emitter(ctx.graph, node, node, {})
    emit.mode = getattr(value, "fake_mode", None)
    made = emit(torch.ops.moefuse.router_logits.default, x, w if product.out_first else emit(torch.t, w), bias, value.dtype)
    after = tensor(made)
    if after is None or not same_strides(after, value) or unsupported([made], False) is not None:
        emit.undo()
        return False
    node.replace_all_uses_with(made)
    ctx.graph.erase_node(node)
    for cast, source in ((product.x, x), (product.weight, w)):
        if cast is not source and not cast.users:
            ctx.graph.erase_node(cast)
    return True


def _product(logits: Any) -> tuple[Node, Operands] | None:
    """The product behind views and casts that only lead to ``logits``."""
    node = logits
    while (call := call_of(node)) is not None and len(node.users) == 1 and not call.inplace:
        if call.name in READ:
            product = operands(call)
            return None if product is None else (node, product)
        if call.name not in _VIEWS:
            break
        node = call.args[0]
    return None


def _plain(value: torch.Tensor, product: Operands) -> bool:
    """Whether the factors are tokens, a matrix and a vector or nothing, of one dtype, which the product has too."""
    x, w, bias = map(tensor, (product.x, product.weight, product.bias))
    if x is None or w is None or not x.dim() or w.dim() != 2 or (product.bias is not None and (bias is None or bias.dim() != 1)):
        return False
    return all(t.dtype == value.dtype and t.device == value.device for t in (x, w, *([] if bias is None else [bias])))


def _before_cast(ctx: Context, factor: Node, product: Node) -> Node:
    """A factor before its cast to float32, where nothing is written to it between the cast and the product."""
    call, value = call_of(factor), tensor(factor)
    source = call.args[0] if call is not None and call.name == "to" and call.args else None
    before = tensor(source)
    if value is None or before is None or value.dtype != torch.float32 or before.dtype not in _HALVES or before.device != value.device:
        return factor
    known = factor in ctx.position and source in ctx.position
    return source if known and ctx.written_between(source, factor, product) is None else factor  # type: ignore[arg-type, return-value]


def _pays(value: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None) -> bool:
    if x is None or w is None:
        return False
    return few_rows(x, w) or (value.dtype == torch.float32 and x.dtype == w.dtype != torch.float32)


__all__ = ["replaced"]
