"""Which modules a compiled graph has run, and when. Dynamo uses the code of one layer for every layer that its guards accept, and tells
nobody."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moefuse import _torch_private
from moefuse.passes.graph.module_names import ModuleNames
from moefuse.program.runs import Ran, now
from moefuse.report.entries import Skipped
from moefuse.report.grouping import pattern
from moefuse.report.quietly import quietly
from moefuse.report.report import FusionReport

LIMIT = 4096
"""Modules that are told apart; code that gets new weights with every call counts no further."""


class Seen:
    """A tensor that a graph ran with, and the last time that it did."""

    __slots__ = ("last", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.last = now()


class Served:
    """The modules that one compiled graph has run, told by one of its parameters.

    A parameter that is gone leaves its identity to another: each is held weakly beside it.

    Args:
        names: of the modules of what was compiled.
        name: of the parameter that the graph was compiled with.
    """

    def __init__(self, names: ModuleNames, name: str) -> None:
        self.name = name
        self.roots = {prefix: weakref.ref(root) for prefix, root in names.roots.items()}
        like = pattern(name)
        # The names outlive the model; those of another layer's parameter differ in numbers.
        named = [(parameter, other) for parameter, other in names.named_parameters() if pattern(other) == like]
        self._known = {id(parameter): (weakref.ref(parameter), other) for parameter, other in named}
        self._open = [other for _, other in named if other != name]
        self._ran: dict[str, Seen | None] = {name: None}
        self._strangers: list[Seen] = []
        self.seen: dict[int, Seen] = {}

    def note(self, parameter: torch.Tensor) -> None:
        """The graph runs with this tensor for its parameter."""
        if len(self.seen) >= LIMIT:
            return
        seen = self.seen[id(parameter)] = Seen(parameter)
        held, name = self._known.get(id(parameter), (None, None))
        if held is None or held() is not parameter:
            name = self._now(parameter)
        if name is None:
            self._strangers.append(seen)
        elif name in self._open:
            self._open.remove(name)
            self._ran[name] = seen
        elif name in self._ran:
            self._ran[name] = seen

    def _now(self, parameter: torch.Tensor) -> str | None:
        """The name that a tensor has now, of those that have not run: what offloads weights has others in their place for a call."""
        return next((name for name in self._open if self._held(name) is parameter), None)

    def _held(self, name: str) -> object:
        for prefix, weak in self.roots.items():
            path, _, own = (name.removeprefix(f"{prefix}.") if prefix else name).rpartition(".")
            found = functools.reduce(_child, path.split("."), weak()) if path else weak()
            if found is not None:
                return found._parameters.get(own)
        return None

    def applied(self, report: FusionReport) -> tuple[FusionReport, dict[str, int]]:
        """The report with each item once for each module that the graph has run, and when each of these ran last."""
        names = self._names()
        others = [name for name, _ in names if name != self.name]
        fused = [replace(f, module=renamed(f.module, self.name, other)) for other in others for f in report.fused]
        skipped = [self._borrowed(s, renamed(s.module, self.name, other)) for other in others for s in report.skipped]
        modules = [*(f.module for f in report.fused), *(s.module for s in report.skipped)]
        times = {renamed(module, self.name, name): seen.last for name, seen in names if seen is not None for module in modules}
        return replace(report, fused=report.fused + fused, skipped=report.skipped + skipped), times

    def _borrowed(self, skipped: Skipped, module: str) -> Skipped:
        """A refusal of another module; where that is of another class, the reason is the first one's."""
        if self._class(module) is self._class(skipped.module):
            return replace(skipped, module=module)
        return replace(skipped, module=module, message=f"it runs the code that was compiled for {skipped.module}, where {skipped.message}")

    def _class(self, name: str) -> type | None:
        for prefix, weak in self.roots.items():
            try:
                return type(weak().get_submodule(name.removeprefix(f"{prefix}.") if prefix else name))  # type: ignore[union-attr]
            except AttributeError:
                continue
        return None

    def _names(self) -> list[tuple[str | None, Seen | None]]:
        """The parameters that the graph ran with; None for one of a module outside of what was compiled (a layer compiled on its own)."""
        unknown = [(parameter, seen) for seen in self._strangers if (parameter := seen.tensor()) is not None]
        now: dict[int, str] = {}
        for prefix, weak in self.roots.items() if unknown else ():
            root = weak()
            if root is None:
                continue
            now |= {id(parameter): f"{prefix}.{name}".removeprefix(".") for name, parameter in root.named_parameters()}
            shards = _torch_private.computed_with(root)
            now |= {whole: now[id(shard)] for whole, shard in shards.items() if id(shard) in now}
        # A parameter that was assigned anew has the name of its predecessor.
        named = self._ran | {now[id(parameter)]: seen for parameter, seen in unknown if id(parameter) in now}
        return [*named.items(), *((None, seen) for parameter, seen in unknown if id(parameter) not in now)]


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    return None if module is None else module._modules.get(name)


