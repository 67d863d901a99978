"""Gradients of chosen scores beside those of all scores: what Inductor's CPU backend scatters into zeros before they are added.

Inductor forgot that order (``_torch_private.keep_what_is_mutated``) for some sizes and neighbours. Whether a program is one of these is
luck, so the programs here are those that were found.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse import _torch_private

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, K, VOCABULARY, TOKENS = 32, 16, 4, 2, 50, 24  # noqa: E741  (the letters of moefuse.spec)


class Balanced(nn.Module):
    """A layer with a loss for its router, which is returned beside logits of all kinds. ``experts``: a loop over them, or none."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.experts = experts
        self.router, self.head = nn.Linear(H, E), nn.Linear(H, VOCABULARY, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(E, 2 * I, H) * 0.2), nn.Parameter(torch.randn(E, H, I) * 0.2)

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if not self.experts:
            return ((weights[..., None] * F.one_hot(ids, E)).sum(1) @ self.down[:, :, 0]).sin()
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logits = self.router(x)
        values, ids = torch.topk(logits, K, dim=-1)
        y = self.head(self.mixed(x, values.softmax(-1), ids))
        scores = logits.softmax(-1)
        counts = F.one_hot(scores.topk(K, -1)[1], E).float().sum((0, 1))
        balance = (counts * scores.sum(0)).sum()
        return F.cross_entropy(y, labels) + 0.1 * balance, y, balance, logits


def check(model: nn.Module, backend: str) -> None:
    x, labels = torch.randn(TOKENS, H).requires_grad_(), torch.randint(VOCABULARY, (TOKENS,))
    theirs = copy.deepcopy(model)
    theirs(x, labels)[0].backward()
    torch.compile(model, backend=backend)(x, labels)[0].backward()
    for (name, mine), (_, wanted) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-4, atol=1e-5 * float(wanted.grad.abs().max()), msg=name)


def test_a_loss_of_the_router() -> None:
    """The gradient of the router lost what comes through the experts. With ``output_router_logits`` GPT-OSS, Granite and JetMoE did too."""
    torch.manual_seed(0)
    check(Balanced(True), "moefuse")


@pytest.mark.thorough
def test_no_experts() -> None:
    """The same of Inductor alone, once moefuse has been used."""
    torch.manual_seed(0)
    _torch_private.keep_what_is_mutated()
    check(Balanced(False), "inductor")
