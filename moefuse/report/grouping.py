"""Equal layers as one: what a report says of 48 layers in the same words is one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from moefuse.report.entries import Fused, Skipped

_Item = TypeVar("_Item")


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def grouped_fused(items: Iterable[Fused]) -> list[list[Fused]]:
    """Layers of which the report says the same."""
    return _grouped(items, lambda f: (pattern(f.module), f.location, f.spec, f.domain, f.tier, f.shared, f.parallel))


def grouped_skipped(items: Iterable[Skipped]) -> list[list[Skipped]]:
    """Layers of which the report says the same."""
    return _grouped(items, lambda s: (pattern(s.module), s.location, s.code, s.text))


def pattern(module: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``: equal for the layers of one stack."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def module_names(paths: list[str], root: str = "") -> str:
    """Short for several layers: ``model.layers.*.mlp (48 layers)``, ``mlp x2`` where one name stands for several, ``mlp, mtp.mlp``.

    ``root`` is the class of the module whose path is empty.
    """
    stacks = _grouped(paths, pattern)
    names = [_stack_name(stack, root) for stack in stacks[:3]]
    return ", ".join(names) + (f" and {len(paths) - sum(map(len, stacks[:3]))} more" if len(stacks) > 3 else "")


def _stack_name(paths: list[str], root: str) -> str:
    different = list(dict.fromkeys(paths))
    if len(different) == 1:
        name = different[0] or f"({root or 'no module'})"
        return f"{name} x{len(paths)}" if len(paths) > 1 else name
    parts = zip(*(path.split(".") for path in different), strict=True)
    return f"{'.'.join(part[0] if len(set(part)) == 1 else '*' for part in parts)} ({len(different)} layers)"
