"""``moefuse.parallelize``: experts on several ranks, for a model that knows nothing of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel import copies, views
from moefuse.parallel.cost import cheapest
from moefuse.parallel.find import Site, experts_of, parameters_of
from moefuse.parallel.meshes import grid, hosts
from moefuse.parallel.placement import Placement, placed
from moefuse.parallel.shard import Slices, Where, shard, sharded_names
from moefuse.parallel.units import Cut, cuts_of
from moefuse.runtime import groups
from moefuse.runtime.groups import Grads, Most, Split, Terms, Tokens
from moefuse.runtime.transports import symm

Experts = Literal["dp", "ep", "tp"]
_ROLES = (("ep",), ("tp",), ("ep", "tp"))
TRANSPORTS = ("auto", "allgather", "all_to_all", "symm", "gather")


@dataclass(frozen=True)
class Layer:
    """One layer's experts: where they are, and how tokens get there.

    Attributes:
        here: the experts of which this rank has something.
        terms: for each dimension of the mesh, how tokens travel over it.
    """

    name: str
    placement: Placement
    here: tuple[int, ...]
    terms: tuple[Terms, ...]

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(terms.describe(len(self.here), self.placement.experts) for terms in self.terms)}"


@dataclass(frozen=True)
class Plan:
    """What :func:`parallelize` decided, the same on every rank but for which experts are here."""

    layers: tuple[Layer, ...] = field(default=())
    _held: tuple[tuple[nn.Module, str], ...] = field(default=(), repr=False, compare=False)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The sharded Parameters of experts: ``fully_shard(block, mesh=mesh, ignored_params=plan.parameters)``."""
        return {parameter for module, name in self._held if (parameter := module._parameters[name]) is not None}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """All Parameters in two groups, experts and the rest, for optimizers that refuse both in one call: ``foreach``, ``fused``."""
        experts = self.parameters
        rest = [p for p in model.parameters() if p not in experts]
        return [{"params": rest}, {"params": [p for p in model.parameters() if p in experts]}]

    def shard_placement_fn(self, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
        """For ``fully_shard(block, mesh=all_ranks, shard_placement_fn=...)``: experts are sharded over ``mesh``, the rest over all ranks.

        Experts in a list, or beside their router in one module, need it; those in a module of their own take a ``fully_shard`` of it.

        Args:
            mesh: the ranks with the same experts, one dimension beside that of :func:`parallelize`.

        Raises:
            ParallelError: this torch has one mesh for all Parameters of a call.
        """
        found = _torch_private.sharded_over(mesh)
        if found is None:
            raise ParallelError(
                f"fully_shard of torch {torch.__version__} takes one mesh for all Parameters of a module: give experts a fully_shard of "
                "their own, or use moefuse.parallelize(model, mesh, experts=('dp', 'ep'))"
            )
        return lambda parameter: found if parameter in self.parameters else None

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    experts: Experts | tuple[Experts, ...] = "ep",
    tokens: Tokens = "distinct",
    max_tokens: int | Literal["equal"] | None = None,
    transport: Literal["auto", "allgather", "all_to_all", "symm", "gather"] = "auto",
    placement: str | Sequence[int] | Placement = "linear",
    grads: Grads = "mean",
    modules: str | None = None,
) -> Plan:
    """Spread the experts of a model over the ranks of a mesh, in place; compile it afterwards, as ever.

    Every rank of the mesh calls this, in the same order, with a model that has the same weights, before an optimizer is made. The
    Parameters of experts become DTensors with ``Shard(0)``; read as attributes of their modules they are the full weights, which are
    gathered in each call. What moefuse recognises when the model is compiled reads them no more: tokens travel to the experts instead.

    Args:
        mesh: one dimension of a device mesh, e.g. ``init_device_mesh("cuda", (4,), mesh_dim_names=("ep",))["ep"]``; or two.
        experts: ``"ep"``: each rank has some of the experts; ``"tp"``: each has a slice of every expert's hidden units;
            ``("ep", "tp")`` for a mesh of two dimensions, whose second one slices the experts of the first. A first dimension ``"dp"``,
            as in ``("dp", "ep")``, is of ranks with the same experts and other tokens: gradients of experts are averaged over it.
        tokens: ``"distinct"``: each rank has tokens of its own, as in data parallelism; ``"replicated"``: all have the same;
            ``"sequence"``: each has a part of the same sequences. Of two dimensions that is the first; ranks of the second have the same.
        max_tokens: most tokens of a layer that any rank has in a call: sizes are then known without an exchange. ``"equal"``: all ranks
            have equally many. None: numbers of tokens are exchanged in each call.
        transport: ``"allgather"``: all tokens go to all ranks, and nothing waits for the host; ``"all_to_all"``: each goes to the ranks
            that have one of its experts, once, and the host waits for their numbers; ``"symm"``: the same between GPUs of one host that
            read each other's memory, where nothing waits, for ``max_tokens``; ``"gather"``: the weights go to the tokens.
            ``"auto"`` takes what is fastest by measured constants. Equal tokens (``"replicated"``) do not travel.
        placement: ``"linear"`` (blocks, as torch shards them), ``"round_robin"``, or the rank of each expert.
        grads: ``"mean"`` over the ranks with distinct tokens, as DDP and FSDP give those of other Parameters; or ``"sum"``.
        modules: regular expression; only layers whose name matches (``re.search``).

    Returns:
        What was decided; print it.

    Raises:
        ParallelError: no experts, no process group, a mesh of several dimensions, fewer experts than ranks, an optimizer that has the
            Parameters already, tied or sharded Parameters, an illegal argument. Nothing has been changed then.
    """
    _legal("tokens", tokens, groups.TOKENS)
    _legal("grads", grads, groups.GRADS)
    _legal("transport", transport, TRANSPORTS)
    if (
        max_tokens is not None
        and max_tokens != "equal"
        and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1)
    ):
        raise ParallelError(f"max_tokens={max_tokens!r} is not legal; use a positive number, 'equal' or None")
    if transport == "symm" and max_tokens is None:
        raise ParallelError("transport='symm' has buffers of a fixed size: give max_tokens, the most tokens of a layer on any rank")
    roles = _roles(experts)
    _check_mesh(mesh, roles)
    replicated = roles[0] == "dp"
    hops = roles[replicated:]
    sites = experts_of(model, modules)
    over = mesh.size(int(replicated)) if hops[0] == "ep" else 1
    counts = [_copies(site, over, len(roles)) for site in sites]
    places = [_placement(site, placement, over // count) for site, count in zip(sites, counts, strict=True)]
    _check_parameters(model, sites)
    if transport == "symm" and mesh.device_type != "cuda":
        raise ParallelError(f"transport='symm' is for CUDA devices, and the mesh is of {mesh.device_type!r}: use 'allgather'")
    if transport == "symm" and (ranks := mesh.size(int(replicated))) > symm.MOST_RANKS:
        raise ParallelError(f"transport='symm' is for up to {symm.MOST_RANKS} ranks, and the mesh has {ranks}: use 'allgather'")
    cuts = _cuts(model, sites, mesh.size(-1)) if roles[-1] == "tp" else []
    most = max_tokens if max_tokens is not None else "any"
    grids = {count: grid(mesh, count, replicated) for count in dict.fromkeys(counts)}
    whose = (tokens, "replicated")[: len(hops)]
    warn = copies.warning_of_others(mesh)
    layers = []
    for number, (site, place, count) in enumerate(zip(sites, places, counts, strict=True)):
        at = grids[count]
        way = _transport(site, transport, max_tokens, at.dims[0])
        replicas = at.copies if replicated else 1
        terms = tuple(_terms(*each, way, most, grads, place, count, replicas) for each in zip(hops, at.names, whose, strict=True))
        slices = Slices(terms[-1].text, cuts[number]) if cuts else None
        where = Where(at.mesh, place, terms[0].text if hops[0] == "ep" else "", slices, replicated)
        shard(site, where)
        copies.watch(site.module, site.layer or site.name, sharded_names(site.module), at, terms[0].averages, warn)
        layers.append(Layer(site.layer or site.name, place, where.mine, terms))
    for layer in dict.fromkeys(site.layer for site in sites):
        views.gathering_once(model.get_submodule(layer))
    held = tuple(dict.fromkeys((site.module, name) for site in sites for name in sharded_names(site.module)))
    tables = [(module, views.PLACE) for module in dict.fromkeys(site.module for site in sites) if views.PLACE in module._buffers]
    _torch_private.not_for_ddp(model, [*held, *tables])
    return Plan(tuple(layers), held)


def _roles(experts: object) -> tuple[str, ...]:
    """What each dimension of the mesh is for."""
    roles = experts if isinstance(experts, tuple) else (experts,)
    if roles not in _ROLES and (roles[:1] != ("dp",) or roles[1:] not in _ROLES):
        raise ParallelError(
            f"experts={experts!r} is not legal; use 'ep', 'tp', or ('ep', 'tp') for a mesh of two dimensions, or one of these behind 'dp'"
        )
    return roles


def _transport(site: Site, wanted: str, most: object, mesh: DeviceMesh) -> str:
    """The transport of distinct tokens for a layer: what the user wants, or what measured constants speak for."""
    if wanted != "auto":
        return wanted
    parameters = list(parameters_of(site))
    row = (site.widths[0] if site.widths else 0) * parameters[0].dtype.itemsize
    size = sum(p.numel() * p.dtype.itemsize for p in parameters)
    return cheapest(most if isinstance(most, int) else None, row, size, mesh.size(), hosts(mesh))


def _terms(role: str, mesh: str, tokens: Any, wanted: str, most: int | Most, grads: Grads, place: Placement, *counts: int) -> Terms:
    transport: Any = wanted
    if tokens == "replicated" and wanted != "gather":
        transport = "all_reduce"
    split: Split = "experts" if role == "ep" else "slices"
    return Terms(mesh, transport, tokens, most, grads, place.name, split, *counts)


def _cuts(model: nn.Module, sites: Sequence[Site], world: int) -> list[dict[str, Cut | None]]:
    """Where the Parameters of each layer are cut; layers of equal classes and shapes alike."""
    known: dict[Hashable, dict[str, Cut | None]] = {}
    found = []
    for site in sites:
        layer = model.get_submodule(site.layer)
        key = type(layer), site.name[len(site.layer) :], tuple((n, p.shape, p.dtype) for n, p in layer.named_parameters())
        if key not in known:
            known[key] = cuts_of(model, site, world)
        found.append(known[key])
    return found


def _legal(name: str, value: object, legal: Sequence[str]) -> None:
    if value not in legal:
        raise ParallelError(f"{name}={value!r} is not legal; use {' or '.join(map(repr, legal))}")


def _check_mesh(mesh: object, roles: tuple[str, ...]) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelError("there is no process group: call torch.distributed.device_mesh.init_device_mesh first")
    if not isinstance(mesh, DeviceMesh):
        raise ParallelError(
            f"mesh is a {type(mesh).__name__}; use a DeviceMesh, e.g. init_device_mesh('cuda', (4,), mesh_dim_names=('ep',))"
        )
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


def _copies(site: Site, world: int, dims: int) -> int:
    """How many groups of ranks have all experts: one, unless there are fewer experts than ranks."""
    if site.experts >= world:
        return 1
    name = site.layer or site.name
    if world % site.experts:
        raise ParallelError(
            f"{name} has {site.experts} experts, and the mesh {world} ranks: give a mesh of at most {site.experts} ranks, or of a multiple "
            "of that"
        )
    if dims > 1:
        raise ParallelError(f"{name} has {site.experts} experts, and the mesh {world} ranks to spread them: use at most {site.experts}")
    return world // site.experts


def _placement(site: Site, placement: str | Sequence[int] | Placement, world: int) -> Placement:
    try:
        return placed(placement, site.experts, world)
    except ParallelError as error:
        raise ParallelError(f"{site.layer or site.name}: {error}") from None


def _check_parameters(model: nn.Module, sites: Sequence[Site]) -> None:
    wanted = {id(p): site for site in sites for p in parameters_of(site)}
    for site in sites:
        if views.is_spread(site.module):
            raise ParallelError(
                f"the experts of {site.layer or site.name} are spread already: call moefuse.parallelize once for each layer"
            )
        for p in parameters_of(site):
            if type(p) is not nn.Parameter or type(p.data) is not torch.Tensor:
                raise ParallelError(
                    f"{site.name} has a Parameter that is a {type(p.data).__name__} already: call moefuse.parallelize before other "
                    "libraries shard or wrap the model"
                )
    for optimizer in _optimizers():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in wanted:
                    raise ParallelError(
                        f"a Parameter of {wanted[id(p)].name} is in an optimizer ({type(optimizer).__name__}) already: make the optimizer "
                        "after moefuse.parallelize"
                    )


def _optimizers() -> list[torch.optim.Optimizer]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
