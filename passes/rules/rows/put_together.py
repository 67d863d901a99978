"""Stacks of weights as the decomposition of einsum multiplies them, with dimensions put together.

``[E, I, H]`` becomes one matrix ``[1, H, E * I]``, and ``[T, K, I, H]`` becomes ``[T, H, K * I]``.
"""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import Node

from moefuse.passes.graph.sharded import is_parameter
from moefuse.passes.graph.sizes import same
from moefuse.passes.ir.axes import Axis
from moefuse.passes.ir.facts import Finding, Rows, View, Weight

Labels = str


class Apart(NamedTuple):
    """A stack with a label for each of its own dimensions.

    Attributes:
        stack: the fact.
        labels: of its dimensions.
        out: the labels of the product's.
        sizes: theirs.
        parts: for each label of the product as it is written, those in ``out``.
    """

    stack: Any
    labels: Labels
    out: Labels
    sizes: tuple[Any, ...]
    parts: tuple[Labels, ...]

    def together(self, found: Finding) -> Finding:
        """The product's fact, its dimensions as they are written."""
        if not isinstance(found, Rows):
            return found
        axes = dict(zip(self.out, found.axes, strict=True))
        return found.with_axes(tuple(sum((axes[c] for c in part), ()) for part in self.parts))


def apart(stack: Any, labels: Labels, others: Labels, out: Labels, sizes: tuple[Any, ...]) -> Apart | None:
    """A stack of weights taken apart; None if it is none, or none of its dimensions was put together.

    Args:
        stack: one operand of a product of two.
        labels, others: of its dimensions, and of the other operand's.
        out, sizes: labels and sizes of the product's dimensions.
    """
    if not (isinstance(stack, Weight) or (type(stack) is View and _is_weight(stack.root))) or len(labels) != len(stack.axes):
        return None
    spare = iter(sorted(set(string.ascii_letters) - set(labels + others + out)))
    own: list[tuple[str, Axis]] = []
    parts: dict[str, list[tuple[str, Any]]] = {}
    for c, axis in zip(labels, stack.axes, strict=True):
        atoms = tuple(a for a in axis if not same(a.size, 1))
        if len(atoms) > 1 and c in out and c not in others:
            named = [(next(spare), (a,)) for a in atoms]
            own += named
            parts[c] = [(name, axis[0].size) for name, axis in named]
        elif axis or c not in others:
            own.append((c, axis))
    if not parts:
        return None
    shown = [parts.get(c, [(c, size)]) for c, size in zip(out, sizes, strict=True)]
    return Apart(
        replace(stack, axes=tuple(axis for _, axis in own)),
        "".join(c for c, _ in own),
        "".join(c for part in shown for c, _ in part),
        tuple(size for part in shown for _, size in part),
        tuple("".join(c for c, _ in part) for part in shown),
    )


def _is_weight(root: Node) -> bool:
    return root.op == "get_attr" or is_parameter(root)