def watch(
    report: FusionReport, compiled: _torch_private.CompiledFn, example_inputs: Sequence[object], *, always: bool = False
) -> tuple[_torch_private.CompiledFn, Served | None, Ran | None]:
    """The compiled graph, with a note of when it runs, and of the modules that it runs, where the report has any; None where it has not.

    ``always``: also where the report has nothing, for the graph runs in the place of one that has.
    """
    wanted = always or report.fused or report.skipped
    if not isinstance(compiled, types.FunctionType) or not wanted or _torch_private.compiled_code_is_stored():
        return compiled, None, None
    ran = Ran()
    found = _served(report, example_inputs) if report.fused or report.skipped else None
    if found is None:
        return _timed(compiled, ran), None, ran
    at, served = found
    return _noting(compiled, at, served.seen, served.note, ran), served, ran


def _served(report: FusionReport, example_inputs: Sequence[object]) -> tuple[int, Served] | None:
    """(which input tells modules apart, what is known of them), where one graph may run several."""
    names = ModuleNames(_torch_private.traced())
    modules = {fused.module for fused in report.fused} | {skipped.module for skipped in report.skipped}
    if names.whole and len(modules) > 1:
        return None  # several layers in one graph: that is a model, and no other one's code
    known = names.parameters()
    found = _witness(report, known, example_inputs)
    return None if found is None else (found[0], Served(names, found[1]))


# Dynamo calls what a backend returns with the graph's inputs, and unwraps what functools.wraps marks.


def _timed(compiled: _torch_private.CompiledFn, ran: Ran) -> _torch_private.CompiledFn:
    def run(*args: Any) -> Any:
        ran.last = now()
        return compiled(*args)

    return run


def _noting(
    compiled: _torch_private.CompiledFn, at: int, seen: dict[int, Seen], note: Callable[[Any], None], ran: Ran
) -> _torch_private.CompiledFn:
    def run(*args: Any) -> Any:
        ran.last = time = now()
        known = seen.get(id(args[at]))
        if known is None or known.tensor() is not args[at]:
            quietly(note, args[at])
        else:
            known.last = time
        return compiled(*args)

    return run


def _witness(report: FusionReport, known: dict[int, str], example_inputs: Sequence[object]) -> tuple[int, str] | None:
    return nearest_parameter((report.fused or report.skipped)[0].module, known, example_inputs)


def nearest_parameter(module: str, known: dict[int, str], example_inputs: Sequence[object]) -> tuple[int, str] | None:
    """(which input, its name): the parameter among a graph's inputs that is the nearest to a module; ``known``: names by identity."""
    named = [(at, known[id(value)]) for at, value in enumerate(example_inputs) if isinstance(value, torch.Tensor) and id(value) in known]
    return max(named, key=lambda entry: _agree(entry[1], module), default=None)


def _agree(name: str, module: str) -> int:
    """How many parts from the first on two paths have in common."""
    pairs = zip(name.split("."), module.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def renamed(module: str, name: str, other: str | None) -> str:
    """The module whose parameter is ``other``, in the place of ``module`` around the parameter ``name``."""
    if other is None:
        return module
    old, new = name.split("."), other.split(".")
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    path = module.split(".") if module else []
    return ".".join((*new, *path[len(old) :])) if path[: len(old)] == old else module


__all__ = ["LIMIT", "Served", "nearest_parameter", "renamed", "watch"]
