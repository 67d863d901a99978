"""Training steps of a model whose experts are spread, with another library's data parallelism around the rest."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moefuse
from moefuse import Options
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, scenes

STEPS = 2


def trained(rank: int, kind: type[nn.Module], around: str, settings: dict[str, Any]) -> tuple[float, float, int]:
    """(largest difference of outputs from one process, of gradients of the rest, layers fused); ranks have other numbers of tokens."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(kind, 6)
    model = copy.deepcopy(single)
    mesh = scenes.mesh()
    plan = moefuse.parallelize(model, mesh)
    if around == "fsdp":
        for block in (model.first, model.second, model):
            fully_shard(block, mesh=mesh, ignored_params=plan.parameters)
    seen = Seen()
    wrapped = DistributedDataParallel(model) if around == "ddp" else model
    run = torch.compile(wrapped, backend=capturing(seen, Options(), "aot_eager"))
    groups = plan.param_groups(model)
    optimizers = [torch.optim.AdamW(params, lr=1e-2, **settings) for params in (groups, single.parameters())]
    generator = torch.Generator().manual_seed(3)
    outs, grads = 0.0, 0.0
    for _ in range(STEPS):
        every = [torch.randn(5 + 2 * r, layers.H, generator=generator) for r in range(2)]
        out = run(every[rank])
        out.square().mean().backward()
        wanted = [single(x) for x in every]
        sum((w.square().mean() for w in wanted), torch.zeros(())).div(len(every)).backward()
        outs = max(outs, (out - wanted[rank]).abs().max().item())
        theirs = dict(single.named_parameters())
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            if name in theirs:
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                grads = max(grads, (grad - theirs[name].grad).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return outs, grads, len(seen.report.fused)
