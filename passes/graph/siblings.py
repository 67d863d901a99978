"""Whether the modules of a list are the same but for the values of their parameters: then the trace of one can stand for all.

What a body does depends on the module it runs through the module's class, its attributes and its children, and on nothing else. So two
modules are isomorphic if these are equal; only parameters and buffers may differ, and only in their values. Everything that is not known
to be equal is different: a doubt costs the time of tracing every row, nothing else.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_TENSORS = ("_parameters", "_buffers")
_CHILDREN = "_modules"


def different(modules: Sequence[nn.Module]) -> str | None:
    """Why the modules are not isomorphic, or None: equal but for the values of tensors that each of them owns alone."""
    first = modules[0]
    seen: set[int] = set()
    for number, module in enumerate(modules):
        found = _modules(module, first) or _owned(module, seen)
        if found is not None:
            return f"module {number}: {found}"
    return None


def _modules(a: nn.Module, b: nn.Module) -> str | None:
    """The first difference of two modules; with itself, the first thing that must not be in any of them."""
    if type(a) is not type(b):
        return f"{type(a).__name__} instead of {type(b).__name__}"
    mine, theirs = vars(a), vars(b)
    if list(mine) != list(theirs):
        return "other attributes"
    for name, value in mine.items():
        other = theirs[name]
        if name in _TENSORS:
            found = _tensor_dicts(value, other)
        elif name == _CHILDREN:
            found = _children(value, other)
        elif "_hooks" in name and value:
            found = f"{name}"
        else:
            found = None if _same(value, other) else f"another `{name}`"
        if found is not None:
            return found
    return None


def _children(a: dict[str, nn.Module | None], b: dict[str, nn.Module | None]) -> str | None:
    if list(a) != list(b):
        return "other children, or in another order"
    for name, child in a.items():
        other = b[name]
        if child is None or other is None:
            found = None if child is other else f"no `{name}`"
        else:
            found = _modules(child, other)
        if found is not None:
            return f"{name}: {found}"
    return None


def _tensor_dicts(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    if list(a) != list(b):
        return "other weights, or in another order"
    for name, value in a.items():
        other = b[name]
        if (value is None) != (other is None) or (value is not None and not _like(value, other)):
            return f"`{name}` is another kind of tensor"
    return None


def _like(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ in nothing but their elements."""
    if type(a) not in (torch.Tensor, nn.Parameter) or type(a) is not type(b):
        return False
    if a.layout != torch.strided or b.layout != torch.strided or not (a.is_leaf and b.is_leaf) or a._backward_hooks or b._backward_hooks:
        return False
    if getattr(a, "_post_accumulate_grad_hooks", None) or getattr(b, "_post_accumulate_grad_hooks", None):
        return False
    facts = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference(), t.is_conj(), t.is_neg()) for t in (a, b)]
    return facts[0] == facts[1] and _same(vars(a), vars(b))


def _same(a: Any, b: Any) -> bool:
    """Whether two attributes are equal, as far as that is certain; objects of other kinds are equal only to themselves."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PLAIN):
        return repr(a) == repr(b)  # 0.0 and -0.0, nan and nan
    if type(a) in (list, tuple, torch.Size):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) in (dict,) or type(a).__name__ == "OrderedDict":
        return len(a) == len(b) and all(_same(k, j) and _same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True))
    if type(a) in (set, frozenset):
        return a == b and all(isinstance(item, _PLAIN) for item in a | b)
    return isinstance(a, types.BuiltinFunctionType) and a == b and a.__self__ is b.__self__


def _owned(module: nn.Module, seen: set[int]) -> str | None:
    """Every tensor belongs to one module and has one name."""
    kept = [(n, t) for m in module.modules() for n, t in (*m._parameters.items(), *m._buffers.items()) if t is not None]
    for name, tensor in kept:
        if id(tensor) in seen:
            return f"`{name}` is shared"
        seen.add(id(tensor))
    return None


def keep(*tensors: torch.Tensor) -> None:
    """Stands in a traced graph for what reads these later, if anything does: the bodies of loops that were not traced, and assumptions.

    Without a reader Dynamo would drop their weights, and the numbers that only a condition asks for.
    """
