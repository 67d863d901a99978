"""A model that can be told which experts to take, for routing replay to be compared with; and graphs that run as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import _torch_private
from moefuse.capture.dynamo import armed
from moefuse.replay import calls

H, I, E, K = 8, 12, 5, 2  # noqa: E741  (the letters of moefuse.spec)


class Layer(nn.Module):
    """``forced`` [T, K]: the experts to take; what replay is compared with."""

    def __init__(self, score: str = "softmax", listed: bool = False) -> None:
        super().__init__()
        self.score, self.listed = score, listed
        self.router = nn.Linear(H, E, bias=False)
        self.bias = nn.Parameter(torch.randn(E) * 0.1)
        self.forced: Tensor | None = None
        if listed:
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(E))
        else:
            self.up, self.down = nn.Parameter(torch.randn(E, I, H) * 0.3), nn.Parameter(torch.randn(E, H, I) * 0.3)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        if self.score == "argmax":
            scores = logits.softmax(-1)
            ids = scores.argmax(-1) if self.forced is None else self.forced[:, 0]
            return scores.gather(-1, ids[:, None]), ids[:, None]
        if self.score == "chosen by other scores":
            scores = logits.sigmoid()
            ids = (scores + self.bias).topk(K, dim=-1, sorted=False)[1] if self.forced is None else self.forced
            weights = scores.gather(-1, ids)
            return weights / weights.sum(-1, keepdim=True), ids
        scores = logits.softmax(-1) if self.score == "softmax" else logits
        values, ids = torch.topk(scores, K) if self.forced is None else (scores.gather(-1, self.forced), self.forced)
        return (values / values.sum(-1, keepdim=True) if self.score == "softmax" else values.softmax(-1)), ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        if self.score == "weights beside ids":
            weights = self.router(x).softmax(-1).sort(-1, descending=True)[0][:, :K]
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            y = self.experts[e](x[token]) if self.listed else F.linear(F.silu(F.linear(x[token], self.up[e])), self.down[e])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Model(nn.Module):
    def __init__(self, layers: int = 2, checkpointed: bool | None = None, **how: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**how) for _ in range(layers))
        self.checkpointed = checkpointed
        """use_reentrant; None without a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed))
        return x


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> list[int]:
    """Graphs are traced as Inductor's are, and run as they are. The numbers of inputs of those that were compiled."""
    torch.manual_seed(0)
    made: list[int] = []

    def nothing(gm: Any, inputs: Any, *_: Any) -> Any:
        made.append(len(inputs))
        return aot_autograd(fw_compiler=lambda graph, _: graph)(gm, inputs)

    monkeypatch.setattr(_torch_private, "compile_fx", nothing)
    monkeypatch.setattr(armed, "_asked", [])
    monkeypatch.setattr(calls, "_taken", [])
    return made


def some(tokens: int, layers: int = 2, k: int = K, seed: int = 1) -> list[Tensor]:
    """[T, K] distinct ids for each layer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.stack([torch.randperm(E, generator=generator)[:k] for _ in range(tokens)]) for _ in range(layers)]


def forced(model: Model, ids: list[Tensor]) -> Model:
    """The same weights in a model that takes these experts."""
    other = copy.deepcopy(model)
    for layer, one in zip(other.layers, ids, strict=True):
        layer.forced = one
    return other


def two_steps(model: Model, ids: Any, inputs: Callable[[], Tensor], *, inside: bool) -> Tensor:
    """Gradients of the second of two steps, whose inputs are where those of the first were. ``inside``: backward too is in the block."""
    for _ in range(2):
        model.zero_grad()
        given = inputs()
        with moefuse.replay_routing(model, ids):
            out: Tensor = model(given)
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
    return out
