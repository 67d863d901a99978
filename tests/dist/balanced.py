"""Experts that change ranks between calls of a compiled model, beside one process and beside the model that stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from moefuse.parallel.shard import holders_of
from tests.dist import faults, layers, scenes
from tests.dist.scenes import compiled

E = 6


def _skewed(model: nn.Module) -> None:
    """Routers that like the first experts."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("router.weight"):
                p.mul_(torch.linspace(3, 0.1, E)[:, None])


def _model(kind: type[nn.Module], around: type[nn.Module] = layers.Model, **how: Any) -> tuple[nn.Module, nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = around(kind, E)
    _skewed(single)
    model = copy.deepcopy(single)
    plan = moefuse.parallelize(model, scenes.mesh(), **how)
    return model.eval(), single.eval(), plan


def _tokens(rank: int, same: bool, seed: int = 0) -> Tensor:
    return torch.randn(9, layers.H, generator=torch.Generator().manual_seed(seed * 2 + (0 if same else rank)))


def load_of(plan: Any, hot: int) -> dict[str, list[int]]:
    """Counts of which two experts, which should not be on one rank, have the most; no two are equal, so that others move with them."""
    counts = [100 * (1 + e) for e in range(E)]
    counts[hot], counts[(hot + 1) % E] = 4000, 3000
    return {layer.name: counts for layer in plan.layers}


def moved(rank: int, kind: type[nn.Module], how: dict[str, Any]) -> dict[str, Any]:
    """What is other than on one process behind each of several balances; how often a graph was compiled for them."""
    model, single, plan = _model(kind, layers.One, **how)
    twin, shallow = copy.deepcopy(model), copy.copy(model)
    shallow.first = copy.copy(model.first)  # of the same Parameters, which move once
    run, same = compiled(model), how.get("tokens") == "replicated"
    off: dict[str, Any] = {"places": []}
    with torch.no_grad():
        run(_tokens(rank, same))
        before = {name: (p.to_local().data_ptr()) for name, p in _own(model)}
        torch._dynamo.utils.counters.clear()
        for hot in range(E):
            plan = plan.balance(load_of(plan, hot))
            off["places"].append([layer.placement.ranks for layer in plan.layers])
            x = _tokens(rank, same, hot)
            off[f"compiled {hot}"] = float((run(x) - single(x)).abs().max())
        off["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        off["moved memory"] = float(before != {name: p.to_local().data_ptr() for name, p in _own(model)})
        off["eager"] = float((model(x) - single(x)).abs().max())
        off["copy"] = float((twin(x) - single(x)).abs().max())
        off["shallow"] = float((shallow(x) - single(x)).abs().max())
    wanted, found = single.state_dict(), moefuse.full_state_dict(model)
    off["state"] = float(max((found[key] - wanted[key]).abs().max() for key in wanted)) if rank == 0 else 0.0
    other = {key: 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(7)) for key, value in wanted.items()}
    for each in (model, single):
        each.load_state_dict(other)
    with torch.no_grad():
        off["loaded"] = float((run(x) - single(x)).abs().max())
    moefuse.unparallelize(model)
    with torch.no_grad():
        off["whole again"] = float((model(x) - single(x)).abs().max())
    return off


def _own(model: nn.Module) -> list[tuple[str, Any]]:
    return [(f"{n}.{own}", m._parameters[own]) for n, m in enumerate(holders_of(model)) for own in holders_of(model)[m].names.values()]


def by_measured_load(rank: int, kind: type[nn.Module]) -> dict[str, Any]:
    """Load as it is counted, and what it comes to."""
    model, single, plan = _model(kind)
    run = torch.compile(model, backend="moefuse", options={"verify": "off"})
    with torch.no_grad():
        x = torch.randn(400, layers.H, generator=torch.Generator().manual_seed(rank))
        with moefuse.load_of(run) as load, scenes.as_traced():
            run(x)
        counted = {name: counts.tolist() for name, counts in load.items()}
        # A layer this small is read faster than any rows: as if each expert were chosen by many more.
        after = plan.balance({name: counts * 1000 for name, counts in load.items()}, layers=1)
        off = float((run(x) - single(x)).abs().max())
        again = after.balance({name: counts * 1000 for name, counts in load.items()})
        return {
            "load": counted,
            "off": max(off, float((run(x) - single(x)).abs().max())),
            "names": [layer.name for layer in plan.layers],
            "first": sum(a.placement != b.placement for a, b in zip(plan.layers, after.layers, strict=True)),
            "then": sum(a.placement != b.placement for a, b in zip(plan.layers, again.layers, strict=True)),
            "said": str(again),
        }


def refusals(rank: int) -> list[str]:
    said = []
    model, _, plan = _model(layers.Stacked)
    load = load_of(plan, 0)

    def refused(load: Any) -> None:
        try:
            plan.balance(load)
            said.append("nothing")
        except moefuse.ParallelError as error:
            said.append(str(error))

    refused({plan.layers[0].name: [1.5] * E})
    refused({plan.layers[0].name: [1] * (E + 1)})
    model(_tokens(rank, False)).sum().backward()
    refused(load)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(load)
    del optimizer
    refused({})
    refused({"third": [1] * E})
    refused(None)
    refused(load if rank else {plan.layers[0].name: [-1] * E})
    before = [layer.placement for layer in plan.layers]
    after = plan.balance(load if rank else {})  # a rank without tokens has run no layer
    said.append(str(before != [layer.placement for layer in after.layers]))
    torch.manual_seed(0)
    odd = layers.Model(layers.Stacked, E - 1)
    plan = moefuse.parallelize(odd, scenes.mesh())
    refused({layer.name: [1] * (E - 1) for layer in plan.layers})
    return said


def states_from_before(rank: int, kind: type[nn.Module], more: tuple[dict[str, Any], ...] = ({},)) -> dict[str, Any]:
    """What is said to states that were taken before experts moved, by ``plan.balance(.., **more)``, and how far outputs are off after all
    of them."""
    model, exact, plan = _model(kind)
    held, copied, full = model.state_dict(), copy.deepcopy(model.state_dict()), moefuse.full_state_dict(model)
    load = {name: [1000 * count for count in counts] for name, counts in load_of(plan, 0).items()}
    for given in more:
        plan = plan.balance(load, **given)
    said: dict[str, Any] = {}
    for name, state in {"held": held, "copied": copied, "anew": model.state_dict(), "full": full}.items():
        try:
            model.load_state_dict(state)
            said[name] = ""
        except (moefuse.ParallelError, RuntimeError) as error:
            said[name] = str(error)
    x = _tokens(rank, False)
    with torch.no_grad():
        said["off"] = (model(x) - exact(x)).abs().max().item()
    return said


def wrapped(rank: int, kind: type[nn.Module]) -> list[int]:
    """How many layers moved by loads under other names: in one wrapper, in two, the plan's model in one; and by names of something else."""
    found = []
    for before, around in (("", "module."), ("", "base_model.model."), ("0.", ""), ("", "other")):
        torch.manual_seed(0)
        inner = layers.Model(kind, E)
        plan = moefuse.parallelize(nn.Sequential(inner) if before else inner, scenes.mesh())
        load = {
            around + layer.name.removeprefix(before): counts for layer, counts in zip(plan.layers, load_of(plan, 0).values(), strict=True)
        }
        try:
            after = plan.balance(load)
        except moefuse.ParallelError:
            found.append(0)
            continue
        found.append(sum(a.placement != b.placement for a, b in zip(plan.layers, after.layers, strict=True)))
    return found


def alone(rank: int) -> str:
    """Rank 0 balances, and rank 1 runs the model."""
    mesh = faults.mesh()
    with mock.patch.object(scenes, "mesh", return_value=mesh):
        model, _, plan = _model(layers.Stacked)
    faults.impatient(mesh)
    try:
        if rank == 0:
            plan.balance(load_of(plan, 0))
        else:
            model(_tokens(rank, False))
    except moefuse.PeerError as error:
        return str(error)
    return "nothing"


class Once(layers.Stacked):
    """One expert a token: its result comes from one rank, and all others add zeros."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(1)
        return weights, ids


class Exact(layers.Stacked):
    """Of tokens that are small integers every sum is exact in float32: its order, which changes where experts do, does not matter."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        with torch.no_grad():
            self.gate_up.random_(-1, 2)
            self.down.random_(-1, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        weights = (weights * 256).round() / 256
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.relu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


def swapping(plan: Any, turn: int) -> dict[str, list[int]]:
    """Counts by which an expert of one rank and one of the other change places, others at each turn, and all once in E / 2 turns.

    With that swap, and no other one, both ranks have 8000 to do.
    """
    load = {}
    for layer in plan.layers:
        first, second = layer.placement.ranks
        slots = len(first)
        hot, cold = first[turn % slots], second[(turn + turn // slots) % slots]
        counts = [1500 + 4000 // (slots - 1) * (e in first) for e in range(E)]
        counts[hot], counts[cold] = 5000, 1000
        load[layer.name] = counts
    return load


def kept(
    rank: int, kind: type[nn.Module], how: dict[str, Any], device: str = "cpu", steps: int = 27, every: int = 4
) -> tuple[int, float, list[list[int]]]:
    """A model whose experts move every few steps beside one that is spread alike and stays as it is, in CUDA graphs on GPUs.

    (Outputs that are not the same bit for bit, how far they are from one process, how often each expert of each layer has moved.) Bits can
    be compared since an expert has the same rows in the same order on any rank, and tiles depend on the most tokens alone; the order of a
    token's sum over experts and ranks does change where experts do, but both kinds have sums that it does not matter for.
    """
    single = (nn.Sequential(kind(E)) if kind is Exact else layers.Model(kind, E)).to(device)
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("ep",))["ep"]
    moving, staying = copy.deepcopy(single), copy.deepcopy(single)
    plan, _ = (moefuse.parallelize(model, mesh, max_tokens=33, **how) for model in (moving, staying))
    x, source = torch.zeros(33 if rank else 17, layers.H, device=device), torch.Generator(device).manual_seed(rank)
    wrong, off = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
    moves = [[0] * E for _ in plan.layers]
    with torch.no_grad():
        run = _compiled(moving, device)
        graph, wanted_graph = _repeated(run, x), _repeated(_compiled(staying, device), x)
        for step in range(steps):
            x.random_(-4, 5, generator=source)
            filled = torch.full((1 << 20,), float("nan"), device=device)
            del filled
            found, wanted = graph(), wanted_graph()
            wrong += (found != wanted).any()  # of NaN, too
            if step % every == every - 1:
                wrong += (run(x) != wanted).any()  # not in the graph
                exact = single(x)
                off = torch.maximum(off, (found - exact).abs().max() / exact.abs().max())
                before, plan = plan, plan.balance(swapping(plan, step // every))
                for count, old, new in zip(moves, before.layers, plan.layers, strict=True):
                    for e in set(old.here) - set(new.here) | set(new.here) - set(old.here):
                        count[e] += 1
    return int(wrong), off.item(), moves


def _compiled(model: nn.Module, device: str) -> Any:
    return compiled(model) if device == "cpu" else torch.compile(model, backend="moefuse", dynamic=False)


def _repeated(run: Any, x: Tensor) -> Callable[[], Tensor]:
    """``run(x)``, by a CUDA graph on a GPU, into memory that is full of NaN."""
    if not x.is_cuda:
        return lambda: run(x)  # type: ignore[no-any-return]
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: Tensor = run(x)

    def again() -> Tensor:
        out.fill_(float("nan"))
        graph.replay()
        return out

    return again
