"""Transfer rules: from the facts of an operation's inputs to the fact of its result. One small file per family.

A rule is a function ``(ctx, node, *args, **kwargs) -> Finding`` with the operation's own arguments, registered under the
canonical names it serves (see passes/graph/calls.py). None means "says nothing about routing"; Lost carries the reason. An argument that a
rule does not name has its default, or the operation has no rule (see passes/match/arguments.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from moefuse.passes.ir.facts import Finding

Rule = Callable[..., Finding]
_R = TypeVar("_R", bound=Rule)

RULES: dict[str, Rule] = {}

SHOWN: dict[Rule, frozenset[str]] = {}
"""Of rules: arguments that the recorded result shows (its shape, dtype, device), or that change nothing of what the rule says."""

EVERYTHING = "*"
"""Among those: all but the first argument."""

_FAMILIES = (
    "routing.masks",
    "routing.nonempty",
    "routing.offsets",
    "routing.counts",
    "routing.slot_masks",
    "routing.tables",
    "routing.valid_slots",
    "routing.sort",
    "rows.views",
    "rows.index",
    "rows.boolean_mask",
    "rows.advanced_index",
    "rows.getitem",
    "rows.contraction",
    "rows.foreign",
    "rows.foreign_flat",
    "rows.pointwise",
    "rows.conditions",
    "rows.reductions",
    "sums.add",
    "sums.chosen",
    "sums.assign",
    "sums.scatter",
    "sums.reduce",
    "sums.called",
)


ANY = "*::"
"""In front of a name: that of an operator of a library, in whatever namespace it is registered."""


def rule_of(name: str) -> Rule | None:
    """The rule of an operation by its canonical name."""
    space, _, last = name.rpartition("::")
    return RULES.get(name) or (RULES.get(ANY + last) if space else None)


def rule(*names: str, shown: tuple[str, ...] = ()) -> Callable[[_R], _R]:
    """Register a rule under canonical operation names; a name has one rule. ``shown``: what it need not read (:data:`SHOWN`)."""

    def register(function: _R) -> _R:
        SHOWN[function] = frozenset(shown)
        for name in names:
            if name in RULES:
                raise ValueError(f"operation {name!r} has two rules: {RULES[name].__module__} and {function.__module__}")
            RULES[name] = function
        return function

    return register


for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
