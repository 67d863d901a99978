"""Routing replay where experts are spread: each rank gives the ids of its own tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd

import moefuse
from moefuse import _torch_private
from tests.dist import equal, layers, scenes

E = 3


def trained(rank: int, kind: type[torch.nn.Module], how: dict[str, Any]) -> tuple[float, float, bool]:
    """(largest differences of outputs and of experts' gradients from one process, whether the given ids were taken)."""
    single = layers.Model(kind, E)
    model = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh(), **how)
    same = how.get("tokens") == "replicated"
    every = [_case(4 if same else 4 + 3 * r, 0 if same else r) for r in range(2)]
    with mock.patch.object(_torch_private, "compile_fx", _as_it_is):
        mine, routing = _step(model, *every[rank])
    theirs = [_in_eager(single, *case) for case in ([every[0]] if same else every)]
    if not same:
        for parameter in single.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2  # the mean over ranks, as experts have it
    wanted = dict(single.named_parameters())
    worst = 0.0
    for name, grad in [(n, p.grad) for n, p in model.named_parameters() if isinstance(p, torch.distributed.tensor.DTensor)]:
        for full_name, whole in equal.full(model, name, grad):
            goal: Any = wanted[full_name].grad
            worst = max(worst, float((whole - goal).abs().max() / goal.abs().max()))
    out = float((mine - theirs[0 if same else rank]).abs().max())
    return out, worst, all(torch.equal(ids, every[rank][1][at]) for at, (ids,) in enumerate(routing.values()))


def _case(tokens: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.stack([torch.randperm(E, generator=generator)[: layers.K] for _ in range(tokens)]) for _ in range(2)]
    return torch.randn(tokens, layers.H, generator=generator), ids


def _in_eager(model: Any, x: torch.Tensor, ids: list[torch.Tensor]) -> torch.Tensor:
    """One process whose routers are told."""
    for layer, given in zip((model.first, model.second), ids, strict=True):
        layer.route = functools.partial(_route, layer, given)
    out: torch.Tensor = model(x)
    out.square().sum().backward()
    return out.detach()


def _route(layer: Any, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = layer.router(x).softmax(-1).gather(1, ids)
    return weights / weights.sum(-1, keepdim=True), ids


def _step(model: torch.nn.Module, x: torch.Tensor, ids: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    run = torch.compile(model, backend="moefuse", options={"expect": 2})
    with moefuse.replay_routing(model, ids), moefuse.capture_routing(model) as routing:
        out = run(x)
    out.square().sum().backward()
    return out.detach(), routing


def _as_it_is(gm: Any, inputs: Any, *_: Any) -> Any:
    return aot_autograd(fw_compiler=lambda graph, _: graph)(gm, inputs)
