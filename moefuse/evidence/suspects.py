"""What in a model is built like a mixture of experts: modules, or stacked weights, with a weight beside them that scores as many.

Structure is the first half of the evidence, without names and configuration; it never decides what is rewritten. A model of ten blocks and
ten classes has it, too. The other half is what the graphs or the code do with it (:mod:`moefuse.diagnosis.missed_layers`).
"""

from __future__ import annotations

import inspect
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moefuse.evidence.few_bits import few_bits
from moefuse.program.weights import Weight, weights_read

_NEAR = 2
"""How many modules a router may be below the one that holds the experts."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_CONTAINERS = (*_LISTS, nn.ParameterList, nn.ParameterDict)

_BY_ROWS = (nn.Linear, nn.modules.conv._ConvNd)
"""Modules of which it is known that a row of the weight makes an output."""


@dataclass(frozen=True)
class Pair:
    """Something like experts, and something like their router.

    Attributes:
        what: for the report, e.g. ``8 equal modules (Expert) beside a weight [8, 64]``.
        experts: the identities of each expert's tensors; of a stack that holds all of them, one set.
        router: the identity of the router's weight; None where the experts' numbers come from outside.
        experts_names: the attributes of the module that lead to the experts.
        router_name: the one that leads to the router.
        loose: nothing holds the experts together but that they are equal, so more has to speak for them.
    """

    what: str
    experts: tuple[frozenset[int], ...]
    router: int | None
    experts_names: frozenset[str]
    router_name: str | None
    loose: bool = False

    @property
    def tensors(self) -> frozenset[int]:
        """The identities of the tensors of all experts."""
        return frozenset().union(*self.experts)


@dataclass(frozen=True)
class Suspect:
    """One module that holds something like experts.

    Attributes:
        name: its path from the root module, empty for the root itself.
        module: the module whose forward would run them.
        pairs: what looks like experts and their router, the likeliest first.
        around: the modules that it is in, from the innermost on.
    """

    name: str
    module: nn.Module
    pairs: tuple[Pair, ...]
    around: tuple[nn.Module, ...] = ()

    @property
    def what(self) -> str:
        return self.pairs[0].what

    @property
    def place(self) -> tuple[str, range]:
        """The file and the lines of the forward function; an empty file where Python knows none."""
        return place_of(self.module)


def place_of(module: nn.Module) -> tuple[str, range]:
    """The file and the lines of a module's forward function; an empty file where Python knows none."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return "", range(0)
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_filename, range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)


def suspects(roots: Iterable[object]) -> list[Suspect]:
    """The innermost modules that look like a mixture of experts, of all modules that are or belong to ``roots``."""
    found: dict[int, Suspect] = {}
    for root in modules_of(roots):
        forms = _Forms()
        for name, module in root.named_modules():
            pairs = tuple(_pairs(module, forms))
            if pairs:
                found.setdefault(id(module), Suspect(name, module, pairs, _around(root, name)))
    firm = {id(m) for s in found.values() for m in s.around if not s.pairs[0].loose}
    around = {id(m) for s in found.values() for m in s.around if any(pair.router is not None for pair in s.pairs)}
    routed = {key for key, s in found.items() if any(pair.router is not None for pair in s.pairs)}
    left = (s for s in found.values() if id(s.module) not in (around if s.pairs[0].loose else firm))
    return [s for s in left if id(s.module) in routed or routed.isdisjoint(map(id, s.around))]


def _shape(t: torch.Tensor) -> tuple[int, ...]:
    """The shape that a tensor has while it is computed with: DeepSpeed's ZeRO-3 leaves an empty one in its place between calls.

    A lazy module has none before its first call."""
    return () if nn.parameter.is_lazy(t) else tuple(getattr(t, "ds_shape", t.shape))


def _parameters(module: nn.Module) -> dict[str, Weight]:
    """The Parameters that a module's code reads, in the shapes that it finds them in."""
    own = {name: (t, _shape(t)) for name, t in module._parameters.items() if t is not None}
    return {name: weight for name, weight in (own | dict(weights_read(module))).items() if weight is not None}


