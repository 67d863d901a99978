"""What ``moefuse.parallelize`` refuses, before it changes anything: one sentence each, which names the module and the remedy."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.parallel.find import Listed, Site, parameters_of
from moefuse.parallel.meshes import Grid
from moefuse.runtime import groups
from moefuse.runtime.transports import symm

_ROLES = (("ep",), ("tp",), ("ep", "tp"))
TRANSPORTS = ("auto", "allgather", "all_to_all", "symm", "gather")


def tokens_of(tokens: object, hops: Sequence[str]) -> tuple[Any, ...]:
    """Whose tokens a rank has, for each dimension of the mesh that experts are spread over."""
    whose = tokens if isinstance(tokens, tuple) else (tokens,) * len(hops)
    for word in whose:
        _legal("tokens", word, groups.TOKENS)
    if len(whose) != len(hops):
        raise ParallelError(f"tokens={tokens!r} is for {len(whose)} dimensions, and experts are spread over {len(hops)}: {tuple(hops)!r}")
    if whose[0] == "replicated" != whose[-1]:
        raise ParallelError(
            f"tokens={tokens!r} is not legal: what differs among ranks with slices of the same experts differs among all ranks; "
            "use ('distinct', 'replicated') or one word for both dimensions"
        )
    return whose


def slices_have_all(sites: Sequence[Site], cuts: Sequence[Mapping[str, object]]) -> None:
    """Nothing of the experts is whole on ranks with slices and other tokens: nobody would add up its gradients."""
    for site, cut in zip(sites, cuts, strict=True):
        whole = next((name for name, where in cut.items() if where is None), None)
        if whole is not None:
            raise ParallelError(
                f"{whole} of {_called(site)} is no sum over hidden units, and every rank with slices of an expert has it whole: say "
                "tokens=('distinct', 'replicated') and give such ranks the same tokens, or use experts='ep'"
            )


def arguments(grads: object, transport: object, max_tokens: object, bound: object) -> None:
    """Those that are chosen of a few, and numbers."""
    _legal("grads", grads, groups.GRADS)
    _legal("transport", transport, TRANSPORTS)
    number = isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 1
    if max_tokens is not None and max_tokens != "equal" and not number:
        raise ParallelError(f"max_tokens={max_tokens!r} is not legal; use a positive number, 'equal' or None")
    share = isinstance(bound, int | float) and not isinstance(bound, bool) and math.isfinite(bound) and bound >= 1
    if bound is not None and bound != "exact" and not share:
        raise ParallelError(f"bound={bound!r} is not legal; use a number from 1 on, 'exact' or None")
    if transport == "symm" and max_tokens is None:
        raise ParallelError("transport='symm' has buffers of a fixed size: give max_tokens, the most tokens of a layer on any rank")


def roles_of(experts: object) -> tuple[str, ...]:
    """What each dimension of the mesh is for."""
    roles = experts if isinstance(experts, tuple) else (experts,)
    if roles not in _ROLES and (roles[:1] != ("dp",) or roles[1:] not in _ROLES):
        raise ParallelError(
            f"experts={experts!r} is not legal; use 'ep', 'tp', or ('ep', 'tp') for a mesh of two dimensions, or one of these behind 'dp'"
        )
    return roles


def _legal(name: str, value: object, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ParallelError(f"{name}={value!r} is not legal; use {' or '.join(map(repr, legal))}")


def mesh_fits(mesh: object, roles: tuple[str, ...]) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelError("there is no process group: call torch.distributed.device_mesh.init_device_mesh first")
    if not isinstance(mesh, DeviceMesh):
        raise ParallelError(
            f"mesh is a {type(mesh).__name__}; use a DeviceMesh, e.g. init_device_mesh('cuda', (4,), mesh_dim_names=('ep',))"
        )
    if mesh.get_coordinate() is None:
        ranks = [int(r) for r in mesh.mesh.flatten()]
        raise ParallelError(f"rank {dist.get_rank()} is not in the mesh of ranks {ranks}: only those call moefuse.parallelize with it")
    if mesh.ndim != len(roles) and len(roles) > 1:
        example = ", ".join(map(repr, roles))
        raise ParallelError(f"experts={roles!r} is for a mesh of {len(roles)} dimensions, e.g. mesh[{example}]; this one has {mesh.ndim}")
    if mesh.ndim != len(roles):
        names = mesh.mesh_dim_names or ()
        one = f"mesh[{names[-1]!r}]" if names else "one dimension of it"
        raise ParallelError(
            f"the mesh has {mesh.ndim} dimensions {tuple(names)}; give the one that experts are spread over, e.g. {one}, or say what each "
            "is for, e.g. experts=('dp', 'ep')"
        )


def is_model(model: object) -> None:
    """A module, as everything behind this takes it for."""
    if not isinstance(model, nn.Module):
        raise ParallelError(f"model is a {type(model).__name__}; give an nn.Module whose layers have experts")


def modules_are_free(model: nn.Module, modules: str | None) -> None:
    try:
        wanted = re.compile(modules or "")
    except (re.error, TypeError) as error:
        raise ParallelError(f"modules={modules!r} is no regular expression ({error}); use one that the names of layers match") from None
    for name, module in model.named_modules():
        if views.is_spread(module) and wanted.search(name):
            raise ParallelError(
                f"the experts of {name or 'the model'} are spread over ranks already: call moefuse.parallelize once, for the whole model"
            )


def devices_fit(sites: Sequence[Site], mesh: DeviceMesh) -> None:
    """What is on the CPU may be on its way to the mesh's devices: then only the experts of a rank need to fit there."""
    for site in sites:
        device = next(parameters_of(site)).device.type
        if device not in ("cpu", "meta", mesh.device_type):
            raise ParallelError(
                f"{site.layer or _called(site)} is on {device!r}, and the mesh is of {mesh.device_type!r} devices: give a mesh of "
                f"{device!r}, or move the model first"
            )


