"""Numbers that only the run knows, where a program reads them beside its experts, as tensors of one element.

``counts[e] += len(token)`` adds how many elements of a mask are true, and ``torch.tensor([len(t) for t in lists])`` lists such numbers. No
size that depends on data may stay in a graph because of moefuse; a sum over the mask may, and nobody waits for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.sizes import shape_of, size_of
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.infer.state import Context
from moefuse.passes.match.liveness import live

_EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
"""Dtypes in which a number of rows is itself. What is computed of a tensor of one of them and a number has its dtype."""
_ARITHMETIC = ("add", "sub", "mul", "div", "rsub")
_PYTHON: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "sym_float": operator.pos,
}  # fmt: skip
_LISTS = ("tensor", "new_tensor", "as_tensor")


@dataclass
class Made:
    """What was made of numbers: the tensor of each symbol, and what each new tensor is worth."""

    of: dict[Any, Node | None] = field(default_factory=dict)
    worth: dict[Node, Any] = field(default_factory=dict)


def as_tensors(ctx: Context) -> bool:
    """Give tensors to those readers of such numbers that take them as well; whether there was any, or one that nothing needs.

    Once the experts are fused. An offset that was raised in place is a tensor that nothing needs any longer, too.
    """
    writes = {n for n in ctx.graph.nodes if (call := ctx.calls.get(n)) is not None and call.inplace}
    readers = [n for n in ctx.graph.nodes if n in writes or any(unbacked_in(fake(i)) for i in n.all_input_nodes)]
    needed = live(ctx) if readers else set()
    found = False
    for node in readers:
        if node not in needed:
            found = True
        elif any(_number(i) is not None for i in node.all_input_nodes):
            found |= _converted(ctx, node, ctx.calls.get(node))
    return found


def _number(node: Node) -> Any:
    """The expression of a number that only the run knows; None for all else."""
    value = fake(node)
    return size_of(value) if isinstance(value, torch.SymInt | torch.SymFloat) and unbacked_in(value) else None


def _converted(ctx: Context, node: Node, call: Call | None) -> bool:
    if call is None or set(call.kwargs) - {"rounding_mode", "dtype", "device"}:
        return False
    if call.name in _ARITHMETIC and len(node.args) == 2:
        return _operand(ctx, node)
    if call.name == "setitem" and len(node.args) == 3:
        return _assigned(ctx, node)
    return call.name in _LISTS and _listed(ctx, node, call)


def _operand(ctx: Context, node: Node) -> bool:
    """``counts[e] + n``: the number in the dtype of the tensor."""
    at = [i for i, a in enumerate(node.args) if isinstance(a, Node) and _number(a) is not None]
    if ctx.calls[node].name == "div" and at != [1]:  # type: ignore[union-attr]
        return False  # a number over a tensor is the tensor's reciprocal times the number
    other = tensor(node.args[1 - at[0]]) if len(at) == 1 else None
    made = tensor_of(ctx, node.args[at[0]]) if other is not None and other.dtype in _EXACT else None  # type: ignore[arg-type]
    if made is not None and fake(made).dtype.is_floating_point and not other.dtype.is_floating_point:  # type: ignore[union-attr]
        return False  # the result would have another dtype
    if other is None or made is None:
        return False
    node.update_arg(at[0], _cast(ctx, node, made, other))
    return True


def _assigned(ctx: Context, node: Node) -> bool:
    """``counts[e] = n``."""
    target, index, value = node.args
    held = tensor(target)
    made = tensor_of(ctx, value) if isinstance(value, Node) and _number(value) is not None and not _any_number(index) else None
    if made is None or held is None or held.dtype not in _EXACT:
        return False
    node.update_arg(2, _cast(ctx, node, made, held))
    return True


def _listed(ctx: Context, node: Node, call: Call) -> bool:
    """``torch.tensor([n0, n1, ..])``, ``x.new_tensor(..)``."""
    value, given = tensor(node), call.args[-1] if call.args else call.kwargs.get("data")
    if value is None or value.requires_grad or value.dtype not in _EXACT:
        return False
    items = list(given) if isinstance(given, list | tuple) else [given]
    plain = [i for i in items if not isinstance(i, Node)]
    if not items or value.dim() != isinstance(given, list | tuple) or any(type(i) is not int for i in plain):
        return False
    made = [tensor_of(ctx, i) if isinstance(i, Node) else i for i in items]
    first = next((m for m in made if isinstance(m, Node)), None)
    if first is None or None in made:
        return False
    emit = Emitter(ctx.graph, node, first, {})
    parts = [m if isinstance(m, Node) else emit(torch.full_like, first, m) for m in made]
    row = emit(torch.stack, parts) if isinstance(given, list | tuple) else first
    node.replace_all_uses_with(emit(torch.Tensor.to, row, value.device, value.dtype, copy=True))
    return True


def _any_number(index: Any) -> bool:
    found: list[Node] = []
    torch.fx.node.map_arg(index, found.append)
    return any(_number(n) is not None for n in found)


def _cast(ctx: Context, before: Node, made: Node, like: torch.Tensor) -> Node:
    if fake(made).dtype == like.dtype and fake(made).device == like.device:
        return made
    worth = ctx.scratch(Made).worth
    cast = Emitter(ctx.graph, before, made, {})(torch.Tensor.to, made, like.device, like.dtype)
    worth[cast] = worth[made]
    return cast


def tensor_of(ctx: Context, number: Node) -> Node | None:
    """A tensor of one element (int64) with the value of a number; None where that is not a sum of numbers that tensors have."""
    made = ctx.scratch(Made)
    if isinstance(fake(number), torch.SymFloat):
        return _fraction(ctx, number)
    expr = size_of(fake(number))
    terms = list(_terms(expr))
    if any(symbol is not None and _known(ctx, symbol) is None for symbol, _ in terms):
        return _arithmetic(ctx, number, torch.int64)
    nodes = [(_known(ctx, symbol) if symbol is not None else None, factor) for symbol, factor in terms]
    emit = Emitter(ctx.graph, number.next, next(n for n, _ in nodes if n is not None), {})
    parts = [factor if n is None else n if factor == 1 else emit(torch.mul, n, factor) for n, factor in nodes]
    first, *others = sorted(parts, key=lambda p: not isinstance(p, Node))
    total: Node = first  # type: ignore[assignment]
    for part in others:
        total = emit(torch.add, total, part)
    made.worth[total] = expr
    return total


def _fraction(ctx: Context, number: Node) -> Node | None:
    """As :func:`tensor_of`, of a float (float64, as Python's are): one that is read, or arithmetic of numbers, sizes and constants."""
    call = ctx.calls[number]
    if call is None or call.kwargs:
        return None
    if call.name == "item":
        emit = Emitter(ctx.graph, number.next, call.args[0], {})
        value = emit(torch.detach, call.args[0]) if fake(call.args[0]).requires_grad else call.args[0]  # gradients end in a number
        result = emit(torch.Tensor.to, emit(torch.Tensor.reshape, value, ()), torch.float64, copy=True)
        ctx.scratch(Made).worth[result] = size_of(fake(number))
        return result
    return _arithmetic(ctx, number, torch.float64)


def _arithmetic(ctx: Context, number: Node, dtype: torch.dtype) -> Node | None:
    """What a number is computed of, as far as only the run knows that, as tensors of a dtype."""
    call = ctx.calls[number]
    if call is None or call.kwargs or call.name not in _PYTHON or (dtype == torch.int64 and call.name not in ("add", "sub", "mul")):
        return None
    parts = [tensor_of(ctx, a) if isinstance(a, Node) and _number(a) is not None else a for a in call.args]
    sizes = [a for a in call.args if isinstance(fake(a), torch.SymInt) and _number(a) is None]
    nodes = [p for p in parts if isinstance(p, Node) and p not in sizes]
    plain = all(p not in call.args for p in nodes) and all(isinstance(p, Node) or type(p) in (int, float) for p in parts)
    over = call.name == "div" and parts[0] not in nodes  # the reciprocal times the number, to torch
    if not nodes or not plain or over:
        return None
    emit = Emitter(ctx.graph, number.next, nodes[0], {})
    result = emit(_PYTHON[call.name], *(emit(torch.Tensor.to, p, dtype) if p in nodes else p for p in parts))
    ctx.scratch(Made).worth[result] = size_of(fake(number))
    return result


def _terms(expr: Any) -> Iterator[tuple[Any, int]]:
    """(symbol, factor) of a sum, (None, constant); a symbol that is none for a term that is anything else."""
    for term, factor in sympy.expand(expr).as_coefficients_dict().items():
        whole = bool(factor.is_Integer)
        yield (None if term == 1 and whole else term), int(factor) if whole else 0


def _known(ctx: Context, symbol: Any) -> Node | None:
    """The tensor of one symbol, made where the program learns its value."""
    made = ctx.scratch(Made)
    if symbol not in made.of:
        made.of[symbol] = _counted(ctx, symbol, ctx.made_by.get(symbol))
        if (node := made.of[symbol]) is not None:
            made.worth[node] = symbol
    return made.of[symbol]


def _counted(ctx: Context, symbol: Any, maker: Node | None) -> Node | None:
    call = ctx.calls.get(maker) if maker is not None and not maker._erased else None
    if maker is None or call is None or not call.args or not isinstance(call.args[0], Node):
        return None
    emit = Emitter(ctx.graph, maker.next, call.args[0], {})
    if call.name == "item":
        value = tensor(call.args[0])
        if value is None or value.dtype not in (torch.int32, torch.int64):
            return None
        one = emit(torch.Tensor.reshape, call.args[0], ())
        return emit(torch.Tensor.to, one, torch.int64, copy=True)  # the number stays what it was where the tensor is written to
    mask = _mask(call, symbol, fake(maker))
    return None if mask is None else emit(torch.count_nonzero, mask)


def _mask(call: Call, symbol: Any, value: Any) -> Node | None:
    """The mask of which a result has as many rows as there are true elements."""
    found = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list | tuple) else ()
    if not any(size == symbol for v in found if isinstance(v, torch.Tensor) for size in shape_of(v)):
        return None
    if call.name == "nonzero" or (call.name == "where" and len(call.args) == 1):
        return call.args[0]  # type: ignore[no-any-return]
    if call.name not in ("getitem", "masked_select") or len(call.args) < 2:
        return None
    index = call.args[1] if isinstance(call.args[1], tuple | list) else (call.args[1],)
    masks = [i for i in index if isinstance(i, Node)]
    mask = tensor(masks[0]) if len(masks) == 1 else None
    if mask is None or mask.dtype != torch.bool:
        return None
    alike = call.name == "getitem" or shape_of(mask) == shape_of(fake(call.args[0]))
    return masks[0] if alike else None


def worth(ctx: Context, value: Any) -> Any:
    """The expression of a tensor that was made of a number; None for any other value."""
    return ctx.scratch(Made).worth.get(value)


__all__: Sequence[str] = ("as_tensors", "tensor_of", "worth")