def _weights(module: nn.Module) -> dict[str, Weight]:
    """Any Parameter, and buffers that are matrices in few bits (scales and statistics are not)."""
    buffers = {name: (t, _shape(t)) for name, t in module._buffers.items() if t is not None}
    return _parameters(module) | {name: (t, shape) for name, (t, shape) in buffers.items() if len(shape) >= 2 and few_bits(t.dtype)}


def _around(root: nn.Module, name: str) -> tuple[nn.Module, ...]:
    parts = name.split(".") if name else []
    return tuple(root.get_submodule(".".join(parts[:at])) for at in reversed(range(len(parts))))


def modules_of(roots: Iterable[object]) -> Iterator[nn.Module]:
    """The modules among some objects, and those that functions among them reach by name."""
    for root in roots:
        if isinstance(root, nn.Module):
            yield root
        elif isinstance(root, types.MethodType):
            yield from modules_of([root.__self__])
        elif isinstance(root, types.FunctionType):
            names = (root.__globals__.get(name) for name in root.__code__.co_names)
            cells = (_content(cell) for cell in root.__closure__ or ())
            yield from (value for value in (*names, *cells) if isinstance(value, nn.Module))


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


@dataclass(frozen=True)
class _Form:
    """What a module holds: ``shape`` is equal for modules that hold tensors of equal names and shapes."""

    shape: object
    tensors: frozenset[int]
    matrix: bool


class _Forms:
    """The forms of modules, each module looked into once."""

    def __init__(self) -> None:
        self._known: dict[int, _Form] = {}
        self._numbers: dict[object, int] = {}

    def of(self, module: nn.Module) -> _Form:
        if id(module) not in self._known:
            own = _weights(module)
            children = {name: self.of(child) for name, child in module._modules.items() if child is not None}
            shape = (
                *((name, own_shape) for name, (_, own_shape) in own.items()),
                *((name, child.shape) for name, child in children.items()),
            )
            held = (id(t) for t in (*(t for t, _ in own.values()), *module._buffers.values()) if t is not None)
            tensors = frozenset(held).union(*(child.tensors for child in children.values()))
            matrix = any(len(own_shape) >= 2 for _, own_shape in own.values()) or any(child.matrix for child in children.values())
            # Shapes of shapes are compared by a number for each.
            self._known[id(module)] = _Form(self._numbers.setdefault(shape, len(self._numbers)), tensors, matrix)
        return self._known[id(module)]


@dataclass(frozen=True)
class _Group:
    """Something like experts: ``own`` are the modules that a router is not looked for in."""

    what: str
    experts: tuple[frozenset[int], ...]
    count: int
    names: frozenset[str]
    own: frozenset[int] = frozenset()
    loose: bool = False


def _pairs(module: nn.Module, forms: _Forms) -> Iterator[Pair]:
    """What in a module looks like experts with a router."""
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, _LISTS):
        return
    groups: list[_Group] = []
    for name, holder in _holders(module):
        groups += [*_modules_beside(holder, name, forms), *_tensors_beside(holder, name), *_stacked(holder, name)]
    pairs = [pair for group in (*groups, *_attributes(module, forms)) for pair in _routed(module, group, groups)]
    yield from pairs
    for group in groups if not pairs and not isinstance(module, nn.ModuleList | nn.ModuleDict) else ():
        yield Pair(group.what, group.experts, None, group.names, None, loose=True)


def _routed(module: nn.Module, group: _Group, groups: Sequence[_Group]) -> Iterator[Pair]:
    """Something like experts with each weight that scores as many.

    One of as many equal things is hardly a router: two adapters of rank 2 have two weights [2, H], and two more.
    """
    beside = frozenset().union(
        *(expert for other in groups if other is not group and other.count == group.count for expert in other.experts)
    )
    for name, router in _routers(module, group.count, group.own):
        if id(router) not in frozenset().union(*group.experts):
            what = f"{group.what} beside a weight {list(_shape(router))}"
            yield Pair(what, group.experts, id(router), group.names, name, group.loose or id(router) in beside)


