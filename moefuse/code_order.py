"""What the code of a layer says where no graph has all of it: a router is read before its experts, and something is chosen by it.

A classifier's head is read behind its layers. Only names of attributes are compared, in the order of the code, with methods, helper
functions and the forward functions of children in the place where they are named.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from torch import nn

_Use = Literal["router", "experts", "choice"]

_CHOICES = frozenset(
    "topk argmax argmin max min sort argsort where nonzero one_hot multinomial softmax sigmoid gumbel_softmax bincount histc item tolist "
    "scatter scatter_ unique eq ge gt log_softmax sparsemax entmax relu".split()
)
_ANY_CHILD = frozenset("getattr children modules named_children _modules".split())
_DEPTH = 4


def router_decides(functions: Iterable[object], owner: nn.Module, router: Collection[str], experts: Collection[str]) -> bool | None:
    """Whether the first of some functions that names both reads the router first, and chooses; None where no function names both.

    Args:
        functions: forward functions and others, from the innermost on.
        owner: the module that has the attributes.
        router: attributes of the owner that hold its weight.
        experts: those that hold theirs.
    """
    for function in functions:
        uses = list(_uses(function, owner, frozenset(router), frozenset(experts), _DEPTH, frozenset()))
        if "router" not in uses or "experts" not in uses:
            continue
        first, last = uses.index("router"), len(uses) - uses[::-1].index("experts")
        return "experts" in uses[first:last] and "choice" in uses[first:]
    return None


def forward_of(module: nn.Module) -> object:
    """A module's forward function as its author wrote it."""
    return inspect.unwrap(type(module).forward)


def _uses(
    function: object, owner: nn.Module, router: frozenset[str], experts: frozenset[str], depth: int, seen: frozenset[types.CodeType]
) -> Iterator[_Use]:
    """What a function reads, in the order of its code."""
    function = _plain(function)
    if not isinstance(function, types.FunctionType) or depth < 0 or function.__code__ in seen or _is_torchs(function):
        return
    yield from _in_code(function.__code__, function, owner, router, experts, depth, seen | {function.__code__})


def _in_code(
    code: types.CodeType,
    function: types.FunctionType,
    owner: nn.Module,
    router: frozenset[str],
    experts: frozenset[str],
    depth: int,
    seen: frozenset[types.CodeType],
) -> Iterator[_Use]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for instruction in dis.get_instructions(code):
        name, opcode = instruction.argval, instruction.opname
        if opcode == "LOAD_CONST" and isinstance(name, types.CodeType):
            yield from _in_code(name, function, owner, router, experts, depth, seen)
        elif opcode == "COMPARE_OP":
            yield "choice"
        elif not isinstance(name, str):
            continue
        elif opcode in ("LOAD_GLOBAL", "LOAD_NAME"):
            if name in _CHOICES:
                yield "choice"
            elif name in _ANY_CHILD:
                yield "experts"
            else:
                yield from _uses(function.__globals__.get(name), owner, router, experts, depth - 1, seen)
        elif opcode in ("LOAD_DEREF", "LOAD_CLOSURE") and name in cells:
            yield from _uses(_content(cells[name]), owner, router, experts, depth - 1, seen)
        elif opcode in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield from _attribute(name, code, owner, router, experts, depth, seen)


def _attribute(
    name: str, code: types.CodeType, owner: nn.Module, router: frozenset[str], experts: frozenset[str], depth: int, seen: frozenset[types.CodeType]
) -> Iterator[_Use]:
    if name in router:
        yield "router"
    if name in experts or name in _ANY_CHILD:
        yield "experts"
    if name in _CHOICES:
        yield "choice"
    child = owner._modules.get(name)
    if child is not None:
        # Of a child only what it chooses: its own attributes are others.
        yield from (use for use in _uses(forward_of(child), child, frozenset(), frozenset(), depth - 1, seen) if use == "choice")
        return
    for base in type(owner).__mro__:
        method = _plain(base.__dict__.get(name))
        if isinstance(method, types.FunctionType) and method.__code__ is not code:
            yield from _uses(method, owner, router, experts, depth - 1, seen)
            if method.__code__ not in seen:
                return


def _plain(function: object) -> object:
    """The function behind wrappers and descriptors."""
    if isinstance(function, property):
        function = function.fget
    if isinstance(function, staticmethod | classmethod | types.MethodType):
        function = function.__func__
    return inspect.unwrap(function) if callable(function) and hasattr(function, "__wrapped__") else function


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


__all__ = ["forward_of", "router_decides"]
