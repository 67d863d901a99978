"""Experts that change ranks between calls of a compiled model, beside one process and beside the model that stays as it was."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import moefuse
from moefuse import _torch_private
from moefuse.parallel.shard import holders_of
from tests.cheap import without_code
from tests.dist import layers, scenes
from tests.dist.scenes import compiled

E = 6


def _skewed(model: nn.Module) -> None:
    """Routers that like the first experts."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("router.weight"):
                p.mul_(torch.linspace(3, 0.1, E)[:, None])


def _model(kind: type[nn.Module], **how: Any) -> tuple[nn.Module, nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(kind, E)
    _skewed(single)
    model = copy.deepcopy(single)
    plan = moefuse.parallelize(model, scenes.mesh(), **how)
    return model.eval(), single.eval(), plan


def _tokens(rank: int, same: bool, seed: int = 0) -> Tensor:
    return torch.randn(9, layers.H, generator=torch.Generator().manual_seed(seed * 2 + (0 if same else rank)))


def load_of(plan: Any, hot: int) -> dict[str, list[int]]:
    """Counts by which two experts, which should not be on one rank, have more to do than all others."""
    counts = [1000] * E
    counts[hot] = counts[(hot + 1 + hot % 2) % E] = 6000
    return {layer.name: counts for layer in plan.layers}


def moved(rank: int, kind: type[nn.Module], how: dict[str, Any]) -> dict[str, Any]:
    """What is other than on one process behind each of several balances; how often a graph was compiled for them."""
    model, single, plan = _model(kind, **how)
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
        with moefuse.load_of(run) as load, mock.patch.object(_torch_private, "compile_fx", without_code):
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


def states_from_before(rank: int, kind: type[nn.Module]) -> dict[str, Any]:
    """What is said to states that were taken before experts moved, and how far outputs are off after all of them."""
    model, exact, plan = _model(kind)
    held, copied, full = model.state_dict(), copy.deepcopy(model.state_dict()), moefuse.full_state_dict(model)
    plan.balance(load_of(plan, 0))
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
    model, _, plan = _model(layers.Stacked)
    try:
        if rank == 0:
            plan.balance(load_of(plan, 0))
        else:
            model(_tokens(rank, False))
    except moefuse.PeerError as error:
        return str(error)
    return "nothing"
