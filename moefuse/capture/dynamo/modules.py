"""What capture asks Dynamo about lists of modules: which list a row selects from, and the siblings' weights and guards."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from moefuse.capture.dynamo import values

_ITEM = re.compile(r"\._modules\['\d+'\]")
_ROOT = re.compile(r"\b[LG]\['")
_GUARDS = "moefuse_guards"


class UnknownError(Exception):
    """Something is not as it is known from Dynamo."""


def list_of(translator: Any) -> tuple[nn.ModuleList, str] | None:
    """The list, and the name of its source, whose ``__getitem__`` is reading its index; None anywhere else."""
    outer = getattr(translator, "parent", None)
    if outer is None or translator.f_code is not _code("_get_abs_string_index") or outer.f_code is not _code("__getitem__"):
        return None
    variable = values.realized(translator.symbolic_locals.get("self"))
    value, source = getattr(variable, "value", None), getattr(variable, "source", None)
    return (value, _name(source)) if type(value) is nn.ModuleList and source is not None else None


def _code(method: str) -> Any:
    return getattr(nn.ModuleList, method).__code__


def item(list_name: str, row: int) -> str:
    """The name of an element's source."""
    return f"{list_name}._modules['{row}']"


def name_of(variable: Any) -> str:
    """The name of where the program has an object from; empty if the program made it."""
    source = getattr(variable, "source", None)
    if source is None and hasattr(variable, "original_source"):
        source = variable.original_source()
    return "" if source is None else _name(source)


def builtin(variable: Any) -> Any:
    """The function behind a variable that stands for one that Dynamo does not inline."""
    return getattr(variable, "fn", None) if type(variable).__name__ == "BuiltinVariable" else None


def inlines(variable: Any) -> bool:
    """Whether a call of this variable is traced instruction by instruction, so that capture sees what it does with its arguments."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    return isinstance(variable, UserFunctionVariable | UnspecializedNNModuleVariable)


def in_root(translator: Any) -> bool:
    """Whether the frame's own graph is being written, not that of a higher-order operator's body."""
    return translator.output.current_tracer is translator.output.root_tracer


def weights(translator: Any, list_name: str, row: int) -> dict[str, Node]:
    """The inputs of the graph that come from one element of a list: name of the source below the element -> placeholder."""
    prefix = item(list_name, row)
    found: dict[str, Node] = {}
    for node in translator.output.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if source is not None and _name(source).startswith(prefix):
            found[_name(source)[len(prefix) :]] = node
    return found


def input_like(translator: Any, node: Node, list_name: str, row: int, other: int) -> Any:
    """The variable of the input that is to element ``other`` what a placeholder is to element ``row``; new if there is none yet."""
    from torch._dynamo.variables.base import VariableTracker

    source = _moved(node.meta["grapharg"].source, list_name, row, other)
    value = _value(translator, source)
    made = values.realized(VariableTracker.build(translator, value, source))
    if values.tensor_node(made) is None or _name(made.source) != _name(source):
        raise UnknownError("a weight is known under another name")
    return made


def _value(translator: Any, source: Any) -> Any:
    """What a source stands for now."""
    root = translator.output.root_tx
    value = eval(_name(source), {"L": root.f_locals, "G": root.f_globals})
    if not isinstance(value, torch.Tensor):
        raise UnknownError("a weight is no tensor")
    return value


def copy_guards(translator: Any, list_name: str, row: int, others: Sequence[int]) -> None:
    """Watch the siblings of an element as that element is watched: if one of them changes, the frame is traced again.

    Raises:
        UnknownError: for a guard that cannot be copied.
    """
    guards = translator.output.guards
    for guard in _guards_on(translator, item(list_name, row)):
        create = guard.create_fn
        options = create.keywords if isinstance(create, functools.partial) else {}
        name = getattr(create, "func", create).__name__
        if name == "TENSOR_MATCH":
            continue  # every sibling's weight is an input, and has its own
        if (isinstance(create, functools.partial) and create.args) or not all(
            isinstance(v, str | int | bool | type(None)) for v in options.values()
        ):
            raise UnknownError(f"a guard of kind {name}")
        for other in others:
            guards.add(type(guard)(_moved(guard.originating_source, list_name, row, other), create))


def _guards_on(translator: Any, prefix: str) -> list[Any]:
    """The frame's guards on an element of a list and on everything below it."""
    output = translator.output
    if not hasattr(output, _GUARDS):
        setattr(output, _GUARDS, ({}, {}))
    known, seen = getattr(output, _GUARDS)
    for guard in output.guards.inner:
        if id(guard) in seen:
            continue
        seen[id(guard)] = guard
        name = _name(guard.originating_source)
        root = _ROOT.search(name)
        for found in _ITEM.finditer(name) if root is not None else ():
            known.setdefault(name[root.start() : found.end()], []).append(guard)  # type: ignore[union-attr]
    return list(known.get(prefix, ()))


def _moved(source: Any, list_name: str, row: int, other: int) -> Any:
    """The same source below another element of the list."""
    wanted = item(list_name, row)
    chain = list(_chain(source))
    at = next((i for i, s in enumerate(chain) if _name(s) == wanted and getattr(s, "index", None) == str(row)), None)
    if at is None:
        raise UnknownError(f"{_name(source)} is not below {wanted}")
    made = dataclasses.replace(chain[at], index=str(other))
    for parent in reversed(chain[:at]):
        made = dataclasses.replace(parent, base=made)
    return made


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def keep(translator: Any, function: Any, variables: Sequence[Any]) -> Node:
    """A call in the graph that reads these tensors, for whoever knows what it stands for."""
    proxy = translator.output.create_proxy("call_function", function, tuple(v.as_proxy() for v in variables), {})
    return proxy.node  # type: ignore[no-any-return]
