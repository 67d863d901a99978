"""What people do with a model between and around training steps, beside one process that does the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, scenes

E = 2
TOKENS = (5, 7)


def frozen(rank: int, kind: type[nn.Module], names: str, before: bool) -> tuple[float, int]:
    """Parameters whose name has one of some words want no gradients; (largest error, layers fused)."""
    single = layers.Model(kind, E)
    if before:
        _freeze(single, names)
    model = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh())
    _freeze(single, names)
    if not before:
        _freeze(model, names)
    seen = Seen()
    off = [_step(torch.compile(model, backend=capturing(seen, behind="aot_eager")), single, rank), *_gradients(model, single)]
    return max(off), len(seen.report.fused)


def _freeze(model: nn.Module, names: str) -> None:
    for name, parameter in model.named_parameters():
        if any(word in name for word in names.split()):
            parameter.requires_grad_(False)


def evaluated(rank: int) -> float:
    """Without gradients between two training steps that accumulate, no tokens on one rank; beside another model on the same mesh."""
    model, single = scenes.both(layers.Stacked, E)
    other, alone = scenes.both(layers.Transposed, E)
    run, beside = scenes.compiled(model, "eager"), scenes.compiled(other, "eager")
    off = [_step(run, single, rank)]
    with torch.no_grad():
        off.append(_step(run, single, rank, (4, 0)))
    off.append(_step(beside, alone, rank))
    off.append(_step(run, single, rank, (3, 7)))
    return max(*off, *_gradients(model, single), *_gradients(other, alone))


def converted(rank: int, kind: type[nn.Module], late: bool) -> tuple[float, str]:
    """To another dtype behind parallelize, or behind the first compiled call; and what is said where an optimizer has the Parameters."""
    model, single = scenes.both(kind, E)
    run, said = scenes.compiled(model, "eager"), ""
    if late:
        assert _step(run, single, rank) <= 1e-6
        optimizer = torch.optim.SGD(model.parameters())
        try:
            model.double()
        except moefuse.ParallelError as error:
            said = str(error)
        del optimizer
    for m in (model, single):
        m.double()
        m.zero_grad()
    return max(_step(run, single, rank, dtype=torch.float64), *_gradients(model, single)), said


def copied(rank: int, kind: type[nn.Module]) -> float:
    """A deep copy has weights of its own, is fused, gets gradients and takes a state of the whole model."""
    model, single = scenes.both(kind, E)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            _local(parameter).zero_()
    seen = Seen()
    run = torch.compile(other, backend=capturing(seen, behind=scenes.BEHIND))
    off = [_step(run, single, rank), *_gradients(other, single)]
    assert all(p.grad is None for p in model.parameters())
    assert len(seen.report.fused) == 2
    other.load_state_dict(single.state_dict())
    return max(*off, _step(run, single, rank))


def smoothed(rank: int, kind: type[nn.Module]) -> float:
    """The mean of weights over steps, by torch's own class."""
    model, single = scenes.both(kind, E)
    means = [AveragedModel(m) for m in (model, single)]
    for _ in range(3):
        for m, mean in zip((model, single), means, strict=True):
            with torch.no_grad():
                for parameter in m.parameters():
                    _local(parameter).mul_(1.1)
            mean.update_parameters(m)
    with torch.no_grad():
        return _step(scenes.compiled(means[0]), means[1], rank)


def scaled(rank: int, around: str, where: str) -> tuple[list[bool], float]:
    """A gradient that is infinite on one rank: whether (experts, the norm) moved, and the scale afterwards."""
    torch.manual_seed(0)
    model = layers.Model(layers.Stacked, E)
    mesh = scenes.mesh()
    plan = moefuse.parallelize(model, mesh)
    if around == "fsdp":
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh, ignored_params=plan.parameters)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0)]
    else:
        optimizers = [torch.optim.SGD([group], lr=1.0) for group in plan.param_groups(model)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.randn(4, layers.H)).square().mean()).backward()
    if around != "fsdp":
        scenes.average(model)
    held: list[Any] = [model.first._parameters["down"], model.norm.weight]
    if rank == 1 and where == "experts":
        _local(held[0].grad)[0, 0, 0] = float("inf")
    before = [_local(p).clone() for p in held]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return [not torch.equal(a, _local(p)) for a, p in zip(before, held, strict=True)], scaler.get_scale()


def _local(of: Any) -> Tensor:
    return (of.to_local() if isinstance(of, DTensor) else of).detach()


def _step(run: Any, single: nn.Module, rank: int, tokens: tuple[int, ...] = TOKENS, dtype: torch.dtype = torch.float32) -> float:
    """Forward and, where gradients are taken, backward, here and on one process; the error of the output."""
    every = [torch.randn(n, layers.H, generator=torch.Generator().manual_seed(r), dtype=dtype) for r, n in enumerate(tokens)]
    out, wanted = run(every[rank]), [single(x) for x in every]
    if torch.is_grad_enabled():
        out.square().mean().backward()
        sum((w.square().mean() for w in wanted), torch.zeros((), dtype=dtype)).div(len(every)).backward()
    return (out - wanted[rank]).abs().max().item() if len(out) else 0.0


def _gradients(model: nn.Module, single: nn.Module) -> list[float]:
    """Errors; a Parameter without a gradient has none in one process."""
    theirs = dict(single.named_parameters())
    off = []
    for name, parameter in model.named_parameters():
        holder, _, leaf = name.rpartition(".stacked_")
        wanted = [theirs[name]] if name in theirs else [theirs[f"{holder}.{e}.{leaf.replace('_', '.')}"] for e in range(E)]
        if parameter.grad is None:
            assert all(w.grad is None for w in wanted), name
            continue
        grad: Any = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        else:
            grad = grad.clone()
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        whole = torch.stack([w.grad for w in wanted]) if name not in theirs else wanted[0].grad  # type: ignore[misc]
        off.append((grad - whole).abs().max().item())
    return off


def told_of_one(rank: int) -> list[list[str]]:
    """What is said where somebody takes the Parameters of the model, of the list, and of one expert."""
    model, _ = scenes.both(layers.Listed, E)
    experts: Any = model.first.experts
    return [_said(lambda part=part: list(part.parameters())) for part in (model, experts, experts[1])]


def _said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in said]
