"""Canonical names: many spellings of one operation become one name with one argument order.

`torch.multiply(a, b)`, `a * b`, `a.mul(b)`, `a *= b` are all ``mul``; the last one has a target. A rule is looked up by this name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.aten import as_function
from moefuse.passes.graph.custom import as_aten
from moefuse.passes.graph.module_names import MODULE, source_path
from moefuse.passes.graph.values import fake, tensor
from moefuse.passes.graph.writes import known_function, plain_name, written
from moefuse.program.breaks import place_in

_ALIASES = {
    "multiply": "mul", "imul": "mul_", "iadd": "add_", "isub": "sub_", "itruediv": "div_", "truediv": "div", "true_divide": "div",
    "divide": "div", "subtract": "sub", "floordiv": "floor_divide", "ifloordiv": "floor_divide_", "__floordiv__": "floor_divide",
    "matmul": "matmul", "imatmul": "matmul_", "ipow": "pow_", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
    "swapdims": "transpose", "moveaxis": "movedim", "absolute": "abs", "negative": "neg", "clip": "clamp", "clip_": "clamp_",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "invert": "bitwise_not",
    "inv": "bitwise_not", "logical_not": "bitwise_not", "and_": "bitwise_and", "logical_and": "bitwise_and", "or_": "bitwise_or",
    "logical_or": "bitwise_or",
    "radd": "add", "rmul": "mul", "view_as": "view_as", "sigmoid_": "sigmoid_", "max": "max", "_grouped_mm": "grouped_mm",
    "grouped_mm_fallback": "grouped_mm", "argwhere": "nonzero", "type": "to", "type_as": "type_as", "scaled_mm": "scaled_mm",
    "bfloat16": "to", "half": "to", "float": "to", "double": "to", "long": "to", "int": "to", "bool": "to",
}  # fmt: skip

#: operations on arrays of NumPy's, by the names that Dynamo gives them, that are torch's
_ALIASES |= {f"wrapped_{name}": name for name in "cumsum getitem item eq ne lt le gt ge add sub".split()}

#: what they are of two tensors, element by element
_OF_TWO = {"max": "maximum", "min": "minimum"}

#: where operators have the names that rules know; the last one is a grouped product that its library registers
_NAMESPACES = frozenset(("aten", "prims", "transformers"))

_CASTS = {
    "bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "long": torch.int64, "int": torch.int32, "bool": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A node as a canonical operation: name, positional and keyword arguments, and the tensors that it writes to."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Node, ...] = ()

    @property
    def inplace(self) -> bool:
        """Whether it writes to a tensor that it is given."""
        return bool(self.targets)


def raw_name(node: Node) -> str:
    """The name of a node's target as written: method name, function name, or operator name without its overload.

    A function or an operator that is not torch's has all of its name, so that no rule takes it for what torch calls so.
    """
    target: Any = node.target
    if isinstance(target, _torch_private.OpOverload | _torch_private.OpOverloadPacket):
        whole = str(target).partition(".")
        space, name = whole[0], whole[2].partition(".")[0]
        return name if space in _NAMESPACES else f"{space}::{name}"
    if isinstance(target, _torch_private.HigherOrderOperator) or known_function(target):
        return plain_name(target)
    return f"{target.__module__}.{plain_name(target)}"


_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""What torch's own functions take under NumPy's names as well."""


def call_of(node: Node, targets: tuple[Node, ...] | None = None) -> Call | None:
    """The canonical call of a node, or None for placeholders, attributes and the output. ``targets``: what it writes to, where known."""
    if node.op not in ("call_function", "call_method"):
        return None
    raw, op = raw_name(node), node.target
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if "::" in raw and not raw.startswith("moefuse::"):
        meant = as_aten(op, args, kwargs)
        if meant is not None:
            op, args, kwargs = meant[0], meant[1], dict(meant[2])
            raw = op._schema.name.partition("::")[2]
    for first in ("input", "self"):
        if first in kwargs:
            args = (kwargs.pop(first), *args)
    if ":" not in raw and "." not in raw:
        kwargs = {_NUMPY.get(k, k): v for k, v in kwargs.items()}
    if raw in _CASTS and node.op == "call_method":
        return Call("to", (*args, _CASTS[raw]), kwargs)  # a copy, or the tensor itself
    name = _ALIASES.get(raw, raw)
    kwargs.pop("inplace", None)
    targets = written(node) if targets is None else targets
    if targets and name.endswith("_"):
        name = _ALIASES.get(name[:-1], name[:-1])
    if isinstance(op, _torch_private.OpOverload | _torch_private.OpOverloadPacket):
        name, args, kwargs = as_function(name, args, kwargs)
    if name == "where":
        args = _condition_first(node, args, kwargs)
    if name in _OF_TWO and (kwargs.keys() == {"other"} or (len(args) == 2 and tensor(args[1]) is not None)):
        name = _OF_TWO[name]
    return Call(name, args, kwargs, targets)


def _condition_first(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of ``where`` in the function's order: ``x.where(condition, y)`` begins with what is kept, and so do keywords here."""
    if "condition" in kwargs:
        return (kwargs.pop("condition"), *args)
    turned = node.op == "call_method" or not {"input", "self"}.isdisjoint(node.kwargs)
    return (args[1], args[0], *args[2:]) if turned else args


def module_path(node: Node) -> str:
    """Dotted path of the innermost user module that ran this node, by its name in ``named_modules()`` where that is known; else empty."""
    return str(node.meta[MODULE]) if MODULE in node.meta else traced_path(node)


def traced_path(node: Node) -> str:
    """As :func:`module_path`, as the traced frame reaches the module."""
    stack = node.meta.get("nn_module_stack")
    return source_path(list(stack.values())[-1][0]) if stack else ""


def location(node: Node) -> str:
    """``file:line`` of the user's statement that made this node, not one in torch that it came to; empty if torch recorded none."""
    return place_in(node.meta.get("stack_trace") or "")


def steps(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Names of operations for a reader: what unpacks a tuple is none, and moefuse's own have their namespace."""
    return tuple(raw_name(n) for n in nodes if n.op in ("call_function", "call_method") and not _unpacks(n))


def _unpacks(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(fake(node.args[0]), tuple | list)


def call_target(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one node's operation."""
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


__all__ = ["Call", "call_of", "call_target", "fake", "location", "module_path", "raw_name", "steps", "tensor", "traced_path"]
