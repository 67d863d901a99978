"""What may be the reason that a frame is left, and may end: hooks on modules, and which modules others hold.

It is compared in each call of a frame that is left, which runs in eager: that costs a small part of what calling those modules does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

MOST = 8192
"""Modules that are looked at; of a larger model the rest is taken to stay as it is."""


class State:
    """Which submodules and how many hooks some modules and all below them have. Holds on to none of them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found: dict[int, nn.Module] = {}
        for root in modules:
            for module in root.modules():
                found.setdefault(id(module), module)
                if len(found) >= MOST:
                    break
        self._inner = [(weakref.ref(m), tuple(map(id, m._modules.values()))) for m in found.values() if m._modules]
        self._hooked = [(weakref.ref(m), hooks) for m in found.values() if any(hooks := _hooks(m))]

    @property
    def hooked(self) -> bool:
        """Whether there are hooks."""
        return bool(self._hooked)

    def holds(self) -> bool:
        """Whether they are still so. Hooks that came since are no reason to look again."""
        for ref, inner in self._inner:
            module = ref()
            if module is None or tuple(map(id, module._modules.values())) != inner:
                return False
        return all((module := ref()) is not None and _hooks(module) == hooks for ref, hooks in self._hooked)


def _hooks(module: nn.Module) -> tuple[int, ...]:
    return (
        len(module._forward_hooks),
        len(module._forward_pre_hooks),
        len(module._backward_hooks),
        len(module._backward_pre_hooks),
    )


__all__ = ["State"]
