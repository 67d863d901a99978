"""What people do with a list of experts behind ``parallelize``: it computes, saves and is put together again as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moefuse
from tests.dist import faults, layers, scenes
from tests.strategies import THOROUGH

E = 5


def _swapped(layer: Any) -> None:
    layer.experts[0], layer.experts[3] = layer.experts[3], layer.experts[0]


def _sorted(layer: Any) -> None:
    """In a list that knows nothing of ranks."""
    layer.experts = nn.ModuleList(sorted(layer.experts, key=lambda expert: -list(layer.experts).index(expert)))


def _cut(layer: Any) -> None:
    """A slice of a list is of the same class."""
    layer.experts = layer.experts[1:] + layer.experts[:1]


def _replaced(layer: Any) -> None:
    torch.manual_seed(5)
    layer.experts[4] = nn.Sequential(nn.Linear(layers.H, layers.I), nn.GELU(), nn.Linear(layers.I, layers.H))


def _copied(layer: Any) -> None:
    layer.experts[1] = copy.deepcopy(layer.experts[2])


def _halves(layer: Any) -> None:
    """What is inside of two experts."""
    layer.experts[0][0], layer.experts[4][0] = layer.experts[4][0], layer.experts[0][0]


def _twice(layer: Any) -> None:
    layer.experts[3] = layer.experts[0]


def _pruned(layer: Any) -> None:
    """The router is cut as well."""
    del layer.experts[2]
    keep = [0, 1, 3, 4]
    router = nn.Linear(layers.H, len(keep), bias=False)
    with torch.no_grad():
        router.weight.copy_(layer.router.weight[keep])
    layer.router = router


MOVES: dict[str, Callable[[Any], None]] = {
    "swapped": _swapped,
    "sorted": _sorted,
    "cut": _cut,
    "replaced": _replaced,
    "copied": _copied,
    "halves": _halves,
    "twice": _twice,
    "pruned": _pruned,
}


COMPILED = ("swapped", "replaced") if THOROUGH else ("swapped",)


def _difference(model: Any, single: Any) -> float:
    """Of outputs where every expert has tokens on every rank, and of what a state has."""
    x = torch.randn(64, layers.H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (model(x) - single(x)).abs().max().item()


def moved(rank: int, name: str, folder: str) -> dict[str, float | bool]:
    """Errors of what comes behind a move, against one process on which the same is done; each should be 0."""
    model, single = scenes.both(layers.Listed, E)
    for each in (model, single):
        MOVES[name](each.first)
    wanted = single.state_dict()
    off: dict[str, float | bool] = {"eager": _difference(model, single)}
    if name in COMPILED:
        off["compiled"] = _difference(scenes.compiled(model), single)
    off["state"] = _states_differ(moefuse.full_state_dict(model), wanted)
    own = model.state_dict()
    off["own keys"] = not own.keys() <= wanted.keys() or _states_differ(own, {key: wanted[key] for key in own})

    torch.manual_seed(8)
    other = {key: torch.randn_like(value) for key, value in wanted.items()}
    if name == "twice":
        other |= {key.replace("experts.0.", "experts.3."): value for key, value in other.items() if "first.experts.0." in key}
    for each in (model, single):
        each.load_state_dict(other)
    off["loaded"] = _difference(model, single)
    file = Path(folder) / f"{rank}.safetensors"
    save_file({key: value.clone().contiguous() for key, value in wanted.items()}, file)
    moefuse.load(model, file)
    single.load_state_dict(wanted)
    off["read"] = _difference(model, single)
    copied = copy.deepcopy(model)
    off["a copy"] = _difference(copied, single)

    moefuse.unparallelize(model)
    off["whole"] = _difference(model, single)
    off["keys"] = list(model.state_dict()) != list(wanted) or _states_differ(model.state_dict(), wanted)
    off["parameters"] = [n for n, _ in model.named_parameters()] != [n for n, _ in single.named_parameters()]
    off["classes"] = [type(m) for m in model.modules()] != [type(m) for m in single.modules()]
    off["spread again"] = 0.0 if name == "twice" else _again(model, single)
    return off


def _again(model: nn.Module, single: nn.Module) -> float:
    moefuse.parallelize(model, scenes.mesh())
    return _difference(model, single)


def _states_differ(found: dict[str, Any], wanted: dict[str, Tensor]) -> float | bool:
    if found.keys() != wanted.keys():
        return True
    plain = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}
    return max((plain[key] - value).abs().max().item() for key, value in wanted.items())


def pieces(rank: int) -> list[str]:
    """What a part of an expert alone says; other ranks have its weights."""
    model, _ = scenes.both(layers.Listed, E)
    _swapped(model.first)
    expert: Any = model.first.experts[0]  # type: ignore[index,union-attr]
    said = []
    for call in (expert.state_dict, expert[0].state_dict, lambda: expert.load_state_dict({})):
        try:
            call()
        except moefuse.ParallelError as error:
            said.append(str(error))
    return said


def other_orders(rank: int) -> str:
    """The layers of one rank have changed places: their weights would be mixed."""
    with mock.patch.object(scenes, "mesh", faults.mesh):
        model, _ = scenes.both(layers.Listed, E)
    if rank:
        model.first, model.second = model.second, model.first
    try:
        moefuse.unparallelize(model)
    except moefuse.PeerError as error:
        spread = sum(isinstance(p, DTensor) for p in model.parameters())
        return f"{spread} {error}"
    return "nothing"
