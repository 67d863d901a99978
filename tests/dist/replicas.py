"""Experts on an "ep" dimension of a mesh, data parallelism on another one: training steps beside one process with all ranks' tokens."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import moefuse
from moefuse import Options
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, wholes
from tests.dist.layers import H, I

STEPS, MICRO, CLIP = 2, 2, 0.5


class Experts(nn.Module):
    """A module of its own, as transformers has it."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * I, H) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, H, I) * 0.3)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, (F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None]).to(out.dtype))
        return out


class Apart(layers.Routed):
    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.experts = Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out: Tensor = self.experts(x, ids, weights)
        return out


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], experts: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), kind(experts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], experts: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(kind, experts) for _ in range(2)), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Case:
    """``around``: what does data parallelism; ``settings`` of AdamW; ``fsdp``: of ``fully_shard``; ``how``: of ``parallelize``.

    ``sums``: how many times the mean of all ranks the gradients of experts are to be.
    """

    around: str
    kind: type[nn.Module] = Apart
    experts: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)
    sums: int = 1


@dataclass(frozen=True)
class Found:
    """Largest differences from one process, relative: of outputs, of gradients by name, of the norm of all gradients.

    ``torchs``: the same of torch's own function, where it takes these Parameters. ``held``: elements of experts' optimizer state on this
    rank. ``said``: warnings of moefuse.
    """

    outs: float
    grads: dict[str, float]
    norms: float
    torchs: float
    fused: int
    dispatches: int
    held: int
    said: list[str]


