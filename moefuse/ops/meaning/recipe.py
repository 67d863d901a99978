"""How a router goes from logits to expert ids and weights: the arguments of ``moefuse::route``, and what they mean."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from moefuse.ops.meaning.reference import topk_reference

SCORES = ("identity", "softmax", "sigmoid")
"""Functions of logits [..., E]; of the chosen [..., K] too."""


@dataclass(frozen=True)
class Recipe:
    """From logits [..., E] to weights and ids [..., K], in this order and in float32.

    Attributes:
        k: K, experts per token.
        score: scores are this function of the logits.
        groups: the experts are in so many groups of neighbours; 0 for none. A bias [E] is added for the choice before that.
        kept: so many groups may be chosen from: those with the greatest sum of their ``best`` greatest.
        best: see ``kept``.
        lowest: experts of other groups count as -inf; False: as 0.
        by_choice: weights are what the choice was made by; False: the scores of the chosen, without bias.
        weight: weights are this function of those.
        renormalise: weights are divided by their sum plus ``eps``, which is at least ``least``.
        eps: see ``renormalise``.
        least: see ``renormalise``.
        scale: the last factor.
    """

    k: int
    score: str = "identity"
    groups: int = 0
    kept: int = 0
    best: int = 0
    lowest: bool = True
    by_choice: bool = True
    weight: str = "identity"
    renormalise: bool = False
    eps: float = 0.0
    least: float = 0.0
    scale: float = 1.0

    @property
    def arguments(self) -> tuple[int | float | str | bool, ...]:
        """In the order of the op's schema."""
        return astuple(self)


def apply(name: str, x: Tensor) -> Tensor:
    """One of :data:`SCORES` of x [..., n], along the last dimension."""
    return x.softmax(-1) if name == "softmax" else x.sigmoid() if name == "sigmoid" else x


def route_reference(logits: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``moefuse::route``: weights [..., K] of ``out_dtype`` and ids, int64 [..., K], by :class:`Recipe`. Ties as in ``moefuse::topk``."""
    scores = apply(recipe.score, logits.float())
    choice = scores if bias is None else scores + bias.float()
    if recipe.groups:
        choice = choice.unflatten(-1, (recipe.groups, -1))
        rank = topk_reference(choice, recipe.best)[0].sum(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, topk_reference(rank, recipe.kept)[1], True)
        choice = choice.masked_fill(~kept.unsqueeze(-1), float("-inf") if recipe.lowest else 0.0).flatten(-2)
    values, ids = topk_reference(choice, recipe.k)
    weights = apply(recipe.weight, values if recipe.by_choice else scores.gather(-1, ids))
    if recipe.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + recipe.eps).clamp(min=recipe.least)
    return (weights * recipe.scale).to(out_dtype), ids


FEW_ROWS, FEW_PRODUCTS = 16, 1 << 24


def few_rows(x: Tensor, w: Tensor) -> bool:
    """Whether x [..., H] times w [E, H] is known to be so little work that a kernel of its own is quicker than a library's.

    Measured on an H200: two to three times at one token; equal at about 2^24 products.
    """
    rows = math.prod(x.shape[:-1])  # torch.Size.numel would make a number of a symbol
    products = rows * w.numel()
    return isinstance(products, int) and 0 < rows <= FEW_ROWS and products <= FEW_PRODUCTS
