"""Modules that call moefuse's ops themselves, outside of ``torch.compile``: ``experts_implementation="moefuse"`` in eager. For a report."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import nn

_modules: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()


def ran(module: nn.Module, op: str, tokens: torch.Tensor) -> None:
    """A module runs an op of moefuse's on some tokens; nothing where that is traced."""
    if not torch.compiler.is_compiling() and module not in _modules:
        _modules[module] = (op, tokens.device.type)


def texts() -> list[str]:
    """One line for each class, op and device."""
    found = Counter((type(module).__qualname__, *how) for module, how in list(_modules.items()))
    return [
        f'{name} ({number} modules) runs moefuse::{op} on {device}, outside of torch.compile (experts_implementation="moefuse")'
        if number > 1
        else f'{name} runs moefuse::{op} on {device}, outside of torch.compile (experts_implementation="moefuse")'
        for (name, op, device), number in found.items()
    ]


__all__ = ["ran", "texts"]