def _holders(module: nn.Module, name: str = "", depth: int = _NEAR) -> Iterator[tuple[str, nn.Module]]:
    """(the attribute that leads there, the module) of a module and those near below it, but not of lists' items.

    What a module is wrapped around, with adapters in lists beside it, is as near as the module itself.
    """
    yield name, module
    if isinstance(module, _LISTS):
        return
    step = 0 if sum(not isinstance(child, _CONTAINERS) for child in module.children()) == 1 else 1
    for own, child in module.named_children() if depth >= step else ():
        yield from _holders(child, name or own, depth - step)


def _modules_beside(holder: nn.Module, name: str, forms: _Forms) -> Iterator[_Group]:
    """A list of modules that hold weights."""
    items = list(holder.children())
    if len(items) < 2 or not isinstance(holder, nn.ModuleList | nn.ModuleDict):
        return
    known = [forms.of(item) for item in items]
    if all(form.matrix for form in known):
        yield _group(items, known, frozenset((name or "children",)))


def _group(items: list[nn.Module], known: list[_Form], names: frozenset[str], loose: bool = False) -> _Group:
    kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
    equal = "equal " if len({(type(item), form.shape) for item, form in zip(items, known, strict=True)}) == 1 else ""
    own = frozenset(map(id, items))
    return _Group(f"{len(items)} {equal}modules ({kinds})", tuple(form.tensors for form in known), len(items), names, own, loose)


def _attributes(module: nn.Module, forms: _Forms) -> Iterator[_Group]:
    """Equal modules that are attributes of their own: all of one kind, or those whose names differ in a number only."""
    if isinstance(module, _LISTS) or len(module._modules) < 2:
        return
    alike: dict[object, dict[str, nn.Module]] = defaultdict(dict)
    for name, child in module.named_children():
        form = forms.of(child)
        if form.matrix and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            alike[type(child), form.shape][name] = child
            alike[type(child), form.shape, re.sub(r"\d+", "", name)][name] = child
    groups = {frozenset(named): named for named in alike.values() if len(named) >= 2}
    for names, named in groups.items():
        items = list(named.values())
        yield _group(items, [forms.of(item) for item in items], names, loose=True)


def _tensors_beside(holder: nn.Module, name: str) -> Iterator[_Group]:
    """A list of equal weights."""
    items = list(holder.parameters(recurse=False)) if isinstance(holder, nn.ParameterList) else []
    shapes = {_shape(t) for t in items}
    if len(items) >= 2 and len(shapes) == 1 and all(len(shape) >= 2 for shape in shapes):
        what = f"{len(items)} equal weights {list(*shapes)}"
        yield _Group(what, tuple(frozenset((id(t),)) for t in items), len(items), frozenset((name,)))


def _stacked(holder: nn.Module, name: str) -> Iterator[_Group]:
    """Weights [E, ..., ...] that a module of the user's own holds."""
    if type(holder).__module__.startswith("torch.nn."):
        return
    buffers = {n: (t, _shape(t)) for n, t in holder.named_buffers(recurse=False)}
    own = {n: (t, shape) for n, (t, shape) in (_parameters(holder) | buffers).items() if len(shape) >= 3}
    for count in dict.fromkeys(int(shape[0]) for _, shape in own.values() if shape[0] > 1):
        held = {n: (t, shape) for n, (t, shape) in own.items() if shape[0] == count}
        _, first = next(iter(held.values()))
        names = frozenset((name,)) if name else frozenset(held)
        yield _Group(f"weights {list(first)}", (frozenset(id(t) for t, _ in held.values()),), count, names)


def _routers(
    module: nn.Module, count: int, experts: frozenset[int], name: str = "", depth: int = _NEAR
) -> Iterator[tuple[str, torch.Tensor]]:
    """(attribute that leads there, weight) of weights of ``count`` scores in a module or near below it, not in the experts."""
    for own, (weight, shape) in _parameters(module).items():
        by_rows = len(shape) >= 2 and shape[0] == count and all(n == 1 for n in shape[2:])
        by_columns = len(shape) == 2 and shape[1] == count and not isinstance(module, _BY_ROWS)
        if by_rows or by_columns:
            yield name or own, weight
    for own, child in module.named_children() if depth else ():
        if id(child) not in experts:
            yield from _routers(child, count, experts, name or own, depth - 1)


__all__ = ["Pair", "Suspect", "place_of", "suspects"]
