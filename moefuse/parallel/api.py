"""``moefuse.parallelize``: experts on several ranks, for a model that knows nothing of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel import checks, copies, same
from moefuse.parallel.calls import gathering_once
from moefuse.parallel.cost import cheapest
from moefuse.parallel.find import Site, experts_of, parameters_of
from moefuse.parallel.meshes import Grid, grid
from moefuse.parallel.placement import Placement, placed
from moefuse.parallel.plan import Layer, Plan
from moefuse.parallel.pretrained import saving_whole
from moefuse.parallel.shard import shard, sharded_names
from moefuse.parallel.undone import all_or_nothing
from moefuse.parallel.units import Cut, cuts_of
from moefuse.parallel.where import Slices, Where
from moefuse.runtime import groups
from moefuse.runtime.groups import Grads, Most, Split, Terms, Tokens
from moefuse.runtime.transports import symm

Experts = Literal["dp", "ep", "tp"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    experts: Experts | tuple[Experts, ...] = "ep",
    tokens: Tokens | tuple[Tokens, Tokens] = "distinct",
    max_tokens: int | Literal["equal"] | None = None,
    transport: Literal["auto", "allgather", "all_to_all", "symm", "gather"] = "auto",
    placement: str | Sequence[int] | Placement = "linear",
    grads: Grads = "mean",
    modules: str | None = None,
    bound: float | Literal["exact"] | None = None,
    debug: bool = False,
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
            ``"sequence"``: each has a part of the same sequences. For ``("ep", "tp")`` a word for each dimension, or one for both:
            ``("distinct", "replicated")`` where ranks with slices of the same experts have the same tokens, as under tensor parallelism.
        max_tokens: most tokens of a layer that any rank has in a call: sizes are then known without an exchange. ``"equal"``: all ranks
            have equally many. None: numbers of tokens are exchanged in each call.
        transport: ``"allgather"``: all tokens go to all ranks, and nothing waits for the host; ``"all_to_all"``: each goes to the ranks
            that have one of its experts, once, and the host waits for their numbers; ``"symm"``: the same between GPUs of one host that
            write each other's memory, where nothing waits, with ``max_tokens``; ``"gather"``: the weights go to the tokens.
            ``"auto"`` takes what is fastest by measured constants: ``"symm"`` with ``max_tokens`` on GPUs of one host that can read each
            other's memory, else ``"allgather"``, and ``"all_to_all"`` on several hosts. Equal tokens (``"replicated"``) do not travel.
        placement: ``"linear"`` (blocks, as torch shards them), ``"round_robin"``, or the rank of each expert.
        grads: ``"mean"`` over the ranks with distinct tokens, as DDP and FSDP give those of other Parameters; or ``"sum"``. Over the parts
            of a sequence it is the sum in any case, for they are parts of one loss.
        modules: regular expression; only layers whose name matches (``re.search``).
        bound: what training keeps of the hidden activations of an expert layer. None: rows for the worst case, which is P times the tokens
            of a rank. ``"exact"``: as many as came, for which the host waits once a layer. A number from 1 on (``"allgather"``,
            ``"symm"``): so many times an even share; if more come, gradients are NaN, and the next call raises TooManyTokens.
        debug: ranks compare what they run before each op that communicates, tokens that were said to be equal, and at the first call all
            weights that are not sharded. What differs is a PeerError or a ParallelError that names two ranks. Slow.

    Returns:
        What was decided; print it.

    Raises:
        ParallelError: no experts, no process group, a mesh of several dimensions, fewer experts than ranks, an optimizer that has the
            Parameters already, tied or sharded Parameters, an illegal argument. Whatever is raised, the model is as it was then.
    """
    checks.arguments(grads, transport, max_tokens, bound)
    roles = checks.roles_of(experts)
    checks.is_model(model)
    checks.mesh_fits(mesh, roles)
    checks.modules_are_free(model, modules)
    replicated = roles[0] == "dp"
    hops = roles[replicated:]
    whose = checks.tokens_of(tokens, hops)
    sites = experts_of(model, modules)
    over = mesh.size(int(replicated)) if hops[0] == "ep" else 1
    counts = [_copies(site, over, len(roles)) for site in sites]
    places = [_placement(site, placement, over // count) for site, count in zip(sites, counts, strict=True)]
    checks.parameters_are_free(model, sites)
    checks.devices_fit(sites, mesh)
    if transport == "symm":
        checks.memory_may_be_shared(mesh, mesh.size(int(replicated)))
    cuts = _cuts(model, sites, mesh.size(-1)) if roles[-1] == "tp" else []
    if len(hops) > 1 and whose[-1] != "replicated":
        checks.slices_have_all(sites, cuts)
    most = max_tokens if max_tokens is not None else "any"
    # Tokens of ranks with slices come together before they travel to experts.
    meet = len(hops) > 1 and whose[-1] != "replicated" and isinstance(most, int)
    mosts = (most * mesh.size(-1) if meet else most, most)
    grids = {count: grid(mesh, count, replicated) for count in dict.fromkeys(counts)}
    if transport == "symm":
        checks.one_host(grids.values())
    near = {count: transport == "auto" and whose[0] != "replicated" and _shares(at, max_tokens) for count, at in grids.items()}
    kept: Any = "most" if bound is None else bound
    warn = copies.warning_of_others(mesh)
    names = [site.layer for site in sites]
    model_number = _number(grids.values())
    layers: list[Layer] = []
    wheres: dict[Hashable, Where] = {}
    # Projections in a list each are one layer's, and move together; where ranks have slices, each has cuts of its own.
    kinds = [
        (site.layer, place, count, at if cuts else 0) for at, (site, place, count) in enumerate(zip(sites, places, counts, strict=True))
    ]
    for number, (site, place, count, kind) in enumerate(zip(sites, places, counts, kinds, strict=True)):
        if kind in wheres:
            continue
        at, alike = grids[count], [one for one, other in zip(sites, kinds, strict=True) if other == kind]
        way = _transport(alike, transport, max_tokens, at, near[count])
        promised: tuple[Any, ...] = (grads, place, count, at.copies if replicated else 1, kept, debug)
        terms = tuple(_terms(*each, way, at_most, *promised) for *each, at_most in zip(hops, at.names, whose, mosts, strict=False))
        slices = Slices(terms[-1].text, cuts[number]) if cuts else None
        name = site.layer if names.count(site.layer) == len(alike) and site.layer else site.name
        on_gradient = copies.averaging(name, at) if terms[0].averages else warn
        here = Where(at.mesh, place, terms[0].text if hops[0] == "ep" else "", slices, name, replicated, on_gradient, model_number)
        wheres[kind] = here
        layers.append(Layer(name, place, here.mine, terms))
    with all_or_nothing(model):
        held = _spread(model, sites, [wheres[kind] for kind in kinds])
        saving_whole(model, mesh)
        setattr(model, ON_META, (*getattr(model, ON_META, ()), *_on_meta(model)))
        for layer in layers:
            groups.hold(len(layer.here), layer.placement.slots)
        for group in (groups.group(name) for name in dict.fromkeys(name for at in grids.values() for name in at.names) if debug):
            group.standing.first.append(same.later(model, group))
    return Plan(tuple(layers), held)


def _spread(model: nn.Module, sites: Sequence[Site], wheres: Sequence[Where]) -> tuple[tuple[nn.Module, str], ...]:
    """Put parts of experts in the place of all of them; the modules that have them, and the names of their Parameters."""
    for site, where in zip(sites, wheres, strict=True):
        shard(site, where)
    for layer in dict.fromkeys(site.layer for site in sites):
        gathering_once(model.get_submodule(layer))
    held = tuple(dict.fromkeys((site.module, name) for site in sites for name in sharded_names(site.module)))
    _torch_private.not_for_ddp(model, held)
    return held


ON_META = "_moefuse_on_meta"
"""Of a model, the names of buffers that no checkpoint has and that had no values when its experts were spread."""


def _on_meta(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
    )


def _shares(at: Grid, most: object) -> bool:
    """Whether tokens may travel through memory that ranks share; all of them ask together."""
    if at.mesh.device_type != "cuda" or most is None:
        return False
    return symm.available(groups.group(at.names[0]), torch.device("cuda", torch.cuda.current_device()))


def _transport(sites: Sequence[Site], wanted: str, most: object, at: Grid, shares: bool) -> str:
    """The transport of distinct tokens for a layer: what the user wants, or what measured constants speak for."""
    if wanted != "auto":
        return wanted
    parameters = [parameter for site in sites for parameter in parameters_of(site)]
    row = (sites[0].widths[0] if sites[0].widths else 0) * parameters[0].dtype.itemsize
    size, group = sum(p.numel() * p.dtype.itemsize for p in parameters), groups.group(at.names[0])
    return cheapest(most if isinstance(most, int) else None, row, size, group.size, group.spans, shares)


def _number(grids: Iterable[Grid]) -> int:
    """The number of this model among those that have experts on the same mesh, from 1 on."""
    found = [groups.group(name).standing for at in grids for name in at.names]
    number = max(standing.plans for standing in found) + 1
    for standing in found:
        standing.plans = number
    return number


def _terms(
    role: str, mesh: str, tokens: Any, wanted: str, most: int | Most, grads: Grads, place: Placement, count: int, replicas: int, *more: Any
) -> Terms:
    split: Split = "experts" if role == "ep" else "slices"
    return Terms(mesh, carrier(wanted, tokens, mesh), tokens, most, grads, place.name, split, count, replicas, *more)


def carrier(wanted: str, tokens: Tokens, mesh: str) -> Any:
    """The transport that does what was asked for, between the ranks of a registered mesh."""
    if tokens == "replicated" and wanted != "gather":
        return "all_reduce"
    group = groups.group(mesh)
    return "rails" if wanted == "all_to_all" and 1 < group.spans < group.size else wanted


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
