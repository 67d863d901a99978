"""Which tensors an operation writes to: what its schema says, and where there is no schema, what Python and the fake tensors say.

Doubt counts as a write to everything given: a function that is not torch's, a higher-order operator whose bodies are not at hand.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.values import fake, tensors_in

#: statistics that normalisations update without saying so in their schema, and the arguments that keep them from it
_STATISTICS = ("running_mean", "running_var")
_SWITCHES = ("training", "use_input_stats")

_NUMPY = "wrapped_"
"""How Dynamo calls functions on NumPy's arrays, which are torch's functions on tensors."""

#: modules whose functions compute from their arguments and nothing else
_KNOWN = ("torch", "_operator", "operator", "math", "builtins", "moefuse")


def known_function(target: Any) -> bool:
    """Whether a target is torch's own or Python's, so that torch (or Python) says what it does."""
    if isinstance(target, str):
        return True
    if isinstance(target, _torch_private.OpOverload | _torch_private.OpOverloadPacket):
        return True
    module = str(getattr(target, "__module__", None) or "torch")
    return module.partition(".")[0] in _KNOWN


def written(node: Node) -> tuple[Node, ...]:
    """The tensors among its arguments that a node writes to, in the order of its arguments."""
    if node.op == "call_module":
        return _given(node)
    if node.op not in ("call_function", "call_method"):
        return ()
    target: Any = node.target
    if isinstance(target, _torch_private.HigherOrderOperator):
        return _by_bodies(node)
    if isinstance(target, _torch_private.OpOverload | _torch_private.OpOverloadPacket):
        return _at(node, _places_of(target))
    if not known_function(target):
        return _given(node)
    found = (*_nodes(node.kwargs.get("out")), *_by_name(node), *statistics(node))
    return tuple(dict.fromkeys(found)) or _by_running(node)


def plain_name(target: Any) -> str:
    """The name of a target as written, without the underscores around the name of a method like ``__iadd__``."""
    name = str(target if isinstance(target, str) else getattr(target, "__name__", target))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _given(node: Node) -> tuple[Node, ...]:
    """Every tensor that a node is given, and everything of which torch recorded nothing."""
    found = ((n, fake(n)) for n in node.all_input_nodes)
    return tuple(n for n, v in found if next(tensors_in(v), None) is not None or (v is None and n.op != "get_attr"))


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _nodes(item)


Places = frozenset[tuple[int, str]]
"""(place, name) of arguments."""


def _places(schema: Any) -> Places:
    """The tensors that a schema says are written to."""
    arguments = enumerate(schema.arguments)
    return frozenset((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write and "Tensor" in str(a.type))


@functools.cache
def _places_of(target: Any) -> Places:
    """What an operator's schema, or any schema of an operator that may be meant, says is written to."""
    overloads = (getattr(target, o) for o in target.overloads()) if isinstance(target, _torch_private.OpOverloadPacket) else (target,)
    return frozenset().union(*(_places(overload._schema) for overload in overloads))


@functools.cache
def _schemas_of(name: str) -> tuple[Any, ...]:
    """The schemas of the torch operator of a name, not those for ``out=`` (a keyword, which the node shows) or for lists of scripts."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    found = [getattr(packet, o)._schema for o in packet.overloads()] if isinstance(packet, _torch_private.OpOverloadPacket) else []
    return tuple(s for s in found if not any(a.is_out for a in s.arguments) and _torch_private.has_kernel(s))


@functools.cache
def _places_by_name(name: str) -> Places:
    return frozenset().union(*map(_places, _schemas_of(name)))


def _at(node: Node, places: Places) -> tuple[Node, ...]:
    """The nodes that a node has at certain places among its arguments."""
    found: dict[Node, None] = {}
    for place, name in sorted(places):
        value = node.kwargs.get(name, node.args[place] if place < len(node.args) else None)
        value = node.kwargs.get("input") if value is None and place == 0 else value
        found.update(dict.fromkeys(_nodes(value)))
    return tuple(found)


def _by_name(node: Node) -> tuple[Node, ...]:
    """Writes of a method, a built-in function or one of Python's operators."""
    target: Any = node.target
    name = plain_name(target).removeprefix(_NUMPY)
    python = (isinstance(target, str) and target.startswith("__")) or getattr(target, "__module__", "") in ("_operator", "operator")
    if name in ("setitem", "delitem") or ((python or plain_name(target).startswith(_NUMPY)) and is_augmented(name)):
        return tuple(_nodes(node.args[:1]))
    if getattr(target, "__module__", "") in ("_operator", "operator"):
        return ()  # ``and_`` and ``or_`` have their names from Python's grammar
    if _schemas_of(name):
        return _at(node, _places_by_name(name))
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    if name.endswith("_") and not name.endswith("__"):
        return tuple(_nodes(first))
    inplace = node.kwargs.get("inplace", _positional(node, "inplace"))
    return tuple(_nodes(first)) if inplace not in (None, False) else ()


