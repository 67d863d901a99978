"""What the code of a layer says where no graph has all of it: a router runs before its experts, and something is chosen by it.

A classifier's head runs behind its layers. The source is read in the order in which it computes (arguments before their function), with
methods, helper functions and the forward functions of children where they are called. Nothing else is known of values.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

_Use = Literal["router", "experts", "choice", "numbered"]

_CHOICES = frozenset(
    "topk argmax argmin max min sort argsort where nonzero one_hot multinomial softmax sigmoid gumbel_softmax bincount histc item tolist "
    "scatter scatter_ unique eq ge gt log_softmax relu".split()
)
_SCORES = frozenset("topk argmax argsort sort gumbel_softmax multinomial max".split())
_ANY_CHILD = frozenset("getattr children modules named_children _modules".split())
_DEPTH = 4


def router_decides(functions: Sequence[object], owner: nn.Module, router: Collection[str], experts: Collection[str]) -> bool | None:
    """Whether the first of some functions that runs both runs the router first, and chooses; None where no function runs both.

    Args:
        functions: forward functions and others, from the innermost on.
        owner: the module that has the attributes.
        router: attributes of the owner that lead to its weight; where there are none, a loop over the experts has to compare their numbers
            with something, and not to decide what Python does.
        experts: those that lead to theirs.
    """
    for function in functions:
        uses = list(_Reader(owner, frozenset(router), frozenset(experts)).function(function))
        if "numbered" in uses and not router:
            return _scored(functions, owner)
        if "router" not in uses or "experts" not in uses:
            continue
        behind = uses[uses.index("router") :]
        return "experts" in behind and "choice" in behind
    return None


def _scored(functions: Sequence[object], owner: nn.Module) -> bool:
    """Whether anything computes scores: numbers that nothing has chosen are kinds of rows (relations of a graph), and not experts."""
    modules = [m for root in (owner, *functions) if isinstance(root, nn.Module) for m in root.modules()]
    classes = {base for m in modules for base in type(m).__mro__ if not base.__module__.startswith("torch.")}
    written = [_plain(f) for base in classes for f in vars(base).values()] + [_plain(f) for f in functions]
    return any(isinstance(f, types.FunctionType) and not _SCORES.isdisjoint(f.__code__.co_names) for f in written)


def forward_of(module: nn.Module) -> object:
    """A module's forward function as its author wrote it."""
    return inspect.unwrap(type(module).forward)


@dataclass(frozen=True)
class _Reader:
    """Reads functions; ``names`` are the variables that are experts in the function that is read."""

    owner: nn.Module
    router: frozenset[str]
    experts: frozenset[str]
    depth: int = _DEPTH
    seen: frozenset[types.CodeType] = frozenset()
    within: Any = None
    names: set[str] = field(default_factory=set)

    def function(self, function: object) -> Iterator[_Use]:
        """What a function runs, in order; nothing for what is torch's or has no source."""
        function = _plain(function)
        if not isinstance(function, types.FunctionType) or function.__code__ in self.seen or self.depth < 0:
            return
        if (function.__module__ or "").partition(".")[0] == "torch":
            return
        tree = _tree(function.__code__)
        inner = replace(self, depth=self.depth - 1, seen=self.seen | {function.__code__}, within=function, names=set())
        for node in tree.body if tree is not None else ():
            yield from inner.read(node)

    def read(self, node: ast.AST) -> Iterator[_Use]:
        """What a piece of code runs, in order."""
        match node:
            case ast.Call():
                yield from self.all(*node.args, *node.keywords, node.func)
            case ast.Subscript():
                yield from self.all(node.slice, node.value)
            case ast.Assign():
                yield from self.assignment(node)
            case ast.For():
                yield from self.loop(node)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                yield from self.comprehension(node)
            case ast.Compare():
                yield from self.all(*ast.iter_child_nodes(node))
                yield "choice"
            case ast.Attribute():
                yield from self.read(node.value)
                yield from self.attribute(node.attr)
            case ast.Name():
                yield from self.name(node.id)
            case _:
                yield from self.all(*ast.iter_child_nodes(node))

    def all(self, *nodes: ast.AST) -> Iterator[_Use]:
        for node in nodes:
            yield from self.read(node)

    def assignment(self, node: ast.Assign) -> Iterator[_Use]:
        uses = list(self.all(node.value, *node.targets))
        if "experts" in uses and isinstance(node.value, ast.Attribute | ast.Subscript):
            self.names.update(_names(node.targets))
        yield from uses

    def loop(self, node: ast.For) -> Iterator[_Use]:
        yield from self.iteration(node.target, node.iter)
        uses = list(self.all(*node.body, *node.orelse))
        yield from uses
        if "experts" in uses and any(_compares(statement, _names([node.target])) for statement in node.body):
            yield "numbered"

    def iteration(self, target: ast.AST, iterated: ast.AST) -> Iterator[_Use]:
        """A loop over experts gives each of them a name, and only who uses that runs one."""
        uses = list(self.read(iterated))
        if "experts" in uses:
            self.names.update(_names([target]))
        yield from (use for use in uses if use != "experts")

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> Iterator[_Use]:
        for generator in node.generators:
            yield from self.iteration(generator.target, generator.iter)
            yield from self.all(*generator.ifs)
        yield from self.all(*((node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)))

    def name(self, name: str) -> Iterator[_Use]:
        if name in self.names or name in _ANY_CHILD:
            yield "experts"
        elif name in _CHOICES:
            yield "choice"
        elif self.within is not None:
            cells = dict(zip(self.within.__code__.co_freevars, self.within.__closure__ or (), strict=False))
            known = self.within.__globals__
            yield from self.function(_content(cells[name]) if name in cells else known.get(name))

    def attribute(self, name: str) -> Iterator[_Use]:
        if name in self.router:
            yield "router"
        if name in self.experts or name in _ANY_CHILD:
            yield "experts"
        if name in _CHOICES:
            yield "choice"
        child = self.owner._modules.get(name)
        if child is not None:
            # Of a child only what it chooses: its own attributes are others.
            uses = replace(self, owner=child, router=frozenset(), experts=frozenset()).function(forward_of(child))
            yield from (use for use in uses if use == "choice")
            return
        for base in type(self.owner).__mro__:
            method = _plain(base.__dict__.get(name))
            if isinstance(method, types.FunctionType) and method.__code__ not in self.seen:
                yield from self.function(method)
                return


@functools.lru_cache(256)
def _tree(code: types.CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The source of a function; None where Python does not have it, or for a lambda."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = parsed.body[0] if parsed.body else None
    return first if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _compares(node: ast.AST, names: set[str]) -> bool:
    """Whether some value is whether one of some variables is equal to something."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
        return any(isinstance(side, ast.Name) and side.id in names for side in (node.left, *node.comparators))
    tests = (node.test,) if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert) else ()
    return any(_compares(child, names) for child in ast.iter_child_nodes(node) if child not in tests)


def _names(targets: Iterable[ast.AST]) -> set[str]:
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _plain(function: object) -> object:
    """The function behind wrappers and descriptors."""
    if isinstance(function, property):
        function = function.fget
    if isinstance(function, staticmethod | classmethod | types.MethodType):
        function = function.__func__
    return inspect.unwrap(function) if callable(function) and hasattr(function, "__wrapped__") else function


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


__all__ = ["forward_of", "router_decides"]
