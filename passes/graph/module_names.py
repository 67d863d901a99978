"""Names of modules as the user knows them: those of ``named_modules()`` of what was compiled.

Dynamo calls a module by the expression that the traced frame finds it with, which is another one in each frame behind a graph break, and
through wrappers that look it up in a ``__dict__``. It notes the module's identity beside it, and that has one name.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moefuse import _torch_private

MODULE = "moefuse_module"
"""Key of a node's ``meta``: the name of the innermost module that ran it."""

_Stack = dict[str, tuple[str, type]]


class ModuleNames:
    """The modules of what is compiled, by identity.

    Args:
        traced: what Dynamo is compiling; None if that is unknown, and then a module has the name that Dynamo gave it.
    """

    def __init__(self, traced: _torch_private.Traced | None) -> None:
        self.roots = roots_of(traced) if traced is not None else {}
        self._fresh = False
        owner = traced.local_scope.get("self") if traced is not None else None
        self.frame = (self._name(id(owner)) or "") if isinstance(owner, nn.Module) else None
        """The module whose method is traced; None for a function."""
        apart = isinstance(owner, nn.Module) and owner in _models
        self.whole = owner is None or apart or any(owner is root for root in self.roots.values())
        """Whether the frame may be that of what was compiled, and not of one of its modules."""

    def parameters(self) -> dict[int, str]:
        """Names of parameters, by identity."""
        return {id(parameter): name for parameter, name in self.named_parameters()}

    def named_parameters(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Each parameter with its name."""
        for name, module in self._modules():
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    yield parameter, f"{name}.{own}".removeprefix(".")

    def of(self, stack: _Stack) -> str:
        """The name of the innermost module of a ``nn_module_stack``; of one that is not registered, its path from the nearest that is."""
        entries = list(stack.items())
        innermost = source_path(entries[-1][1][0])
        for key, (source, _) in reversed(entries):
            name = self._name(_identity(key))
            if name is not None:
                return self.run(_joined(name, _behind(source_path(source), innermost)))
        return innermost if self.frame is None else _joined(self.frame, innermost)

    def around(self, example_inputs: Sequence[object]) -> str:
        """The module of what no module inside of the frame runs: the frame's, or the one that all parameters among its inputs belong to."""
        return self.frame if self.frame is not None else _owner(self, example_inputs)

    def run(self, name: str) -> str:
        """The module that runs what is in the one of this name: of a list of modules, which has no forward, the module around it."""
        while name and self._is_list(name):
            name = name.rpartition(".")[0]
        return name

    def _is_list(self, name: str) -> bool:
        for prefix, root in self.roots.items():
            try:
                found = root.get_submodule(name.removeprefix(prefix).removeprefix(".") if prefix else name)
            except AttributeError:
                continue
            return isinstance(found, nn.ModuleList | nn.ModuleDict) and type(found).forward is nn.Module.forward
        return False

    def of_module(self, module: nn.Module) -> str | None:
        """The name of a module, or of the one that runs it; None for one that does not belong to what was compiled."""
        name = self._name(id(module))
        return None if name is None else self.run(name)

    def _name(self, number: int) -> str | None:
        """The name of a module by its identity, as it is now."""
        for prefix, root in self.roots.items():
            known = _known.get(root)
            if known is None or (not self._fresh and not _is_still(root, known.get(number), number)):
                # The modules of a large model are walked through once, and again when a graph has one that was not there.
                known = _known[root] = {id(module): name for name, module in root.named_modules()}
                self._fresh = True
            if _is_still(root, known.get(number), number):
                return _joined(prefix, known[number])
        return None

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, root in self.roots.items():
            for name, module in root.named_modules():
                yield _joined(prefix, name), module


_known: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""The modules of what was compiled in this process, by identity. A module that has gone can have left its identity to another."""


def _is_still(root: nn.Module, name: str | None, number: int) -> bool:
    if name is None:
        return False
    try:
        return id(root.get_submodule(name)) == number
    except AttributeError:
        return False


def annotate(gm: torch.fx.GraphModule, names: ModuleNames, example_inputs: Sequence[object] | None) -> None:
    """Note at every node of a graph, bodies included, which module ran it."""
    known: dict[tuple[str, str], str] = {}
    default = names.around(example_inputs or ())
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            stack: _Stack | None = node.meta.get("nn_module_stack")
            if not stack:
                if default and node.op not in ("placeholder", "output"):
                    node.meta[MODULE] = default
                continue
            key, (source, _) = next(reversed(stack.items()))
            if (key, source) not in known:
                known[key, source] = names.of(stack)
            node.meta[MODULE] = known[key, source]


def of_traced(stack: _Stack | None) -> str:
    """The module of an operation that Dynamo is tracing, by its ``nn_module_stack``; empty where nothing is known."""
    names = ModuleNames(_torch_private.traced())
    return names.of(stack) if stack else names.frame or ""


def source_path(source: str) -> str:
    """Dynamo's expression for a module as a dotted path: ``L['self']._modules['layers'][0]`` is ``layers.0``."""
    path = re.sub(r"^[LG]\['\w+'\]|^L__self__", "", source)
    path = path.replace("_modules['", ".").replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
    return ".".join(part for part in path.split(".") if part and part not in ("self", "_modules", "_fn", "__dict__", "__self__"))


_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def name_within(model: nn.Module, part: nn.Module) -> None:
    """From now on a part of a model that is compiled by itself has the names of the model, and not its own."""
    _models[part] = weakref.ref(model)


def _model_of(part: nn.Module) -> nn.Module:
    model = weak() if (weak := _models.get(part)) is not None else None
    return part if model is None else model


def in_its_model(part: nn.Module, name: str) -> str:
    """The name of a module inside of a part that is compiled by itself: the model's, if it has one (:func:`name_within`)."""
    model = _model_of(part)
    prefix = "" if model is part else next((known for known, module in model.named_modules() if module is part), "")
    return _joined(prefix, name)


def roots_of(traced: _torch_private.Traced) -> dict[str, nn.Module]:
    """The modules that the compiled function is or holds, by the prefix of their modules' names: none where there is one root."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in _held(traced.function, traced.args, traced.kwargs):
        if isinstance(value, nn.Module):
            found.setdefault(id(value), (name, value))
    alone = len(found) == 1
    return {"" if alone else name: module for name, module in found.values()}


def _held(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a function reaches without a search, by the names that it has there."""
    if isinstance(function, nn.Module):
        yield "", _model_of(function)
        return
    if isinstance(function, functools.partial):
        yield from _held(function.func, (*function.args, *args), {**function.keywords, **kwargs})
        return
    if isinstance(function, types.MethodType):
        if isinstance(function.__self__, nn.Module):
            yield "", _model_of(function.__self__)
            return
        yield from getattr(function.__self__, "__dict__", {}).items()
        function, args = function.__func__, (function.__self__, *args)
    if isinstance(function, types.FunctionType):
        code = function.__code__
        yield from zip(code.co_varnames, args, strict=False)
        for name, cell in inspect.getclosurevars(function).nonlocals.items():
            # torch wraps a callable that has no frame of its own into a function.
            yield from _held(cell, args, kwargs) if isinstance(cell, functools.partial | types.MethodType) else [(name, cell)]
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
    yield from kwargs.items()


def _identity(key: str) -> int:
    """The module's ``id`` in a key of ``nn_module_stack``; a second call of one module has ``@1`` behind it."""
    number = key.partition("@")[0]
    return int(number) if number.isdigit() else 0


def _behind(outer: str, inner: str) -> str:
    """What is left of a path behind that of a module around it; nothing if they do not agree."""
    return inner[len(outer) :].removeprefix(".") if not outer or inner == outer or inner.startswith(f"{outer}.") else ""


def _joined(first: str, second: str) -> str:
    return f"{first}.{second}".strip(".")


def _owner(names: ModuleNames, example_inputs: Sequence[object]) -> str:
    """The module that all parameters among a graph's inputs belong to: the best that can be said of a function's frame."""
    known = names.parameters() if names.roots else {}
    paths = [known[id(value)].split(".")[:-1] for value in example_inputs if id(value) in known]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return names.run(".".join(common))


class Matching:
    """Which modules have names that match a pattern. Does not hold on to what was compiled."""

    def __init__(self, names: ModuleNames, pattern: str) -> None:
        self.roots = {prefix: weakref.ref(root) for prefix, root in names.roots.items()}
        self.pattern = re.compile(pattern)

    def __call__(self, module: nn.Module) -> frozenset[str]:
        """Those below a module, by their paths from there; the module itself has an empty path."""
        names = ModuleNames(None)
        names.roots = {prefix: root for prefix, weak in self.roots.items() if (root := weak()) is not None}
        name = names.of_module(module)
        own = {""} if name is not None and self.pattern.search(name) else set()
        below = ((path, _joined(name or "", path)) for path, _ in module.named_modules() if path)
        return frozenset(own | {path for path, full in below if self.pattern.search(full)})


__all__ = ["MODULE", "Matching", "ModuleNames", "annotate", "of_traced", "roots_of", "source_path"]
