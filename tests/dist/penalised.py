"""Penalties on weights of spread experts, and statistics of them, in the graph of the layers: beside one process, value and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import moefuse
from tests.dist import equal, layers, scenes

Penalty = Callable[[nn.Module, Tensor], Tensor]


def weights(model: nn.Module) -> list[Tensor]:
    """The experts' matrices, by the attributes that have them."""
    found: list[Tensor] = []
    for layer in (model.first, model.second):
        if isinstance(layer, layers.Listed):
            found += [linear.weight for expert in layer.experts for linear in (expert[0], expert[2])]  # type: ignore[index,misc]
        else:
            found += [layer.gate_up, layer.down]  # type: ignore[list-item]
    return found


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """Weight decay as a loss."""
    return sum((w.float().square().sum() for w in weights(model)), torch.zeros(()))


def norms(model: nn.Module, x: Tensor) -> Tensor:
    """One norm of all, as it is clipped by."""
    return torch.stack([torch.linalg.vector_norm(w) for w in weights(model)]).norm()


def rows(model: nn.Module, x: Tensor) -> Tensor:
    """Columns of equal norm, step by step, and the largest element."""
    return sum((w.pow(2).sum(-1).sqrt().var() + w.abs().amax() for w in weights(model)), torch.zeros(()))


def apart(model: nn.Module, x: Tensor) -> Tensor:
    """Products of weights with weights."""
    every = weights(model)
    return sum((a.flatten() @ b.flatten() for a, b in zip(every[:2], every[:2], strict=True)), torch.zeros(())).tanh()


def anchored(model: nn.Module, x: Tensor) -> Tensor:
    """How far they are from a buffer."""
    return sum(((w - model.norm.anchor) ** 2).mean() for w in weights(model) if w.shape[-1] == layers.H)  # type: ignore[return-value,operator,misc]


def loaded(model: nn.Module, x: Tensor) -> Tensor:
    """A norm of each expert, as often as tokens choose it."""
    share = model.first.router(x).softmax(-1).mean(0)  # type: ignore[operator,union-attr]
    every = weights(model)[: 2 * scenes.E] if isinstance(model.first, layers.Listed) else [*weights(model)[0]]
    each = torch.stack([w.square().sum() for w in every]).view(scenes.E, -1).sum(-1)
    return (share * each).sum()


def logged(model: nn.Module, x: Tensor) -> Tensor:
    """Weights and what is seen of them leave the graph: nothing of a layer."""
    model.seen = [w.detach() * 0.99 for w in weights(model)] + [w.detach().mean() for w in weights(model)]  # type: ignore[assignment]
    return torch.zeros(())


PENALTIES = {p.__name__: p for p in (squares, norms, rows, apart, anchored, loaded, logged)}


@dataclass(frozen=True)
class Case:
    """``how``: arguments of ``parallelize``; ``tokens`` of each rank."""

    kind: type[nn.Module]
    penalty: str
    how: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (5, 7)


class Penalised(nn.Module):
    def __init__(self, model: nn.Module, penalty: Penalty) -> None:
        super().__init__()
        self.model, self.penalty = model, penalty

    def forward(self, x: Tensor) -> Tensor:
        return equal._loss(self.model(x)) + self.penalty(self.model, x)


@dataclass(frozen=True)
class Found:
    """``worst``: the largest error of the loss and of gradients; ``layers``: as the report counts them."""

    worst: float
    layers: tuple[int, int]
    skipped: list[str]
    notes: list[str]


def run(rank: int, case: Case) -> Found:
    """One step, strict; with all of Inductor but its code."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(case.kind, scenes.E)
    single.norm.register_buffer("anchor", torch.randn(layers.H))
    model = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh(), **case.how)
    penalty = PENALTIES[case.penalty]
    compiled = torch.compile(Penalised(model, penalty), backend="moefuse", options={"strict": True})
    same = case.how.get("tokens") == "replicated"
    every = [torch.randn(n, layers.H, generator=torch.Generator().manual_seed(0 if same else n)) for n in case.tokens]
    with scenes.codeless():
        loss = compiled(every[rank])
    report = moefuse.last_report()
    losses = [Penalised(single, penalty)(x) for x in _different(every, same)]
    off = (loss - losses[0 if same else rank]).abs().item() / losses[0].abs().item()
    loss.backward()
    total: Any = sum(losses)
    scale = 1.0 if case.how.get("grads") == "sum" else 1 / len(losses)
    (total * scale).backward()
    errors = equal._gradients(model, single, scale, same)
    return Found(max(off, *errors.values()), report.layers, [str(s) for s in report.skipped], report.notes)


def _different(every: list[Tensor], same: bool) -> Iterable[Tensor]:
    return every[:1] if same else every
