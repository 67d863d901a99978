"""Routers: from hidden states to logits, weights and expert ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.program import Program

IDS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "chosen": lambda ids, w, e: ids,
    "minus_one": lambda ids, w, e: ids - 1,
    "minus_all": lambda ids, w, e: ids - e,
    "twice": lambda ids, w, e: ids * 2 - 1,
    "table": lambda ids, w, e: torch.tensor([-1, *range(e, 1, -1)])[ids],
    "dropped": lambda ids, w, e: ids.masked_fill(w < 0.3, -1),
    "sentinel": lambda ids, w, e: ids.masked_fill(w < 0.3, e),
    "where": lambda ids, w, e: torch.where(w < 0.3, ids - e, ids),
    "remainder": lambda ids, w, e: (ids + 3).remainder(e),
    "modulo": lambda ids, w, e: (ids * 3 - 1) % e,
    "clamped": lambda ids, w, e: (ids * 2 - 1).clamp(0, e - 1),
    "bool": lambda ids, w, e: ids.bool().long(),
    "uint8": lambda ids, w, e: (ids - 1).to(torch.uint8).long(),
    "int8": lambda ids, w, e: (ids - 1).to(torch.int8).long(),
    "int32": lambda ids, w, e: (ids - 1).int(),
    "half": lambda ids, w, e: (ids - 1).half().long(),
    "bfloat16": lambda ids, w, e: (ids + 255).bfloat16().long() - 255,
}
"""What a router makes of the ids that it chose (with their weights, of so many experts): some of no expert, some twice."""


class Routed(NamedTuple):
    """What a router hands over; ``dense`` is [T, E] when the router itself spreads the weights."""

    logits: Tensor
    weights: Tensor
    ids: Tensor
    dense: Tensor | None = None


class Router(nn.Module):
    """All routing recipes; the recipe is fixed when the module is built."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.recipe, self.top_k, self.options, self.num_experts = p.routing.recipe, p.top_k, p.routing, p.experts
        self.gate = nn.Linear(p.hidden, p.experts, bias=p.routing.router_bias)
        nn.init.normal_(self.gate.weight, std=2.0 / p.hidden**0.5)
        if self.recipe == "sigmoid_bias":
            self.register_buffer("correction", torch.randn(p.experts) * 0.2)
        if self.recipe == "noisy":
            self.noise_gate = nn.Linear(p.hidden, p.experts, bias=False)
            self.register_buffer("noise", torch.randn(p.experts))

    def probabilities(self, logits: Tensor) -> Tensor:
        if self.options.upcast:
            return F.softmax(logits, dim=-1, dtype=torch.float32)
        return logits.softmax(-1)

    def renormalise(self, weights: Tensor) -> Tensor:
        """Bring the chosen weights to sum one, as written in several libraries."""
        match self.options.renorm:
            case "div":
                weights = weights / weights.sum(dim=-1, keepdim=True)
            case "idiv":
                weights = weights.clone()
                weights /= weights.sum(dim=-1, keepdim=True)
            case "eps":
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-9)
            case "clamp":
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        return weights if self.options.scale == 1.0 else weights * self.options.scale

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        k = self.top_k
        match self.recipe:
            case "softmax_topk" | "noisy":
                return torch.topk(self.probabilities(logits), k, dim=-1)
            case "topk_softmax":
                top, ids = logits.topk(k=k, dim=-1)
                return F.softmax(top, dim=1), ids
            case "topk_sigmoid":
                top, ids = torch.topk(logits, k)
                return torch.sigmoid(top), ids
            case "sigmoid_bias":
                scores = logits.sigmoid()
                _, ids = torch.topk(scores + self.correction, k=k, dim=-1, sorted=False)
                return scores.gather(1, ids), ids
            case "argmax":
                probs = self.probabilities(logits)
                ids = probs.argmax(dim=-1, keepdim=True)
                return probs.gather(-1, ids), ids
            case "max":
                top = self.probabilities(logits).max(dim=-1, keepdim=True)
                return top.values, top.indices
            case "sort_slice":
                top, order = torch.sort(self.probabilities(logits), dim=-1, descending=True)
                return top[:, :k], order[:, :k]
        raise AssertionError(self.recipe)

    def forward(self, x: Tensor) -> Routed:
        logits = self.gate(x)
        if self.recipe == "noisy":
            logits = logits + self.noise * F.softplus(self.noise_gate(x))
        if self.recipe.startswith("neg_inf"):
            top, ids = torch.topk(logits, self.top_k, dim=1)
            spread = torch.full_like(logits, float("-inf")).scatter_(1, ids, top)
            dense = F.softmax(spread, dim=-1) if self.recipe == "neg_inf_softmax" else torch.sigmoid(spread.float()).to(x.dtype)
            return Routed(logits, dense.gather(1, ids), ids, dense)
        weights, ids = self.choose(logits)
        weights = self.renormalise(weights)
        ids = IDS[self.options.ids](ids, weights.detach(), self.num_experts)
        if self.options.flat:
            weights, ids = weights.squeeze(-1), ids.squeeze(-1)
        return Routed(logits, weights, ids)