def trained(rank: int, case: Case) -> Found:
    """Steps of two micro-batches, with another number of tokens on every rank."""
    single = Model(case.kind, case.experts)
    model = copy.deepcopy(single)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    plan, run = _around(model, mesh, case)
    seen = Seen()
    backend = capturing(seen, Options(), "aot_eager")
    if case.around == "ddp":
        run = torch.compile(run, backend=backend)
    else:
        for block in model.layers:
            block.compile(backend=backend)
    groups = plan.param_groups(model)
    optimizers = [torch.optim.AdamW(params, lr=1e-2, **case.settings) for params in (groups, single.parameters())]
    generator = torch.Generator().manual_seed(3)
    outs, norms, torchs, grads = 0.0, 0.0, 0.0, {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _step in range(STEPS):
            for _ in range(MICRO):
                every = [torch.randn(2 + r, H, generator=generator) for r in range(4)]
                if case.how.get("tokens") == "replicated":
                    every = [every[r // 2] for r in range(4)]
                out = run(every[rank])
                out.square().mean().backward()
                wanted = [single(x) for x in every]
                sum((w.square().mean() for w in wanted), torch.zeros(())).div(len(every)).backward()
                outs = max(outs, _apart(out, wanted[rank]))
            if case.around == "by hand":
                _average(model)
            for parameter in plan.parameters if case.sums > 1 else ():
                parameter.grad /= case.sums
            grads = {n: max(grads.get(n, 0.0), off) for n, off in _gradients(model, single).items()}
            torchs = max(torchs, _torchs_norm(model, single))
            mine = moefuse.clip_grad_norm_(model.parameters(), CLIP)
            theirs = clip_grad_norm_(single.parameters(), CLIP)
            norms = max(norms, _apart(mine, theirs))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    experts = plan.parameters
    moments: list[Any] = [optimizers[0].state[p]["exp_avg"] for p in experts]
    ways = ("moefuse.ep_dispatch.default", "moefuse.ep_experts.default")
    dispatches = sum(str(n.target) in ways for gm in seen.graphs for n in gm.graph.nodes)
    texts = [str(w.message) for w in said if "moefuse" in str(w.message)]
    return Found(outs, grads, norms, torchs, len(seen.report.fused), dispatches, sum(m.to_local().numel() for m in moments), texts)


def _around(model: Model, mesh: DeviceMesh, case: Case) -> tuple[moefuse.Plan, Any]:
    spread: dict[str, Any] = {"experts": ("dp", "ep"), **case.how}
    if case.around.startswith("efsdp"):
        world = init_device_mesh("cpu", (4,))
        plan = moefuse.parallelize(model, mesh["ep"], **case.how)
        for block in model.layers:
            if case.around == "efsdp":
                fully_shard(block.mlp.experts, mesh=mesh["dp"], **case.fsdp)
                fully_shard(block, mesh=world, **case.fsdp)
            else:
                fully_shard(block, mesh=world, shard_placement_fn=plan.shard_placement_fn(mesh["dp"]), **case.fsdp)
        fully_shard(model, mesh=world, **case.fsdp)
        return plan, model
    plan = moefuse.parallelize(model, mesh, **spread)
    if case.around == "hsdp":
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, ignored_params=plan.parameters, **case.fsdp)
    return plan, DistributedDataParallel(model) if case.around == "ddp" else model


def _average(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _gradients(model: nn.Module, single: nn.Module) -> dict[str, float]:
    """By the names of one process: a gradient is put where its Parameter is, and the state of the model read."""
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        found = {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in model.state_dict().items()}
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    theirs = {n: p.grad for n, p in single.named_parameters()}
    assert found.keys() <= theirs.keys()  # of a list, this rank's experts
    return {n: _apart(g, theirs[n]) for n, g in found.items()}


def copied(rank: int) -> float:
    """A copy of the model, and a backward pass behind one that has failed: gradients of experts are averaged all the same."""
    single = Model(Apart, 4)
    first = copy.deepcopy(single)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    moefuse.parallelize(first, mesh, experts=("dp", "ep"))
    model = copy.deepcopy(first)
    every = [torch.randn(2 + r, H, generator=torch.Generator().manual_seed(r)) for r in range(4)]

    def fail(_: Tensor) -> None:
        raise ValueError("a hook of the user's")

    x = every[rank].clone().requires_grad_()
    x.register_hook(fail)
    with contextlib.suppress(ValueError):
        model(x).square().mean().backward()
    model.zero_grad()
    model(every[rank]).square().mean().backward()
    sum((single(x).square().mean() for x in every), torch.zeros(())).div(4).backward()
    _average(model)
    return max(_gradients(model, single).values())


def alone(rank: int) -> tuple[list[str], float]:
    """Two steps where nobody averages: what is said, and the largest error of a gradient of experts."""
    single = Model(Apart, 2)
    model = copy.deepcopy(single)
    moefuse.parallelize(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"])
    every = [torch.randn(2 + r, H, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(every[rank]).square().mean().backward()
            sum((single(x).square().mean() for x in every), torch.zeros(())).div(4).backward()
    off = max(error for name, error in _gradients(model, single).items() if "experts" in name)
    return [str(w.message) for w in said if "moefuse" in str(w.message)], off


def _torchs_norm(model: nn.Module, single: nn.Module) -> float:
    try:
        mine: Any = clip_grad_norm_(model.parameters(), math.inf)
    except (RuntimeError, ValueError, AssertionError):
        return math.inf
    return _apart(mine.full_tensor() if isinstance(mine, DTensor) else mine, clip_grad_norm_(single.parameters(), math.inf))


def mixed(rank: int, case: Case) -> tuple[float, float, int]:
    """One step under a policy of FSDP that computes in bfloat16: the largest error of a gradient here, and of one process in bfloat16.

    Relative to float32. Experts that FSDP does not see are in bfloat16 as they are.
    """
    single = Model(case.kind, case.experts).bfloat16().float()
    half, model = copy.deepcopy(single).bfloat16(), copy.deepcopy(single)
    if case.around == "hsdp":
        for block in model.layers:
            block.mlp.experts.bfloat16()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    _around(model, mesh, case)
    seen = Seen()
    for block in model.layers:
        block.compile(backend=capturing(seen, Options(), "aot_eager"))
    generator = torch.Generator().manual_seed(3)
    every = [torch.randn(2 + r, H, generator=generator).bfloat16().float() for r in range(4)]
    model(every[rank]).float().square().mean().backward()
    for one, dtype in ((single, torch.float32), (half, torch.bfloat16)):
        sum((one(x.to(dtype)).float().square().mean() for x in every), torch.zeros(())).div(4).backward()
    mine = _gradients(model, single)
    theirs = {n: _apart(p.grad.float(), q.grad) for (n, p), q in zip(half.named_parameters(), single.parameters(), strict=True)}
    return max(mine.values()), max(theirs[n] for n in mine), len(seen.report.fused)


def restored(rank: int, case: Case, path: str) -> tuple[float, float, float]:
    """Largest differences of a model from the meta device: of its state, of that once experts are loaded as a state, of gradients."""
    torch.manual_seed(0)
    single = Model(case.kind, case.experts)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with torch.device("meta"):
        model = Model(case.kind, case.experts)
        _around(model, mesh, case)
    wholes.garbage(model.to_empty(device="cpu"))
    moefuse.load(model, path)
    wanted = {name: value.clone() for name, value in single.state_dict().items()}
    loaded = _off(moefuse.full_state_dict(model), wanted)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    wholes.garbage(model)
    model.load_state_dict({**wanted, **{name: value for name, value in kept.items() if ".mlp." not in name or ".router." in name}})
    again = _off(moefuse.full_state_dict(model), wanted)
    every = [torch.randn(2 + r, H, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    model(every[rank]).square().mean().backward()
    sum((single(x).square().mean() for x in every), torch.zeros(())).div(4).backward()
    if case.around == "by hand":
        _average(model)
    return loaded, again, max(_gradients(model, single).values())


def _off(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(0.0 if torch.equal(mine[name], theirs[name]) else math.inf for name in theirs)


def _apart(mine: Tensor, theirs: Any) -> float:
    if not theirs.numel():
        return 0.0
    return ((mine.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp(min=1e-30)).item()
