"""Canonical names: many spellings of one operation become one name with one argument order.

`torch.multiply(a, b)`, `a * b`, `a.mul(b)`, `a *= b` are all ``mul``; the last one with ``inplace`` set. A rule is looked up by this name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

_ALIASES = {
    "multiply": "mul", "imul": "mul_", "iadd": "add_", "isub": "sub_", "itruediv": "div_", "truediv": "div", "true_divide": "div",
    "divide": "div", "subtract": "sub", "floordiv": "floor_divide", "ifloordiv": "floor_divide_", "__floordiv__": "floor_divide",
    "matmul": "matmul", "imatmul": "matmul_", "ipow": "pow_", "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
    "swapdims": "transpose", "moveaxis": "movedim", "absolute": "abs", "negative": "neg", "clip": "clamp", "clip_": "clamp_",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "invert": "bitwise_not",
    "inv": "bitwise_not", "logical_not": "bitwise_not", "and_": "bitwise_and", "logical_and": "bitwise_and", "or_": "bitwise_or",
    "radd": "add", "rmul": "mul", "view_as": "view_as", "sigmoid_": "sigmoid_", "max": "max", "_grouped_mm": "grouped_mm",
    "grouped_mm_fallback": "grouped_mm", "argwhere": "nonzero", "type": "to", "type_as": "type_as", "scaled_mm": "scaled_mm",
    "bfloat16": "to", "half": "to", "float": "to", "double": "to", "long": "to", "int": "to", "bool": "to",
}  # fmt: skip

#: operations on arrays of NumPy's, by the names that Dynamo gives them, that are torch's
_ALIASES |= {f"wrapped_{name}": name for name in "cumsum getitem item eq ne lt le gt ge add sub".split()}

_CASTS = {
    "bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32, "double": torch.float64,
    "long": torch.int64, "int": torch.int32, "bool": torch.bool,
}  # fmt: skip

#: pointwise functions of one tensor, and of two
UNARY = (
    "silu gelu relu relu6 elu selu celu leaky_relu mish softplus softsign hardswish hardsigmoid hardtanh tanh sigmoid logsigmoid exp exp2 "
    "expm1 log log1p sqrt rsqrt reciprocal abs neg sign square sin cos erf clamp clamp_min clamp_max threshold tanhshrink nan_to_num "
    "round floor"
).split()
BINARY = "add sub mul div pow maximum minimum remainder fmod atan2 rsub".split()

#: in-place spellings that do not end in an underscore, or whose underscore means something else
_NOT_INPLACE = {"sym_constrain_range_"}


@dataclass(frozen=True)
class Call:
    """A node as a canonical operation: name, positional and keyword arguments, and whether it writes to a tensor that it is given.

    ``written``: the tensors that it writes to, where its schema says so.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inplace: bool
    written: tuple[Node, ...] = ()

    @property
    def targets(self) -> tuple[Node, ...]:
        """What it writes to: what its schema says, the tensors of ``out=``, else its first argument."""
        if self.written or not self.inplace:
            return self.written
        given = self.kwargs.get("out")
        found = self.args[:1] if given is None else given if isinstance(given, tuple | list) else (given,)
        return tuple(t for t in found if isinstance(t, Node))


#: nodes that only ask for sizes or assert them
SIZE_QUERIES = frozenset(
    ("size sym_size sym_numel sym_storage_offset numel dim _assert_scalar sym_constrain_range sym_constrain_range_for_size _check").split()
)


def raw_name(node: Node) -> str:
    """The name of a node's target as written: method name, function name, or operator name without its overload."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._opname
    return str(name)


def call_of(node: Node) -> Call | None:
    """The canonical call of a node, or None for placeholders, attributes and the output."""
    if node.op not in ("call_function", "call_method"):
        return None
    raw = raw_name(node)
    args, kwargs = tuple(node.args), dict(node.kwargs)
    for first in ("input", "self"):
        if first in kwargs:
            args = (kwargs.pop(first), *args)
    if raw in _CASTS and node.op == "call_method":
        return Call("to", (*args, _CASTS[raw]), kwargs, False)
    plain = raw[2:-2] if raw.startswith("__") and raw.endswith("__") else raw  # `x.__eq__(y)`, as torch 2.11 records `x == y`
    name = _ALIASES.get(plain, plain)
    inplace = name == "setitem" or bool(kwargs.pop("inplace", False)) or kwargs.get("out") is not None
    if name.endswith("_") and not name.endswith("__") and name not in _NOT_INPLACE:
        name, inplace = name[:-1], True
        name = _ALIASES.get(name, name)
    written = _written(node)
    return Call(name, args, kwargs, inplace or bool(written), written)


def _written(node: Node) -> tuple[Node, ...]:
    """The tensors that an operator writes to, by its schema; a Triton kernel of the user's may write to any that it gets."""
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return tuple(node.all_input_nodes) if target.name() == "triton_kernel_wrapper_mutation" else ()
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        target = getattr(target, names[0]) if len(names) == 1 else None
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return ()
    known = target._schema.arguments
    given = dict(zip((a.name for a in known), node.args, strict=False)) | node.kwargs
    found = [given.get(a.name) for a in known if a.alias_info is not None and a.alias_info.is_write]
    each = [t for value in found for t in (value if isinstance(value, tuple | list) else (value,))]
    return tuple(t for t in each if isinstance(t, Node))


def fake(node: object) -> Any:
    """The fake value Dynamo (or AOTAutograd) recorded for a node: a tensor, a SymInt, a tuple, or None."""
    if not isinstance(node, Node):
        return None
    value = node.meta.get("example_value")
    return node.meta.get("val") if value is None else value


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it is not a tensor."""
    value = fake(node)
    return value if isinstance(value, torch.Tensor) else None


def module_path(node: Node) -> str:
    """Dotted path of the innermost user module that ran this node, without Dynamo's wrapping of names; empty if unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = re.sub(r"^[LG]\['\w+'\]|^L__self__", "", list(stack.values())[-1][0])
    path = path.replace("_modules['", ".").replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
    return ".".join(p for p in path.split(".") if p and p not in ("self", "_modules", "_fn"))


def location(node: Node) -> str:
    """``file:line`` of the user's statement that made this node; empty if torch recorded none."""
    trace = node.meta.get("stack_trace") or ""
    lines = [ln.strip() for ln in trace.splitlines() if ln.strip().startswith("File ")]
    if not lines:
        return ""
    path, _, rest = lines[-1].removeprefix('File "').partition('", line ')
    return f"{path}:{rest.split(',')[0]}"


def call_target(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one node's operation."""
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)
