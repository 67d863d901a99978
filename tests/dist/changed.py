"""Ways in which experts come to have other weights between two compiled calls, in a process of several."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from tests.dist import layers, scenes
from tests.strategies import THOROUGH


def _dtensors(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    found = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if hasattr(p, "_local_tensor")]
    assert found
    return found


def everywhere(model: nn.Module) -> set[str]:
    """The Parameters that each rank has whole."""
    return {name for name, parameter in model.named_parameters() if not hasattr(parameter, "_local_tensor")}


def _halved(parameter: Any) -> nn.Parameter:
    return nn.Parameter(parameter.detach() / 2)


def _others(model: nn.Module) -> None:
    for module, name, parameter in _dtensors(model):
        module._parameters[name] = _halved(parameter)


def _assigned(model: nn.Module) -> None:
    state = {name: value if name in everywhere(model) else value / 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _inside(model: nn.Module) -> None:
    for _, _, parameter in _dtensors(model):
        parameter._local_tensor = parameter._local_tensor / 2


def _in_place(model: nn.Module) -> None:
    for _, _, parameter in _dtensors(model):
        parameter.detach().mul_(0.5)


def _layer(model: Any) -> None:
    other = copy.deepcopy(model.first)
    _in_place(other)
    _in_place(model.second)
    model.first = other


CHANGES: dict[str, Callable[[Any], None]] = {
    "other Parameters": _others,
    "assigned": _assigned,
    "inside": _inside,
    "in place": _in_place,
    "another layer": _layer,
}


def run(rank: int, kind: type[nn.Module], change: str, backend: str) -> tuple[float, float]:
    """Relative differences from one process, before and after the change; what changes in place is read by Inductor's code, too."""
    if change == "in place" and (THOROUGH or (backend, kind) == ("moefuse", layers.Stacked)):
        return _run(rank, kind, change, backend)
    with scenes.codeless() if THOROUGH else scenes.as_traced():
        return _run(rank, kind, change, backend)


@torch.no_grad()
def _run(rank: int, kind: type[nn.Module], change: str, backend: str) -> tuple[float, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(kind, 2)
    model: nn.Module = copy.deepcopy(single)
    moefuse.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"])
    whole = everywhere(model)
    x, found = torch.randn(6, layers.H), list[float]()
    if backend != "moefuse":
        torch.compile(model, backend="moefuse")(x)  # so that tensors are kept
    compiled = torch.compile(model, backend=backend)
    for halved in (False, True):
        if halved:
            CHANGES[change](model)
            for name, parameter in single.named_parameters():
                parameter.mul_(1 if name in whole else 0.5)
        wanted = single(x)
        for _ in range(2):
            found.append(((compiled(x) - wanted).abs().max() / wanted.abs().max()).item())
    return max(found[:2]), max(found[2:])
