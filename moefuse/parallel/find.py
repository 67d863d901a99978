"""Which Parameters are experts: structure says it, as for what is reported when nothing was found; compilation confirms or refuses each.

A Parameter that is taken for an expert's and is none is gathered in every call: right, slower, and reported (``experts-gathered``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from moefuse.errors import ParallelError
from moefuse.evidence.suspects import Pair, Suspect, suspects


@dataclass(frozen=True)
class Stacked:
    """Experts whose weights are stacked: Parameters [E, ...] of one module.

    Attributes:
        layer: name of the module with the router, from the root.
        name: of the module that holds the Parameters, from the root.
        names: the Parameters, of that module.
        widths: features of a token, as the router takes them; the likeliest number first.
    """

    layer: str
    name: str
    module: nn.Module
    experts: int
    names: tuple[str, ...]
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Listed:
    """Experts that are modules of equal structure, in a list or a dict.

    Attributes:
        layer, name, widths: as of :class:`Stacked`; ``module`` is the list.
        items: the experts.
        names: their Parameters, by path from an expert.
    """

    layer: str
    name: str
    module: nn.Module
    items: tuple[nn.Module, ...]
    names: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def experts(self) -> int:
        """E."""
        return len(self.items)


Site = Stacked | Listed


def experts_of(model: nn.Module, modules: str | None = None) -> list[Site]:
    """All experts with a router beside them, in the order of the model.

    Args:
        modules: regular expression; only modules whose name matches (``re.search``).

    Raises:
        ParallelError: there are none, or two modules share the weights of experts.
    """
    found: list[Site] = []
    for suspect in suspects([model]):
        pairs = [pair for pair in suspect.pairs if pair.router is not None and not pair.loose]
        if modules is None or re.search(modules, suspect.name):
            found += _sites(model, suspect, pairs)
    if not found:
        where = f" in modules that match {modules!r}" if modules is not None else ""
        raise ParallelError(
            f"moefuse.parallelize found no experts{where} in {type(model).__name__}: no Parameters [E, ..], and no list of equal "
            "modules, beside the weight of a router with E scores"
        )
    found = _once(model, found)
    _not_tied(model, found)
    _not_shared(model, found)
    return found


def _once(model: nn.Module, found: list[Site]) -> list[Site]:
    """One layer in several blocks is one: a block that has it, too, has nothing of its own."""
    kept: dict[tuple[int, tuple[str, ...]], Site] = {}
    for site in found:
        other = kept.setdefault((id(site.module), site.names), site)
        if other is site or model.get_submodule(other.layer) in set(model.get_submodule(site.layer).modules()):
            continue
        what = "one list of experts" if isinstance(site, Listed) else "one module with their experts"
        raise ParallelError(f"{other.layer} and {site.layer} have {what}: it cannot be sharded, give each layer its own")
    return list(kept.values())


def _sites(model: nn.Module, suspect: Suspect, pairs: list[Pair]) -> Iterator[Site]:
    taken: set[int] = set()
    for pair in pairs:
        if not taken.isdisjoint(pair.tensors):
            continue
        taken |= pair.tensors
        layer, module = suspect.name, suspect.module
        routers = [other.router for other in pairs if other.tensors == pair.tensors]
        if outside := _outside(suspect, pair, routers):
            layer, module, routers = layer.rpartition(".")[0], suspect.around[0], outside
        widths = _widths(module, routers, pair.tensors)
        for name, holder in module.named_modules():
            path = ".".join(part for part in (layer, name) if part)
            if len(pair.experts) == 1:
                yield from _stacked(layer, path, holder, pair, routers, widths)
            elif isinstance(holder, nn.ModuleList | nn.ModuleDict) and len(holder) == len(pair.experts):
                yield from _listed(layer, path, holder, pair, widths)


def _outside(suspect: Suspect, pair: Pair, routers: list[int | None]) -> list[int | None]:
    """Routers in the module around, where all that is inside stands beside the stacked weights themselves, and so is their biases."""
    own = {
        id(p): p
        for m in suspect.module.modules()
        if any(id(p) in pair.tensors for p in m._parameters.values())
        for p in m.parameters(False)
    }
    if len(pair.experts) != 1 or not suspect.around or not own.keys() >= set(routers):
        return []
    count = next(p.shape[0] for key, p in own.items() if key in pair.tensors)
    beside = [m for m in suspect.around[0].modules() if not any(p.dim() > 2 and len(p) == count for p in m.parameters(False))]
    return [id(p) for m in beside for p in m.parameters(False) if id(p) not in own and p.dim() == 2 and count in p.shape]


def _widths(module: nn.Module, routers: list[int | None], experts: frozenset[int]) -> tuple[int, ...]:
    """Features of a token: as each of the possible routers takes them, those first that stand apart from the experts."""
    beside = {id(p) for m in module.modules() if any(id(p) in experts for p in m._parameters.values()) for p in m._parameters.values()}
    found = [p for p in module.parameters() if id(p) in routers]
    return tuple(dict.fromkeys(n for p in sorted(found, key=lambda p: id(p) in beside) for n in reversed(p.shape)))


def _stacked(layer: str, path: str, holder: nn.Module, pair: Pair, routers: list[int | None], widths: tuple[int, ...]) -> Iterator[Stacked]:
    """The Parameters [E, ...] of a module, biases [E, n] among them.

    A bias looks like the weight of a router. So of those that may be the router, one is: the first outside of the module, if there is any.
    """
    own = {n: p for n, p in holder._parameters.items() if p is not None}
    held = {n: p for n, p in own.items() if id(p) in pair.tensors}
    if held:
        count = next(iter(held.values())).shape[0]
        inside = {id(p) for p in own.values()}
        router = next((r for r in routers if r not in inside), routers[0])
        names = tuple(n for n, p in own.items() if p.dim() >= 2 and p.shape[0] == count and id(p) != router)
        yield Stacked(layer, path, holder, count, names, widths)


def _listed(layer: str, path: str, holder: nn.Module, pair: Pair, widths: tuple[int, ...]) -> Iterator[Listed]:
    """The experts of a list, if all have the same Parameters."""
    items = tuple(holder.children())
    forms = [{n: (p.shape, p.dtype) for n, p in item.named_parameters()} for item in items]
    theirs = {id(p) for item in items for p in item.parameters()}
    if forms[0] and all(form == forms[0] for form in forms) and theirs <= pair.tensors:
        yield Listed(layer, path, holder, items, tuple(forms[0]), widths)


def _not_tied(model: nn.Module, found: list[Site]) -> None:
    owners: dict[int, str] = {}
    wanted = {id(p) for site in found for p in parameters_of(site)}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in wanted:
                continue
            whole = f"{path}.{name}"
            if id(parameter) in owners:
                raise ParallelError(f"{owners[id(parameter)]} and {whole} are one Parameter: tied experts cannot be sharded, untie them")
            owners[id(parameter)] = whole


def _not_shared(model: nn.Module, found: list[Site]) -> None:
    """No layer, expert or other module has a part of an expert that is another's, too: weights are read by their place in one list."""
    lists = [site for site in found if isinstance(site, Listed)]
    inner = {id(m) for site in lists for item in site.items for m in item.modules() if next(m.parameters(), None) is not None}
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            if child is None or id(child) not in inner:
                continue
            whole = f"{path}.{name}".lstrip(".")
            if id(child) in names:
                raise ParallelError(f"{names[id(child)]} and {whole} are one module: experts that share it cannot be sharded, copy it")
            names[id(child)] = whole


def parameters_of(site: Site) -> Iterator[nn.Parameter]:
    """Every Parameter of the experts."""
    if isinstance(site, Stacked):
        yield from (site.module._parameters[n] for n in site.names)  # type: ignore[misc]
        return
    for item in site.items:
        yield from item.parameters()
