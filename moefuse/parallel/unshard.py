"""``moefuse.unparallelize``: a model as it was before its experts were spread, with the weights that it has now."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.parallel.api import ON_META
from moefuse.parallel.checks import in_optimizer
from moefuse.parallel.hooked import RUNS, WHY
from moefuse.parallel.members import HOLDER, Member, holder_of, members_of
from moefuse.parallel.shard import HELD, Held, holders_of, like
from moefuse.parallel.undone import all_or_nothing


def unparallelize(model: nn.Module) -> None:
    """Give every rank the full Parameters again, in place: classes, names and order are those from before ``moefuse.parallelize``.

    A collective call: every rank of the mesh makes it. All experts have to fit into the memory of each rank. Gradients are dropped. An
    optimizer that was made for the spread Parameters does not train the full ones: make a new one.

    Experts of a list may have changed places since, or be elsewhere: each has its own weights.

    Raises:
        ParallelError: the model's experts are not spread, or another library has wrapped it since. Whatever is raised, the model is as
            it was then.
    """
    spread = holders_of(model)
    if not spread:
        raise ParallelError(f"{type(model).__name__} has no experts that moefuse.parallelize has spread")
    for name, module in model.named_modules():
        derived = hasattr(type(module), views.ORIGINAL) and not views.is_ours(module)
        if derived or isinstance(module, FSDPModule):
            raise ParallelError(
                f"{name or type(model).__name__} is a {type(module).__mro__[1].__name__} of another library now, which knows the spread "
                "experts: make the model anew, and load what moefuse.full_state_dict or torch.distributed.checkpoint has saved"
            )
    own = [(module, name) for module, held in spread.items() for name in held.names.values()]
    _warn_of_optimizers({id(module._parameters[name]) for module, name in own})
    members: dict[nn.Module, dict[nn.Module, Member]] = {}
    for _, module, member in members_of(model):
        members.setdefault(holder_of(module), {})[module] = member
    with all_or_nothing(model):
        _torch_private.again_for_ddp(model, own)
        for module, held in spread.items():
            for name in held.names:
                _put_back(module, held, name, members.get(module, {}))
        for module in model.modules():
            if views.is_ours(module):
                module.__class__ = views.original(module)
                for name in (HOLDER, HELD, RUNS, WHY, views.WAYS, views.PARTS, views.AWAY):
                    module.__dict__.pop(name, None)
        model.__dict__.pop(ON_META, None)


def _put_back(module: nn.Module, held: Held, name: str, members: Mapping[nn.Module, Member]) -> None:
    """All of one Parameter to the module that holds a part of it, or of each of its experts to the modules in them; a collective call."""
    parameter: Any = module._parameters[held.names[name]]
    whole = held.where.whole(name, parameter.to_local()).contiguous()
    if not held.listed:
        module._parameters[name] = _plain(whole, parameter)
        return
    del module._parameters[held.names[name]]
    for inner, member in members.items():
        for own in (own for own, path in member.names.items() if path == name):
            inner._parameters[own] = _plain(whole[member.expert].clone(), parameter)
            inner._parameters.update({n: inner._parameters.pop(n) for n in member.order if n in inner._parameters})


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
