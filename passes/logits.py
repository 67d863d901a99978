"""The product that a router's logits are, as ``moefuse::router_logits``, where the user asks for a fused router.

It pays for few tokens, whose product is too small for a library's kernels, and where the program casts 16-bit tokens and weights to float32
in front of the product: both are copied for it at every call, the op multiplies them as they are. Sums are float32 as before, in another
order. Where the number of tokens is a symbol the product stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.ops.recipe import few_rows
from moefuse.passes.devices import unsupported
from moefuse.passes.emit import Emitter
from moefuse.passes.ops import Call, call_of, tensor
from moefuse.passes.sizes import same_shape, shape_of

_VIEWS = frozenset("view reshape contiguous flatten unflatten squeeze unsqueeze to".split())
_HALVES = (torch.bfloat16, torch.float16)


def replaced(graph: Graph, logits: Any) -> bool:
    """Replace the product in front of ``logits``, if nothing else reads it and the op has a kernel that is quicker."""
    product = _product(logits)
    if product is None:
        return False
    node, call = product
    value, (x, w, bias), turned = tensor(node), _factors(call), call.name != "linear"
    if value is None or value.requires_grad or not _plain(value, x, w, bias):
        return False
    x, w = _before_cast(x, node), _before_cast(w, node)
    if not _pays(value, tensor(x), tensor(w)):
        return False
    emit = Emitter(graph, node, node, {})
    emit.mode = getattr(value, "fake_mode", None)
    made = emit(torch.ops.moefuse.router_logits.default, x, emit(torch.t, w) if turned else w, bias, value.dtype)
    after = tensor(made)
    if after is None or not same_shape(shape_of(after), shape_of(value)) or unsupported([made], False) is not None:
        emit.undo()
        return False
    node.replace_all_uses_with(made)
    stack = [node]
    while stack:
        dead = stack.pop()
        if not dead.users and dead.op != "placeholder" and dead in (node, *_casts(call)):
            stack += dead.all_input_nodes
            graph.erase_node(dead)
    return True


def _product(logits: Any) -> tuple[Node, Call] | None:
    """The product behind views and casts that only lead to ``logits``."""
    node = logits
    while (call := call_of(node)) is not None and len(node.users) == 1 and not call.inplace:
        if call.name in ("linear", "matmul", "mm", "addmm"):
            return node, call
        if call.name not in _VIEWS:
            break
        node = call.args[0]
    return None


def _factors(call: Call) -> tuple[Any, Any, Any]:
    """(tokens, weight, bias) as the call has them; tokens None where it has more than these."""
    names = {"linear": ("x", "w", "bias"), "addmm": ("bias", "x", "w")}.get(call.name, ("x", "w"))
    keywords = {"weight": "w", "bias": "bias", "other": "w", "mat2": "w", "mat1": "x"}
    if len(call.args) > len(names) or any(name not in keywords for name in call.kwargs):
        return None, None, None
    given = dict(zip(names, call.args, strict=False)) | {keywords[name]: value for name, value in call.kwargs.items()}
    return given.get("x"), given.get("w"), given.get("bias")


def _plain(value: torch.Tensor, *factors: Any) -> bool:
    """Whether the factors are tokens, a matrix and a vector or nothing, of one dtype, which the product has too."""
    x, w, bias = map(tensor, factors)
    if x is None or w is None or not x.dim() or w.dim() != 2 or (factors[2] is not None and (bias is None or bias.dim() != 1)):
        return False
    return all(t.dtype == value.dtype and t.device == value.device for t in (x, w, *([] if bias is None else [bias])))


def _casts(call: Call) -> list[Node]:
    return [n for n in _factors(call) if isinstance(n, Node) and (c := call_of(n)) is not None and c.name == "to"]


def _before_cast(factor: Node, product: Node) -> Node:
    """A factor before its cast to float32, where nothing is written between the cast and the product."""
    call, value = call_of(factor), tensor(factor)
    before = None if call is None or call.name != "to" or not call.args else tensor(call.args[0])
    if value is None or before is None or value.dtype != torch.float32 or before.dtype not in _HALVES or before.device != value.device:
        return factor
    node = factor.next
    while node is not product:
        if _writes(node):
            return factor
        node = node.next
    return call.args[0]  # type: ignore[no-any-return,union-attr]


def _writes(node: Node) -> bool:
    """Whether a node may write to a tensor: anything that is not known to make new values."""
    call = call_of(node)
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.op == "call_module" or (call is not None and call.inplace) or isinstance(node.target, torch._ops.HigherOrderOperator)


def _pays(value: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None) -> bool:
    if x is None or w is None or not all(isinstance(n, int) for n in x.shape):
        return False
    return few_rows(x, w) or (value.dtype == torch.float32 and x.dtype == w.dtype != torch.float32)


__all__ = ["replaced"]
