"""A guard on what happens around calls of modules: hooks, and the methods of their classes.

Dynamo guards neither: a hook that is put on a module after the compilation goes unnoticed. Where capture made a frame one graph the calls
would run in eager, which sees both; and a layer that is compiled by itself is given hooks by the model around it. Both have this guard.

Nearly always it costs a comparison: every hook that is registered takes the next number of ``RemovableHandle``. Only when that has moved
on the modules are looked at.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from moefuse.capture.dynamo import guards

_GLOBAL = tuple(hooks for name, hooks in vars(global_hooks).items() if name.startswith("_global_") and name.endswith("_hooks"))
_ROOT = re.compile(r"[LG]\['\w+'\]")


def watch(output: Any, traced: Collection[types.CodeType]) -> None:
    """Add the guard to a frame, for all modules that Dynamo took to have no hooks; ``traced``: the code that it has seen."""
    from torch._dynamo.guards import GuardBuilder

    root = output.root_tx
    empty: dict[str, set[str]] = {}
    for source in [g.originating_source for g in output.guards.inner if g.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT]:
        empty.setdefault(source_name(source.base), set()).add(source.member)
    empty = {name: hooks for name, hooks in empty.items() if module_of(name, root.f_locals, root.f_globals) is not None}
    if empty:
        check = Check(empty, root.f_locals, root.f_globals, traced)
        guards.ask(output, check, "no hook on a module, and no other method of its class")


def source_name(source: Any) -> str:
    """The expression that Dynamo has a value from."""
    return str(source.name() if callable(source.name) else source.name)


def module_of(name: str, f_locals: Mapping[str, Any], f_globals: dict[str, Any]) -> nn.Module | None:
    """The module behind a name that is one of Python's and begins with a variable; None for any other."""
    try:
        value = eval(name, {"L": f_locals, "G": f_globals}) if _ROOT.match(name) else None
    except Exception:
        return None
    return value if isinstance(value, nn.Module) else None


def _methods(kinds: set[type], traced: Collection[types.CodeType]) -> list[tuple[type, str, Any]]:
    """What the classes have with code that was traced, of their own or from above: class, name, and function or property."""
    found = [(kind, name, getattr(kind, name, None)) for kind in kinds for name in dict.fromkeys(n for b in kind.__mro__ for n in vars(b))]
    return [(kind, name, value) for kind, name, value in found if _code(value) in traced]


def _code(value: Any) -> types.CodeType | None:
    """The code of a function or of a property; a classmethod, which is another object each time, has none."""
    function = value.fget if isinstance(value, property) else value
    return function.__code__ if isinstance(function, types.FunctionType) else None


class Check:
    """Whether the modules behind some names are called as they were when the frame was traced.

    Args:
        empty: the modules, as expressions in the frame's locals ``L`` and globals ``G``, and the names of their hooks that are empty.
        f_locals: the frame's own, when it was traced.
        f_globals: its module's.
        traced: the code of the methods that matter.
    """

    def __init__(
        self, empty: Mapping[str, set[str]], f_locals: Mapping[str, Any], f_globals: dict[str, Any], traced: Collection[types.CodeType]
    ) -> None:
        self.f_globals = f_globals
        self.empty = tuple(empty.values())
        self.modules = eval(f"lambda L, G: ({', '.join(empty)},)")
        roots = {found.group() for name in empty if (found := _ROOT.match(name)) is not None}
        self.roots = eval(f"lambda L, G: ({', '.join(sorted(roots))},)")
        self.unused = [hooks for hooks in _GLOBAL if not hooks]
        own = [v for v in f_locals.values() if isinstance(v, nn.Module)]
        self.methods = _methods({type(m) for m in (*own, *self.modules(f_locals, f_globals))}, traced)
        self.known: dict[tuple[int, ...], _Seen] = {}

    def __call__(self, f_locals: Mapping[str, Any]) -> bool:
        """The guard. Never raises: what cannot be looked at is not as it was."""
        try:
            if any(getattr(kind, name) is not method for kind, name, method in self.methods):
                return False
            roots = self.roots(f_locals, self.f_globals)
            key = tuple(map(id, roots))
            seen = self.known.get(key)
            if seen is None or seen.gone():
                seen = self.known[key] = _Seen(roots, self._hooks(f_locals))
            if not seen.refs:
                self.known.clear()  # a list of modules, perhaps: it may hold others the next time
            return seen.no_hooks()
        except Exception:
            return False

    def _hooks(self, f_locals: Mapping[str, Any]) -> list[Any]:
        self.known = {key: seen for key, seen in self.known.items() if not seen.gone()}
        modules = self.modules(f_locals, self.f_globals)
        return self.unused + [vars(module)[name] for module, names in zip(modules, self.empty, strict=True) for name in names]


class _Seen:
    """The hooks of the modules below some objects that a frame was called with. ``refs``: empty if one of these cannot be watched."""

    def __init__(self, roots: tuple[Any, ...], hooks: list[Any]) -> None:
        self.hooks, self.number = hooks, -1
        try:
            self.refs = [weakref.ref(root) for root in roots]
        except TypeError:
            self.refs = []

    def gone(self) -> bool:
        """Whether one of the objects is gone, so that its id may be another's."""
        return any(ref() is None for ref in self.refs)

    def no_hooks(self) -> bool:
        if self.number != RemovableHandle.next_id:
            if any(self.hooks):
                return False
            self.number = RemovableHandle.next_id
        return True
