"""``moefuse.unparallelize``: a model as it was before its experts were spread, with the weights that it has now."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.parallel.api import ON_META
from moefuse.parallel.checks import in_optimizer
from moefuse.parallel.shard import HOLDER, Held, held_of, like


def unparallelize(model: nn.Module) -> None:
    """Give every rank the full Parameters again, in place: classes, names and order are those from before ``moefuse.parallelize``.

    A collective call: every rank of the mesh makes it. All experts have to fit into the memory of each rank. Gradients are dropped. An
    optimizer that was made for the spread Parameters does not train the full ones: make a new one.

    Raises:
        ParallelError: the model's experts are not spread, or another library has wrapped it since. Nothing has been changed then.
    """
    spread = [(name, module, held) for name, module in model.named_modules() if (held := held_of(module)) is not None]
    if not spread:
        raise ParallelError(f"{type(model).__name__} has no experts that moefuse.parallelize has spread")
    for name, module in model.named_modules():
        derived = hasattr(type(module), views.ORIGINAL) and not views.is_ours(module)
        if derived or isinstance(module, FSDPModule):
            raise ParallelError(
                f"{name or type(model).__name__} is a {type(module).__mro__[1].__name__} of another library now, which knows the spread "
                "experts: make the model anew, and load what moefuse.full_state_dict or torch.distributed.checkpoint has saved"
            )
    own = [(module, name) for _, module, held in spread for name in held.names.values()]
    _warn_of_optimizers({id(module._parameters[name]) for module, name in own})
    _torch_private.again_for_ddp(model, own)
    for _, module, held in spread:
        if held.numbers is None:
            _stacked(module, held)
        else:
            _listed(module, held)
    for module in model.modules():
        if views.is_ours(module):
            module.__class__ = views.original(module)
            module.__dict__.pop(HOLDER, None)
    model.__dict__.pop(ON_META, None)


def _stacked(module: nn.Module, held: Held) -> None:
    for name in held.names:
        parameter: Any = module._parameters[name]
        module._parameters[name] = _plain(_whole(parameter, held, name), parameter)


def _listed(module: nn.Module, held: Held) -> None:
    for path, name in held.names.items():
        parameter: Any = module._parameters.pop(name)
        inner, _, own = path.rpartition(".")
        for item, row in zip(module.children(), _whole(parameter, held, path), strict=True):
            item.get_submodule(inner)._parameters[own] = _plain(row.clone(), parameter)
    for path, names in held.order.items():
        parameters = module.get_submodule(path)._parameters
        parameters.update({name: parameters.pop(name) for name in names})


def _whole(parameter: DTensor, held: Held, name: str) -> Tensor:
    with torch.no_grad():
        return held.where.whole(name, parameter.to_local()).contiguous()


def _plain(whole: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return like(nn.Parameter(whole, requires_grad=parameter.requires_grad), parameter)


def _warn_of_optimizers(parameters: set[int]) -> None:
    found = in_optimizer(parameters)
    if found is not None:
        warnings.warn(
            f"an optimizer ({found}) has Parameters of experts that were spread, and does not train the full ones: make a new one behind "
            "moefuse.unparallelize",
            stacklevel=3,
        )
