"""Training steps of a model whose experts are spread, with another library's data parallelism around the rest."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moefuse
from moefuse import Options
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, scenes

E, STEPS = 2, 2


def trained(rank: int, kind: type[nn.Module], around: str, settings: dict[str, Any]) -> tuple[float, float, int]:
    """(largest difference of outputs from one process, of gradients of the rest, layers fused); ranks have other numbers of tokens."""
    single = layers.Model(kind, E)
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


def ddp(rank: int, kind: type[nn.Module], form: str, settings: Mapping[str, Any], one_graph: bool, waits: bool) -> tuple[float, float, int]:
    """As :func:`trained`, but with all gradients; ``form``: what is compiled and what is wrapped. Two micro-batches of other sizes.

    Args:
        one_graph: Dynamo cuts graphs at DDP's buckets, or not.
        waits: the first micro-batch does not reduce.
    """
    single = layers.Model(kind, E)
    model: Any = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh())
    seen = Seen()
    run, wrapper = _wrapped(model, form, settings, capturing(seen, Options(), "aot_eager"))
    generator = torch.Generator().manual_seed(3)
    outs = 0.0
    with torch._dynamo.config.patch(optimize_ddp=not one_graph):
        for micro in range(2):
            every = [torch.randn(4 + 2 * r + micro, layers.H, generator=generator) for r in range(2)]
            with wrapper.no_sync() if waits and not micro else contextlib.nullcontext():
                out = run(every[rank])
                out.square().mean().backward()
            wanted = [single(x) for x in every]
            sum((w.square().mean() for w in wanted), torch.zeros(())).div(len(every)).backward()
            outs = max(outs, (out - wanted[rank]).abs().max().item())
    theirs = dict(single.named_parameters())
    off = []
    for path, parameter in model.named_parameters():
        name = path.replace("module.", "").replace("_orig_mod.", "")
        grad: Any = parameter.grad
        if name in theirs:
            off.append((grad.full_tensor() if isinstance(grad, DTensor) else grad) - theirs[name].grad)
        else:
            holder, _, leaf = name.rpartition(".stacked_")
            whole = torch.stack([theirs[f"{holder}.{e}.{leaf.replace('_', '.')}"].grad for e in range(E)])  # type: ignore[misc]
            off.append(grad.full_tensor() - whole)
    return outs, max(o.abs().max().item() for o in off), len(seen.report.fused)


def _wrapped(model: Any, form: str, settings: Mapping[str, Any], backend: Any) -> tuple[Any, Any]:
    """(what is called, the wrapper)."""
    if form == "compiled around DDP":
        wrapper = DistributedDataParallel(model, **settings)
        return torch.compile(wrapper, backend=backend), wrapper
    if form == "DDP around compiled":
        wrapper = DistributedDataParallel(torch.compile(model, backend=backend), **settings)
        return wrapper, wrapper
    if form == "parts":
        model.first, model.norm, model.second = (DistributedDataParallel(m, **settings) for m in (model.first, model.norm, model.second))
        return torch.compile(model, backend=backend), model.first
    model.first = torch.compile(model.first, backend=backend)
    model.second.compile(backend=backend)
    wrapper = DistributedDataParallel(model, **settings)
    return wrapper, wrapper


def ddp_of_a_mesh(rank: int) -> str:
    """What is said where DDP takes DTensors apart."""
    model = layers.Model(layers.Stacked, E)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    moefuse.parallelize(model, mesh["ep"])
    try:
        DistributedDataParallel(model, device_mesh=mesh["dp"])
    except moefuse.ParallelError as error:
        return str(error)
    return "nothing"
