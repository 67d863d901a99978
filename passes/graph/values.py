"""What torch recorded for the nodes of a graph: fake tensors, symbolic sizes, nested containers of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node


def fake(node: object) -> Any:
    """The fake value Dynamo (or AOTAutograd) recorded for a node: a tensor, a SymInt, a tuple, or None."""
    if not isinstance(node, Node):
        return None
    value = node.meta.get("example_value")
    return node.meta.get("val") if value is None else value


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it is not a tensor."""
    value = fake(node)
    return value if isinstance(value, torch.Tensor) else None


def is_boolean(node: object) -> bool:
    """Whether a node is a tensor of booleans: a mask, and not numbers."""
    value = tensor(node)
    return value is not None and value.dtype == torch.bool


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of a value, inside of containers too; of a tensor subclass, the tensors that it is made of."""
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
            return
        for name in flatten()[0]:
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
