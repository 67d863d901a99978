"""A guard on which modules a frame is called with, where the user treats some of a class otherwise than others.

Dynamo uses the code of one layer for all that its guards accept, and the name of a layer is no guard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import nn

from moefuse.capture.dynamo import guards


def watch(output: Any, of: Callable[[nn.Module], Hashable]) -> None:
    """Add the guard to a frame: ``of`` says the same of the modules that it is called with as of those that it was traced with."""
    check = Check(output.root_tx.f_locals, of)
    if check.expected:
        guards.ask(output, check, "a module that options['exclude'] says the same of")


class Check:
    """Whether a frame's modules are ones of which ``of`` says the same. Called with each call of the frame: what is said is kept."""

    def __init__(self, f_locals: Mapping[str, Any], of: Callable[[nn.Module], Hashable]) -> None:
        self.of = of
        self.known: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()
        self.expected = {name: self._said(value) for name, value in f_locals.items() if isinstance(value, nn.Module)}

    def __call__(self, f_locals: Mapping[str, Any]) -> bool:
        """The guard. Never raises: what cannot be looked at is another."""
        try:
            return all(self._said(f_locals[name]) == said for name, said in self.expected.items())
        except Exception:
            return False

    def _said(self, module: nn.Module) -> Hashable:
        if module not in self.known:
            self.known[module] = self.of(module)
        return self.known[module]
