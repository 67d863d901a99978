"""The modules of a model as strings: what a page draws of it, without holding on to the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Tree:
    """A module. Equal subtrees are one object, so that 48 layers of 128 experts are few.

    Attributes:
        kind: the name of its class.
        children: the modules that it holds, by name.
        size: bytes of its parameters, those of its children included.
    """

    kind: str
    children: tuple[tuple[str, Tree], ...] = ()
    size: int = 0


def tree_of(root: nn.Module) -> Tree:
    """The modules of a model."""
    known: dict[tuple[object, ...], Tree] = {}

    def visit(module: nn.Module) -> Tree:
        children = tuple((name, visit(child)) for name, child in module._modules.items() if child is not None)
        known_sizes = (p for p in module._parameters.values() if p is not None and not nn.parameter.is_lazy(p))
        own = sum(parameter.numel() * parameter.element_size() for parameter in known_sizes)
        key = (type(module), own, *((name, id(child)) for name, child in children))
        if key not in known:
            known[key] = Tree(type(module).__name__, children, own + sum(child.size for _, child in children))
        return known[key]

    return visit(root)
