"""What in a model is built like a mixture of experts: equal modules, or stacked weights, with a weight beside them that scores as many.

Structure alone says so, no name and no configuration. It is asked only where nothing was fused and nothing was refused, to tell the user
that something was expected there; it never decides what is rewritten.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NEAR = 2
"""How many modules a router may be below the one that holds the experts."""


@dataclass(frozen=True)
class Suspect:
    """One module that holds something like experts.

    Attributes:
        name: its path from the root module, empty for the root itself.
        module: the module whose forward would run them.
        what: for the report, e.g. ``8 equal modules (Expert) beside a weight [8, 64]``.
    """

    name: str
    module: nn.Module
    what: str

    @property
    def place(self) -> tuple[str, range]:
        """The file and the lines of the forward function; an empty file where Python knows none."""
        function = inspect.unwrap(type(self.module).forward)
        code = getattr(function, "__code__", None)
        if code is None:
            return "", range(0)
        lines = [line for _, _, line in code.co_lines() if line is not None]
        return code.co_filename, range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)


def suspects(roots: Iterable[object]) -> list[Suspect]:
    """The innermost modules that look like a mixture of experts, of all modules that are or belong to ``roots``."""
    found: dict[int, Suspect] = {}
    for root in _modules(roots):
        for name, module in root.named_modules():
            what = _experts(module)
            if what is not None:
                found.setdefault(id(module), Suspect(name, module, what))
    return [s for s in found.values() if not any(id(m) in found for m in s.module.modules() if m is not s.module)]


def _modules(roots: Iterable[object]) -> Iterator[nn.Module]:
    """The modules among some objects, and those that functions among them reach by name."""
    for root in roots:
        if isinstance(root, nn.Module):
            yield root
        elif isinstance(root, types.MethodType):
            yield from _modules([root.__self__])
        elif isinstance(root, types.FunctionType):
            names = (root.__globals__.get(name) for name in root.__code__.co_names)
            cells = (_content(cell) for cell in root.__closure__ or ())
            yield from (value for value in (*names, *cells) if isinstance(value, nn.Module))


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _experts(module: nn.Module) -> str | None:
    """What in a module looks like experts; None if nothing does."""
    for holder in (module, *module.children()):
        for what, count, own in (*_equal_modules(holder), *_stacked(holder)):
            router = _router(module, count, own)
            if router is not None:
                return f"{what} beside a weight {list(router.shape)}"
    return None


def _equal_modules(holder: nn.Module) -> Iterator[tuple[str, int, set[int]]]:
    """(what, how many, which modules) of lists of modules that hold equal weights."""
    items = list(holder.children())
    if len(items) < 2 or not isinstance(holder, nn.ModuleList | nn.ModuleDict):
        return
    forms = {(type(m), tuple((n, tuple(p.shape)) for n, p in m.named_parameters())) for m in items}
    if len(forms) == 1 and any(p.dim() >= 2 for p in items[0].parameters()):
        yield f"{len(items)} equal modules ({type(items[0]).__name__})", len(items), {id(m) for item in items for m in item.modules()}


def _stacked(holder: nn.Module) -> Iterator[tuple[str, int, set[int]]]:
    """As :func:`_equal_modules`, of weights [E, ..., ...] that a module of the user's own holds."""
    if type(holder).__module__.startswith("torch.nn."):
        return
    own = [t for t in (*holder.parameters(recurse=False), *holder.buffers(recurse=False)) if t.dim() >= 3 and t.shape[0] > 1]
    for stack in own[:1]:
        yield f"weights {list(stack.shape)}", int(stack.shape[0]), set()


def _router(module: nn.Module, count: int, experts: set[int], depth: int = _NEAR) -> torch.Tensor | None:
    """A weight [count, ...] in a module or near below it, which is none of the experts'."""
    for weight in module.parameters(recurse=False):
        if weight.dim() >= 2 and weight.shape[0] == count and all(n == 1 for n in weight.shape[2:]):
            return weight
    for child in module.children() if depth else ():
        if id(child) not in experts:
            found = _router(child, count, experts, depth - 1)
            if found is not None:
                return found
    return None


__all__ = ["Suspect", "suspects"]