def is_augmented(name: str) -> bool:
    """Whether ``operator.<name>`` is one of ``+=``, ``*=`` and so on."""
    return name.startswith("i") and hasattr(operator, name) and (hasattr(operator, name[1:]) or hasattr(operator, f"{name[1:]}_"))


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _function(target: Any) -> Any:
    return getattr(torch.Tensor, target, None) if isinstance(target, str) else target


def _positional(node: Node, name: str) -> Any:
    """An argument given by its place to a function that is written in Python."""
    function = _function(node.target)
    names = _parameters(function) if isinstance(function, types.FunctionType) else ()
    return node.args[names.index(name)] if name in names and names.index(name) < len(node.args) else None


@functools.cache
def _statistics(target: Any) -> tuple[str, ...]:
    """The names of the arguments of a normalisation with running statistics; nothing for any other function."""
    function = _function(target)
    names = _parameters(function) if isinstance(function, types.FunctionType) else ()
    schemas = () if names else _schemas_of(plain_name(target))
    for known in (names, *(tuple(a.name for a in s.arguments) for s in schemas)):
        if any(name in _STATISTICS for name in known):
            return known
    return ()


def statistics(node: Node) -> tuple[Node, ...]:
    """Running statistics that are updated: of all schemas only those of normalisations keep that to themselves."""
    names = _statistics(node.target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if not names or any(name in names and given.get(name, name == "use_input_stats") is False for name in _SWITCHES):
        return ()
    return tuple(n for name in _STATISTICS for n in _nodes(given.get(name)))


def _by_running(node: Node) -> tuple[Node, ...]:
    """What a function without a schema writes to, seen by running it on the fake tensors: a write counts up a tensor's version.

    A tensor whose version is zero was never written to at all, so that few functions have to be run.
    """
    function = _function(node.target)
    opaque = isinstance(function, types.FunctionType) or plain_name(node.target).startswith(_NUMPY)
    inputs = [n for n in _given(node) if any(_version(t) != 0 for t in tensors_in(fake(n)))] if opaque else []
    if not inputs:
        return ()
    before = [_versions(n) for n in inputs]
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fake)
    try:
        with _torch_private.trying_on_fakes(fake(inputs[0])):
            function(*args, **kwargs)
    except Exception:  # whatever it is, it is not known
        return _given(node)
    return tuple(n for n, old in zip(inputs, before, strict=True) if None in old or _versions(n) != old)


def returns_input(node: Node) -> set[int] | None:
    """Storages of a node's result when it is run again on the fake tensors as it is, without decompositions; None: it cannot be run.

    Nothing is run where a schema says that the result is new, of an operator that is not made of others.
    """
    called = node.op in ("call_function", "call_method")
    if not called or isinstance(node.target, _torch_private.HigherOrderOperator) or _is_new(node.target):
        return set()
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fake)
    try:
        with _torch_private.trying_on_fakes([fake(i) for i in node.all_input_nodes]):
            target: Any = node.target
            result = getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
    except _torch_private.depends_on_data():  # no view has a size that only the run knows
        return set()
    except Exception:  # whatever it is, it is not known
        return None
    return {_torch_private.storage_key(t) for t in tensors_in(result)}


@functools.cache
def _is_new(target: Any) -> bool:
    """Whether an operator's result is a new tensor, as its schemas say."""
    if isinstance(target, types.FunctionType):
        return False
    overload = isinstance(target, _torch_private.OpOverload)
    schemas = (target._schema,) if overload else _schemas_of(plain_name(target).removeprefix(_NUMPY))
    return bool(schemas) and all(not _torch_private.is_composite(s) and all(r.alias_info is None for r in s.returns) for s in schemas)


def _versions(node: Node) -> list[int | None]:
    return [_version(t) for t in tensors_in(fake(node))]


def _version(t: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count (inference mode)."""
    try:
        return t._version
    except RuntimeError:
        return None


def bodies(node: Node) -> list[GraphModule]:
    """The bodies that a higher-order operator is given."""
    owner = node.graph.owning_module
    named = [getattr(owner, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"]
    return [body for body in named if isinstance(body, GraphModule)]


def _by_bodies(node: Node) -> tuple[Node, ...]:
    """Tensors that the bodies of a higher-order operator write to; all of them where there is no body to read."""
    given, inside = _given(node), bodies(node)
    if not inside:
        return given
    keys = {n: _keys(n) for n in given}
    older = {key for body in inside for key in changed(body.graph)}
    if not older <= {key for own in keys.values() for key in own}:
        return given
    return tuple(n for n in given if keys[n] & older)


def _keys(node: Node) -> frozenset[int]:
    return frozenset(_torch_private.storage_key(t) for t in tensors_in(fake(node)))


def changed(graph: Graph) -> set[int]:
    """Storages that a body writes to and has not made itself."""
    older: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            older |= _keys(node)
    return {key for node in graph.nodes for target in written(node) for key in _keys(target) if key in older}


def repeats_a_write(gm: GraphModule) -> bool:
    """Whether a body inside a graph writes to what is older than the body."""
    inside = (m for m in gm.modules() if m is not gm and isinstance(m, GraphModule))
    return any(changed(body.graph) for body in inside)
