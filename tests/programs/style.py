"""Spelling choices that mean the same: products, no-ops, trailing dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs.program import Noise

MULTIPLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "infix": lambda a, b: a * b,
    "commuted": lambda a, b: b * a,
    "method": lambda a, b: a.mul(b),
    "function": lambda a, b: torch.mul(input=b, other=a),
}
NOOP: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "contiguous": lambda t: t.contiguous(),
    "reshape": lambda t: t.reshape(t.shape),
    "to": lambda t: t.to(t.dtype),
    "clone": lambda t: t.clone(),
    "view_as": lambda t: t.contiguous().view_as(t),
    "double_unsqueeze": lambda t: t.unsqueeze(0).squeeze(0),
}
LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "none_index": lambda t: t[..., None],
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "view": lambda t: t.reshape(*t.shape, 1),
    "keyword": lambda t: torch.unsqueeze(t, dim=-1),
}
FLATTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, x.shape[-1]),
    "reshape": lambda x: x.reshape(-1, x.size(-1)),
    "flatten": lambda x: x.flatten(0, -2),
    "moved": lambda x: x.contiguous().view(-1, x.shape[-1]),
}
LAYOUT: dict[str, tuple[int, ...]] = {"features_last": (0, 1, 2), "features_first": (0, 2, 1), "tokens_swapped": (1, 0, 2)}
"""How [*tokens, H] becomes the layer's input, and back again: each is its own inverse."""


class Style:
    """The choices of one program, as functions."""

    def __init__(self, noise: Noise) -> None:
        self.mul = MULTIPLY[noise.mul]
        self.noop = NOOP[noise.noop]
        self.last = LAST[noise.last]
        self.flatten = FLATTEN[noise.flatten if noise.layout == "features_last" or noise.flatten != "view" else "moved"]
        self.layout = LAYOUT[noise.layout]

    def weigh(self, y: Tensor, w: Tensor) -> Tensor:
        """Multiply rows by their routing weight (already with a trailing dimension) and stay in the rows' dtype."""
        out = self.mul(y, w)
        return out if out.dtype == y.dtype else out.to(y.dtype)
