"""One case on every rank: a model whose experts are spread beside the same model on one process, outputs and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import Options
from tests.cpu.capture_case import Seen, capturing
from tests.dist.layers import H, Model


@dataclass(frozen=True)
class Case:
    """``tokens`` of each rank; ``how``: arguments of ``parallelize``; ``behind``: what compiles the graph, None to run it in eager.

    ``tensor``: so many ranks have slices of the same experts, on a mesh of two dimensions, and the same tokens if there are fewer of them.
    """

    kind: type[nn.Module]
    tokens: tuple[int, ...]
    experts: int = 3
    how: Mapping[str, Any] = field(default_factory=dict)
    behind: str | None = "aot_eager"
    train: bool = True
    dtype: torch.dtype = torch.float32
    checkpointed: bool = False
    skew: bool = False
    tensor: int = 1
    dynamic: bool | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Found:
    """Errors relative to the largest value; what was fused, and the operations in all graphs."""

    out: float
    grads: dict[str, float]
    report: Any
    ops: dict[str, int]

    @property
    def worst(self) -> float:
        return max([self.out, *self.grads.values()])

    @property
    def traveled(self) -> int:
        """How many layers' tokens do, over so many ways."""
        return self.ops.get("moefuse.ep_combine.default", 0) + self.ops.get("moefuse.ep_experts.default", 0)


def run(rank: int, case: Case) -> Found:
    """Compare on one rank."""
    single = Model(case.kind, case.experts).to(case.dtype).to(case.device)
    if case.skew:
        for layer in (single.first, single.second):
            with torch.no_grad():
                layer.router.weight[:2] += 5  # type: ignore[index,union-attr,operator]
    model = copy.deepcopy(single)
    world = dist.get_world_size()
    if case.tensor > 1:
        mesh = init_device_mesh(case.device, (world // case.tensor, case.tensor), mesh_dim_names=("ep", "tp"))
    else:
        mesh = init_device_mesh(case.device, (world,), mesh_dim_names=("ep",))["ep"]
    share = world // len(case.tokens)
    within = {"tokens": ("distinct", "replicated")} if case.tensor > 1 and share > 1 else {}
    moefuse.parallelize(model, mesh, **{**within, **case.how})
    same = case.how.get("tokens") == "replicated"
    generator = torch.Generator().manual_seed(1)
    every = [torch.randn(1 if same else n, H, generator=generator).to(case.device, case.dtype) for n in case.tokens]
    if same:
        every = [torch.randn(case.tokens[0], H, generator=generator).to(case.device, case.dtype)] * len(case.tokens)
    every = [e.abs() for e in every] if case.skew else every  # the first layer's scores of experts 0 and 1 are the largest
    seen = Seen()
    run_model: Any = model
    if case.behind is not None:
        run_model = torch.compile(model, backend=capturing(seen, Options(), case.behind), fullgraph=False, dynamic=case.dynamic)
    place = rank // share
    x = every[place].clone().requires_grad_(case.train)
    inputs = [e.clone().requires_grad_(case.train) for e in every]
    with torch.set_grad_enabled(case.train):
        out = checkpoint(run_model, x, use_reentrant=False) if case.checkpointed else run_model(x)
        wanted = [single(e) for e in inputs]
    errors = {}
    if case.train:
        _loss(out).backward()
        ranks = 1 if same else len(case.tokens)
        means = case.how.get("grads", "mean") == "mean" and case.how.get("tokens") != "sequence"
        scale = 1 / ranks if means else 1.0
        total: Any = sum((_loss(w) for w in wanted[:ranks]), torch.zeros((), device=case.device))
        (total * scale).backward()
        errors = _gradients(model, single, scale / share, same)
        errors["x"] = _apart(x.grad * scale, inputs[0 if same else place].grad)  # type: ignore[operator]
    ops: dict[str, int] = {}
    for gm in seen.graphs:
        for node in gm.graph.nodes:
            name = str(node.target)
            if name.startswith("moefuse"):
                ops[name] = ops.get(name, 0) + 1
    return Found(_apart(out, wanted[place]), errors, seen.report, ops)


def _loss(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum()


def _apart(mine: Tensor | None, theirs: Tensor | None) -> float:
    if theirs is None:
        return 0.0 if mine is None or not mine.any() else float("inf")
    if not theirs.numel():
        return 0.0
    mine = torch.zeros_like(theirs) if mine is None else mine
    return ((mine.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp(min=1e-30)).item()


def _gradients(model: nn.Module, single: nn.Module, scale: float, same: bool) -> dict[str, float]:
    """Errors of all gradients, those of experts put together from all ranks; data parallelism sums those of the rest."""
    theirs = dict(single.named_parameters())
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        if isinstance(parameter, DTensor):
            for key, mine in full(model, name, grad):
                found[key] = _apart(mine, theirs[key].grad)
        else:
            grad = torch.zeros_like(parameter) if grad is None else grad.clone()
            if not same:
                dist.all_reduce(grad)
                grad *= scale
            found[name] = _apart(grad, theirs[name].grad)
    assert found.keys() == theirs.keys(), found.keys() ^ theirs.keys()
    return found


def full(model: nn.Module, name: str, grad: Any) -> list[tuple[str, Tensor]]:
    """(name of one process's Parameter, gradient): of a stack, or of each expert of a list."""
    holder = model.get_submodule(name.rpartition(".")[0])
    own: Callable[[str], Any] = lambda path: path  # noqa: E731
    whole = grad.full_tensor()
    if (
        name.endswith(("gate_up", "gate_up_proj", "gate_up_bias"))
        and not getattr(holder, "TURNS", False)
        and (cuts := [i for i, p in enumerate(grad.placements) if p.is_shard(1)])
    ):
        # Gate and up projection stand one behind the other, and each rank has its part of both.
        world = grad.device_mesh.size(cuts[0])
        whole = whole.unflatten(1, (world, 2, -1)).transpose(1, 2).flatten(1, 3)
    if not hasattr(holder, "_moefuse_place"):
        place = torch.arange(len(whole))
    else:
        place = holder._moefuse_place.long()  # type: ignore[union-attr,operator]
    # Without gaps the rows are the experts in order; else each is in its slot.
    if len(whole) > len(place) or place.tolist() != list(range(len(place))):
        slots = int(place.max()) // dist.get_world_size() + 1 if len(whole) == len(place) else len(whole) // dist.get_world_size()
        whole = whole[place] if len(whole) != len(place) or slots * dist.get_world_size() == len(whole) else whole
    stacked = name.rpartition(".")[2]
    if not stacked.startswith("stacked_"):
        return [(own(name), whole)]
    path = name.rpartition(".")[0]
    leaf = stacked.removeprefix("stacked_").rpartition("_")
    inner = f"{leaf[0]}." if leaf[0] else ""
    return [(f"{path}.{e}.{inner}{leaf[2]}", whole[e]) for e in range(len(place))]
