"""What tests have each rank do, beside one process or against another rank."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import moefuse
from moefuse import _torch_private
from moefuse.ops import shared
from moefuse.passes.block import shared_experts
from moefuse.runtime import collectives
from tests.cheap import without_code
from tests.cpu.capture_case import Seen, capturing
from tests.dist import faults, layers
from tests.strategies import THOROUGH

E, STEPS = 4, 2
BEHIND = "aot_eager" if THOROUGH else "eager"
"""What runs a graph where AOTAutograd decides nothing: it took half of the time."""


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))["ep"]


def compiled(model: nn.Module, behind: str = BEHIND) -> Any:
    return torch.compile(model, backend=capturing(Seen(), behind=behind))


def both(kind: type[nn.Module], count: int = E, **how: Any) -> tuple[nn.Module, nn.Module]:
    """(spread, on one process)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(kind, count)
    model = copy.deepcopy(single)
    moefuse.parallelize(model, mesh(), **how)
    return model, single


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def training(rank: int, kind: type[nn.Module], experts: int = E) -> tuple[float, float]:
    """(largest relative difference of the norms of gradients, of outputs) over steps with clipping, AdamW and two micro-batches."""
    model, single = both(kind, experts)
    run = compiled(model, "aot_eager")
    # torch's foreach implementation refuses Parameters of two kinds.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, single)]
    generator = torch.Generator().manual_seed(3)
    norms, outs = 0.0, 0.0
    for _ in range(STEPS):
        for _ in range(2):
            every = [torch.randn(3 + r, layers.H, generator=generator) for r in range(dist.get_world_size())]
            out = run(every[rank])
            out.square().mean().backward()
            wanted = [single(x) for x in every]
            sum((w.square().mean() for w in wanted), torch.zeros(())).div(len(every)).backward()
            outs = max(outs, ((out - wanted[rank]).abs().max() / wanted[rank].abs().max()).item())
        average(model)
        mine = moefuse.clip_grad_norm_(model.parameters(), 0.1)
        theirs = clip_grad_norm_(single.parameters(), 0.1)
        norms = max(norms, abs(mine.item() - theirs.item()) / theirs.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return norms, outs


def saved_and_loaded(rank: int, kind: type[nn.Module], folder: str, how: dict[str, Any], other: dict[str, Any]) -> tuple[bool, list[str]]:
    """Save by torch.distributed.checkpoint, load where experts are spread as ``other`` says and forgotten.

    (Whether everything is back, keys that are not the full model's.)
    """
    model, single = both(kind, **how)
    state = model.state_dict()
    keys = sorted(set(state) - set(single.state_dict()))
    dcp.save({"model": state}, checkpoint_id=folder)
    model, _ = both(kind, **other)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
    empty = model.state_dict()
    dcp.load({"model": empty}, checkpoint_id=folder)
    model.load_state_dict(empty)
    wanted = single.state_dict()
    run, x = compiled(model), torch.randn(5, layers.H)
    with torch.no_grad():
        assert (run(x) - single(x)).abs().max() <= 1e-5
    same = all(torch.equal(v.full_tensor() if isinstance(v, DTensor) else v, wanted[k]) for k, v in model.state_dict().items())
    return same, keys


def loaded_whole(rank: int, kind: type[nn.Module], folder: str) -> bool:
    """What was saved from two ranks is a checkpoint of the whole model, for one process."""
    torch.manual_seed(1)
    whole = layers.Model(kind, E)
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    torch.manual_seed(0)
    wanted = layers.Model(kind, E).state_dict()
    return all(torch.equal(v, wanted[k]) for k, v in state["model"].items())


def loaded_from_one_process(rank: int, kind: type[nn.Module], how: dict[str, Any]) -> float:
    """A state of the whole model, as everybody saves it, is loaded on each rank: the largest difference of outputs."""
    model, _ = both(kind, **how)
    torch.manual_seed(9)
    other = layers.Model(kind, E)
    model.load_state_dict(other.state_dict())
    x = torch.randn(4 + rank, layers.H)
    with torch.no_grad():
        return (compiled(model)(x) - other(x)).abs().max().item()


def collectives_of_a_call(rank: int, experts: str) -> list[str]:
    """What two layers with shared experts call, once they are compiled."""
    model, single = both(layers.Shared, 2, tokens="replicated", experts=experts)
    run, x = compiled(model), torch.randn(5, layers.H, generator=torch.Generator().manual_seed(0))
    called: list[str] = []
    with torch.no_grad():
        assert (run(x) - single(x)).abs().max() <= 1e-5
        names = ("all_reduce", "all_gather_into_tensor", "all_gather_single", "all_to_all_single", "reduce_scatter_tensor", "broadcast")
        known = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
        with contextlib.ExitStack() as stack:
            for name, function in known.items():
                stack.enter_context(mock.patch.object(dist, name, _counted(called, name, function)))
            stack.enter_context(mock.patch.object(collectives, "_gather", _counted(called, "all_gather", collectives._gather)))
            run(x)
    return called


def shared_beside(rank: int, how: dict[str, Any], tokens: tuple[int, int], code: bool) -> tuple[float, list[bool], int]:
    """(largest difference from one process, which fused layers have their shared expert beside them, calls of its start).

    ``code``: Inductor's runs.
    """
    model, single = both(layers.Shared, 2, **how)
    run = torch.compile(model, backend="moefuse", dynamic=False, options={"overlap": 1 << 20})
    x, started = torch.randn(tokens[rank], layers.H), mock.Mock(side_effect=shared._run)
    with torch.no_grad(), mock.patch.object(shared_experts, "DEVICES", {"cpu"}), contextlib.nullcontext() if code else codeless():
        run(x)
        with mock.patch.object(shared, "_run", started):
            worst = (run(x) - single(x)).abs().max().item()
    report = moefuse.last_report()
    assert report is not None
    return worst, [fused.shared for fused in report.fused], started.call_count


def as_traced() -> contextlib.AbstractContextManager[Any]:
    """Graphs run as moefuse rewrote them."""
    return mock.patch.object(_torch_private, "compile_fx", lambda gm, *_: lambda *args: gm.forward(*args))


def codeless() -> contextlib.AbstractContextManager[Any]:
    """All of Inductor but its code."""
    return mock.patch.object(_torch_private, "compile_fx", without_code)


def sizes_as_symbols(rank: int, kind: type[nn.Module]) -> tuple[float, int, list[str]]:
    """(largest difference from one process, layers fused, refusals) under FSDP2 with ``dynamic=True``, where numbers are symbols too."""
    single = layers.Model(kind, E)
    model = copy.deepcopy(single)
    plan = moefuse.parallelize(model, mesh())
    fully_shard(model, mesh=mesh(), ignored_params=plan.parameters)
    run, worst = torch.compile(model, backend="moefuse", dynamic=True), 0.0
    with torch.no_grad(), as_traced():
        for tokens in (5, 7):
            x = torch.randn(tokens + rank, layers.H)
            worst = max(worst, (run(x) - single(x)).abs().max().item())
    report = moefuse.last_report()
    assert report is not None
    return worst, len(report.fused), [skipped.code for skipped in report.skipped]


def _counted(called: list[str], name: str, function: Any) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    return count


def different_programs(rank: int) -> list[float]:
    """Ranks compile at different times, other numbers of tokens first, and one of them breaks the graph: between two layers, and between
    the router and the experts of the second one."""
    model, single = both(layers.Stacked, 2)
    if rank:
        faults.break_beside(model.second)

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = model.first(x) + x  # type: ignore[operator]
        if rank:
            torch._dynamo.graph_break()
        return model.second(model.norm(x)) + x  # type: ignore[operator]

    run = torch.compile(broken, backend=capturing(Seen(), behind=BEHIND))
    worst = []
    for step, counts in enumerate(((4, 9), (7, 2), (4, 0), (0, 5), (1, 1))):
        if rank == 0 and step == 0:
            time.sleep(1)
        x = torch.randn(counts[rank], layers.H, generator=torch.Generator().manual_seed(rank))
        with torch.no_grad():
            found = run(x)
            wanted = single(x)
        worst.append((found - wanted).abs().max().item() if len(x) else 0.0)
    return worst


def dying(rank: int) -> str:
    """Rank 1 is gone before the second call."""
    model, _ = both(layers.Stacked, 2)
    run = compiled(model)
    with torch.no_grad():
        run(torch.randn(4, layers.H))
        if rank == 1:
            os._exit(1)
        start = time.monotonic()
        try:
            run(torch.randn(4, layers.H))
        except moefuse.PeerError as error:
            return f"{error} after {time.monotonic() - start:.0f} s"
    return "nothing"


def too_many(rank: int) -> str:
    with mock.patch(f"{__name__}.mesh", faults.mesh):
        model, _ = both(layers.Stacked, 2, max_tokens=6)
    run = compiled(model)
    with torch.no_grad():
        run(torch.randn(6, layers.H))
        try:
            run(torch.randn(9, layers.H))
        except moefuse.TooManyTokens as error:
            return str(error)
    return "nothing"
