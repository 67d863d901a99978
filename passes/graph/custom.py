"""Operators of libraries that are an operator of ATen by another name: what Python computes them by is traced, and so are their gradients.

A library puts such an operator around one of ATen to run it in some mode (deterministic), or to have it called and not decomposed. It is
read as what it computes if its implementation is that one call with its own arguments, without a branch and with nothing of its own that
could change later, and if autograd's formula gives the same operations as that of ATen's.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from moefuse import _torch_private
from moefuse._torch_private import FakeTensorMode
from moefuse.passes.graph.symbols import hint
from moefuse.passes.graph.values import tensor

_PASSED = ("detach", "alias")
_SOME = 3
"""For a size that only the run knows: what has no branch does the same for any."""


class _Tensor(NamedTuple):
    """What a trace is given for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trained: bool


def as_aten(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The operator of ATen that a library's operator is, with its arguments; None where that is not shown."""
    if isinstance(op, _torch_private.OpOverloadPacket) and op.overloads() == ["default"]:
        op = op.default
    if not isinstance(op, _torch_private.OpOverload) or kwargs or op._schema.is_mutable or len(op._schema.returns) != 1:
        return None
    given = tuple(_described(a) for a in args)
    devices = {a.device.type for a in given if isinstance(a, _Tensor)}
    if len(devices) != 1 or None in given:
        return None
    found = _torch_private.implementations(op, devices.pop())
    if found is None or not all(_straight(f) for f in (found[0], *found[1])):
        return None
    read = _read(op, *found, given)
    return None if read is None else (read[0], _filled(read[1], args), _filled(read[2], args))


class _Constant(NamedTuple):
    """What a trace is given for a number, or for nothing."""

    kind: type
    value: Any


def _described(value: Any) -> _Tensor | _Constant | None:
    """What is traced for an argument; None for what is neither a tensor nor a constant."""
    known = tensor(value)
    if known is None:
        return _Constant(type(value), value) if value is None or isinstance(value, bool | int | float | str) else None
    sizes = tuple(n if isinstance(n, int) else hint(n) or _SOME for n in known.shape)
    return _Tensor(sizes, known.dtype, known.device, known.requires_grad)


def _straight(function: Any) -> bool:
    """Whether a function does the same with all sizes and values: no branch, no loop, and nothing of Python's that may change."""
    if not isinstance(function, FunctionType):
        return False
    known = inspect.getclosurevars(function)
    constant = all(isinstance(v, ModuleType | BuiltinFunctionType) for v in known.globals.values()) and not known.nonlocals
    jumps = (i.opname for i in dis.get_instructions(function))
    return constant and not any(("JUMP" in name and "IF" in name) or name in ("FOR_ITER", "SEND", "MAKE_FUNCTION") for name in jumps)


@functools.lru_cache(maxsize=64)
def _read(op: Any, function: Callable[..., Any], backward: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    """(operator, arguments, named ones), where ``Place(n)`` is the n-th argument; None where it is no operator of ATen."""
    try:
        with FakeTensorMode():
            tensors = [torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in given if isinstance(a, _Tensor)]
            traced = _traced(function, given, tensors)
            steps = [n for n in traced.graph.nodes if n.op == "call_function" and _name(n) not in _PASSED]
            if len(steps) != 1 or any(n.op == "get_attr" for n in traced.graph.nodes):
                return None
            (step,) = steps
            inputs = [i for i, a in enumerate(given) if isinstance(a, _Tensor)]
            places = {n: _Place(i) for n, i in zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True)}
            target: Any = step.target
            if not _is_plain(target):
                return None
            args, kwargs = torch.fx.node.map_arg((step.args, step.kwargs), lambda n: places[n])
            trained = [a.trained for a in given if isinstance(a, _Tensor)]
            if any(trained) and not (backward and _same_gradients(op, (target, args, kwargs), given, tensors, trained)):
                return None
            return target, args, kwargs
    except Exception:  # what another's code raises where it is run on tensors without values
        return None


def _is_plain(target: Any) -> bool:
    """Whether an operation is one of ATen's that gives a new tensor, without drawing random numbers."""
    if not isinstance(target, _torch_private.OpOverload) or target.namespace != "aten":
        return False
    views = any(r.alias_info is not None for r in target._schema.returns)
    return not target._schema.is_mutable and not views and torch.Tag.nondeterministic_seeded not in target.tags


class _Place(int):
    """The number of an argument."""


def _filled(template: Any, args: tuple[Any, ...]) -> Any:
    return _torch_private.tree_map(lambda a: args[a] if isinstance(a, _Place) else a, template)


def _traced(function: Callable[..., Any], given: tuple[Any, ...], tensors: list[Any]) -> GraphModule:
    return make_fx(lambda *values: _called(function, given, values))(*tensors)


def _called(function: Callable[..., Any], given: tuple[Any, ...], tensors: Sequence[Any]) -> Any:
    some = iter(tensors)
    return function(*(next(some) if isinstance(a, _Tensor) else a.value for a in given))


def _same_gradients(op: Any, aten: Any, given: tuple[Any, ...], tensors: list[Any], trained: list[bool]) -> bool:
    """Whether autograd computes the gradients of both by the same operations on the same values."""
    target, args, kwargs = aten
    theirs = _gradients(op, given, tensors, trained)
    ours = _gradients(lambda *all_of: target(*_filled(args, all_of), **_filled(kwargs, all_of)), given, tensors, trained)
    return theirs == ours


def _gradients(function: Callable[..., Any], given: tuple[Any, ...], tensors: list[Any], trained: list[bool]) -> list[str]:
    """The operations behind the gradients of the trained tensors, in order, each with what it reads."""

    def joint(grad: Any, *values: Any) -> Any:
        held = [v.detach().requires_grad_() if t else v for v, t in zip(values, trained, strict=True)]
        out = _called(function, given, held)
        return torch.autograd.grad(out, [v for v, t in zip(held, trained, strict=True) if t], grad)

    with torch.enable_grad():
        traced = make_fx(joint)(torch.empty_like(_called(function, given, tensors)), *tensors)
    names: dict[Node, str] = {}
    for i, node in enumerate(traced.graph.nodes):
        if node.op == "placeholder":
            names[node] = f"input {i}"
        elif node.op == "call_function":
            passed = _name(node) in _PASSED and isinstance(node.args[0], Node)
            shown = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Shown(names[n]))
            names[node] = names[node.args[0]] if passed else f"{node.target}{shown}"
    (result,) = traced.graph.find_nodes(op="output")
    return [names[n] for n in _torch_private.tree_leaves(result.args[0])]


class _Shown(str):
    """What is computed, as text in text."""

    def __repr__(self) -> str:
        return str(self)


def _name(node: Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, _torch_private.OpOverload) else ""
