"""Torch's own signatures of an operation: the names of the arguments of a call, and which of them are as they are by default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.writes import plain_name

_VARYING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Form:
    """One way to call an operation.

    Attributes:
        positional: names of the arguments in their order.
        named: names of those that only go by name.
        defaults: what is taken where nothing is given.
        types: of an operator's schema.
    """

    positional: tuple[str, ...]
    named: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether it may be called so. Of types, only what tells a flag from a number is looked at."""
        if len(args) > len(self.positional):
            return False
        given = dict(zip(self.positional, args, strict=False))
        more = {name: value for name, value in kwargs.items() if name not in given}
        if len(more) < len(kwargs) or not more.keys() <= {*self.positional, *self.named}:
            return False
        return all(self._takes(name, value) for name, value in (given | more).items())

    def _takes(self, name: str, value: Any) -> bool:
        kind = self.types.get(name, "")
        if isinstance(value, Node) or value is None or not kind:
            return True
        if kind.removeprefix("Optional[").startswith("bool"):
            return isinstance(value, bool)
        return not isinstance(value, bool) or "List[" not in kind

    def is_default(self, name: str, value: Any) -> bool:
        """Whether an argument is what is taken where it is not given."""
        if name not in self.defaults:
            return False
        default = self.defaults[name]
        if isinstance(value, list | tuple) and isinstance(default, list | tuple):
            return tuple(value) == tuple(default)
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (value, default))
        return value is default or ((numbers or type(value) is type(default)) and bool(value == default))


def form_of(node: Node, call: Call) -> Form | None:
    """The first signature that fits a call, whose first argument is in its place whatever it is called."""
    return next((form for form in _forms(node.target, call.name) if form.fits(call.args, call.kwargs)), None)


@functools.lru_cache(1024)
def _forms(target: Any, name: str) -> tuple[Form, ...]:
    return tuple(_signatures(target, name))


def _signatures(target: Any, name: str) -> Iterator[Form]:
    if isinstance(target, _torch_private.OpOverload):
        yield _of_schema(target._schema)
        return
    if isinstance(target, _torch_private.OpOverloadPacket):
        yield from _of_packet(target)
        return
    written = plain_name(target)
    for function in (target if callable(target) else None, getattr(torch.Tensor, written, None)):
        found = _of_python(function) if inspect.isfunction(function) else None
        if found is not None:
            yield found
    for spelled in dict.fromkeys((written, written.rstrip("_"), name)):
        packet = getattr(torch.ops.aten, spelled, None)
        if isinstance(packet, _torch_private.OpOverloadPacket):
            yield from _of_packet(packet)


def _of_packet(packet: Any) -> Iterator[Form]:
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    yield from (_of_schema(schema) for schema in schemas if not any(a.is_out or "Dimname" in str(a.type) for a in schema.arguments))


def _of_schema(schema: torch.FunctionSchema) -> Form:
    positional = tuple(a.name for a in schema.arguments if not a.kwarg_only)
    named = tuple(a.name for a in schema.arguments if a.kwarg_only)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return Form(positional, named, defaults, {a.name: str(a.type) for a in schema.arguments})


def _of_python(function: Any) -> Form | None:
    """None if it says nothing but that it passes everything on."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind in _VARYING for p in parameters):
        return None
    positional = tuple(p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)
    named = tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
    return Form(positional, named, {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty})
