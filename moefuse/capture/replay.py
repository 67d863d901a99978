"""A chain of operations on a row's number, run again for another row."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


def replay(node: Node, row: Node, value: torch.Tensor) -> Any:
    """What a chain of operations on a row gives for another row.

    Raises:
        ValueError: it does not start from the row and constants alone.
    """
    if node is row:
        return value
    if node.op not in ("call_function", "call_method") or (not node.all_input_nodes and node.target is not torch.tensor):
        raise ValueError(f"{node.name} is not computed from the row")
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: replay(n, row, value))
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)