def memory_may_be_shared(mesh: DeviceMesh, ranks: int) -> None:
    """By ``ranks`` of a mesh, as far as numbers say."""
    if mesh.device_type != "cuda":
        raise ParallelError(f"transport='symm' is for CUDA devices, and the mesh is of {mesh.device_type!r}: use 'allgather'")
    if ranks > symm.MOST_RANKS:
        raise ParallelError(f"transport='symm' is for up to {symm.MOST_RANKS} ranks, and the mesh has {ranks}: use 'allgather'")


def one_host(grids: Iterable[Grid]) -> None:
    """All ranks among which tokens travel are on it."""
    spans = max(groups.group(at.names[0]).spans for at in grids)
    if spans > 1:
        raise ParallelError(f"transport='symm' is for ranks of one host, and the mesh has ranks of {spans}: use 'all_to_all'")


def parameters_are_free(model: nn.Module, sites: Sequence[Site]) -> None:
    wanted = {id(p): site for site in sites for p in parameters_of(site)}
    for site in sites:
        for p in parameters_of(site):
            if isinstance(p.data, DTensor) and getattr(model, "is_distributed_loading_by_transformers", False):
                raise ParallelError(
                    f"{_called(site)} is sharded by transformers already: load the model with "
                    'DistributedConfig(ep_implementation="moefuse", ...), or without a distributed_config and call moefuse.parallelize then'
                )
            if type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
                raise ParallelError(
                    f"{_called(site)} has a Parameter that is a {type(p.data).__name__} already: call moefuse.parallelize before other "
                    "libraries shard or wrap the model"
                )
            hangs = "a hook on its gradient" if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) else ""
            if hangs or p.grad is not None:
                remedy = "register it afterwards, on those of plan.parameters" if hangs else "call model.zero_grad() first"
                raise ParallelError(
                    f"a Parameter of {_called(site)} has {hangs or 'a gradient'}, and moefuse.parallelize puts another in its "
                    f"place: {remedy}"
                )
        _alike(site)
    for optimizer in _optimizers():
        for p in _trained_by(optimizer):
            if id(p) in wanted:
                raise ParallelError(
                    f"a Parameter of {_called(wanted[id(p)])} is in an optimizer ({type(optimizer).__name__}) already: make the optimizer "
                    "after moefuse.parallelize"
                )


def _called(site: Site) -> str:
    """For people."""
    return site.name or "the model"


def _alike(site: Site) -> None:
    """One Parameter takes the place of all experts' Parameters of one name, and is trained or not."""
    if not isinstance(site, Listed):
        return
    numbers = [name for name, _ in site.module.named_children()]
    for path in site.names:
        trained = {number: item.get_parameter(path).requires_grad for number, item in zip(numbers, site.items, strict=True)}
        if len(set(trained.values())) > 1:
            frozen = next(number for number, wants in trained.items() if not wants)
            raise ParallelError(
                f"{site.name}.{frozen}.{path} is frozen and others of the list are not: they become one Parameter. Freeze all or none of "
                "them, or leave this layer out by modules=..."
            )


def in_optimizer(parameters: set[int]) -> str | None:
    """The kind of an optimizer that has one of these Parameters, by identity."""
    return next((type(o).__name__ for o in _optimizers() if any(id(p) in parameters for p in _trained_by(o))), None)


def _trained_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _optimizers() -> list[torch.optim.Optimizer]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
