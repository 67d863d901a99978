"""Which dimension of an expert's Parameters its hidden units are, for tensor parallelism: read from what moefuse makes of the layer.

Shapes do not say it (as many hidden units as features, a latent width, gate and up projection one behind the other or row by row). So the
layer is traced with a few tokens, up to the first graph in which its experts are recognised, and nothing of that graph is run. Which units
a weight has is said by what their lowering goes by, too (``passes/ir/hidden_units.py``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.diagnosis.trial import quiet
from moefuse.diagnosis.undo import taken_back
from moefuse.errors import ParallelError
from moefuse.parallel.find import Site, Stacked
from moefuse.passes.graph.sharded import is_root, viewed
from moefuse.passes.graph.slices import NotLocalError, UnevenError, View, holders, owners
from moefuse.passes.graph.values import tensor
from moefuse.passes.ir.expr import weight_leaves
from moefuse.passes.ir.hidden_units import Hidden, of_part
from moefuse.passes.ir.regions import Region
from moefuse.pipeline import rewrite


@dataclass(frozen=True)
class Cut:
    """A dimension of an expert's Parameter that consists of hidden units, in equal ``blocks`` of which each rank has its part, in order."""

    axis: int
    blocks: int


Cuts = dict[str, Cut | None]
"""Of each Parameter of a layer's experts, by its name: where it is cut; None for one that every rank needs whole."""


class _NotRecognisedError(ValueError):
    """Nothing is known of what the experts compute."""


class _FoundError(BaseException):
    """Ends a trace; no ``Exception``, which compilers hold for failures of a backend."""

    def __init__(self, what: Cuts | NotLocalError) -> None:
        super().__init__()
        self.what = what


def cuts_of(model: nn.Module, site: Site, world: int) -> Cuts:
    """Where the Parameters of a layer's experts are cut, by their names in ``site``.

    Raises:
        ParallelError: the experts are not recognised, or their hidden units do not divide by the ranks.
    """
    name = site.layer or site.name
    layer = model.get_submodule(site.layer)
    layer = _on_cpu(layer) if any(p.is_meta for p in layer.parameters()) else layer
    try:
        return _traced(layer, site, world)
    except _NotRecognisedError as error:
        why = f"which of its weights' dimensions are hidden units is not known, for {error}; use experts='ep'"
    except NotLocalError as error:
        why = f"{error}; use experts='ep'" + (", or another number of ranks" if isinstance(error, UnevenError) else "")
    raise ParallelError(f"{name}: {why}")


def _on_cpu(layer: nn.Module) -> nn.Module:
    """A layer without memory, with some that nobody writes to."""
    return copy.deepcopy(layer).to_empty(device="cpu")


def _traced(layer: nn.Module, site: Site, world: int) -> Cuts:
    """What is found where a call of the layer with a few tokens has an op for its experts."""
    first = next(layer.parameters())
    reasons: list[str] = []
    failed: list[str] = []
    options = dataclasses.replace(Options.from_user(None)[0], enabled=True, strict=False, verify="off", cost_gate=False)

    def backend(gm: GraphModule, example_inputs: Sequence[object]) -> Any:
        values = _values(gm, example_inputs)

        def seen(region: Region) -> None:
            try:
                what: Cuts | NotLocalError = _cuts(layer, site, region, values, world)
            except NotLocalError as error:
                what = error
            raise _FoundError(what)

        report = rewrite.rewrite(gm, example_inputs, options, entry.frame(), seen)
        reasons.extend(skipped.message for skipped in report.skipped)
        return gm.forward

    entry.enable(backend, lambda _arguments: options, lambda report, *_: reasons.extend(s.message for s in report.skipped))
    for shape in (shape for width in site.widths for shape in ((2, 3, width), (6, width))):
        x = torch.zeros(shape, dtype=first.dtype, device=first.device)
        try:
            with torch.no_grad(), quiet(), _torch_private.borrowed_dynamo(), taken_back(layer, x):
                _torch_private.compile_isolated(layer, backend)(x)
        except _FoundError as found:
            if isinstance(found.what, NotLocalError):
                raise found.what from None
            return found.what
        except Exception as error:
            failed.append(f"a call with tokens {list(shape)} raises {type(error).__name__}")
    raise _NotRecognisedError(next(iter([*reasons, *failed]), "moefuse does not recognise its experts"))


def _values(gm: GraphModule, example_inputs: Sequence[object]) -> dict[Node, Any]:
    """What a graph's inputs are."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return dict(zip(places, example_inputs, strict=False)) | {
        node: getattr(gm, str(node.target), None) for node in gm.graph.nodes if node.op == "get_attr"
    }


def _cuts(layer: nn.Module, site: Site, region: Region, values: Mapping[Node, Any], world: int) -> Cuts:
    leaves = weight_leaves(region.expr)
    if any(leaf.held is not None for leaf in leaves):
        raise NotLocalError("a weight is held in few bits, and no slice of it is known")
    if any(leaf.stacked and leaf.along for leaf in leaves):
        raise NotLocalError("its experts are not the first dimension of a weight")
    hidden = Hidden(region.expr)
    for part in hidden.parts:
        of_part(part, world)
    roots = {node: _root(node) for leaf in leaves for node in leaf.nodes}
    names = _names(layer, site)
    rows: dict[str, dict[int, int]] = {}
    axes: dict[str, tuple[int, int]] = {}
    whole: set[str] = set()
    for leaf in leaves:
        for node in leaf.nodes:
            name = names.get(id(values.get(roots[node])), "")
            if not name:
                raise NotLocalError("some of its weights are no Parameters of the experts")
            if leaf in hidden.behind:
                whole.add(name)
                continue
            view = _of_one_expert(node, roots[node], site)
            unit, groups = hidden.units[leaf]
            axes[name] = _owned(view, unit % len(view.sizes), groups, world, rows.setdefault(name, {}))
    missing = sorted(set(site.names) - rows.keys() - whole)
    if missing:
        raise NotLocalError(f"`{missing[0]}` is read by nothing that moefuse recognises")
    return {name: _cut(rows[name], *axes[name], world) if name in rows else None for name in site.names}


def _names(layer: nn.Module, site: Site) -> dict[int, str]:
    """Identity of each Parameter of the experts, in the layer that was traced -> its name in ``site``."""
    inner = site.name[len(site.layer) :].lstrip(".") if site.layer else site.name
    holder = layer.get_submodule(inner)
    if isinstance(site, Stacked):
        return {id(holder._parameters[name]): name for name in site.names}
    return {id(p): name for item in holder.children() for name, p in item.named_parameters()}


def _root(node: Node) -> Node:
    """The input of the graph that a view is of."""
    found = viewed(node, is_root)
    if found is None:
        raise NotLocalError("a weight is computed, and no view of a Parameter")
    return found


def _tensor(node: Node) -> Tensor:
    value = tensor(node)
    if value is None:
        raise NotLocalError("a weight is no tensor")
    return value


def _of_one_expert(node: Node, root: Node, site: Site) -> View:
    value, whole = _tensor(node), _tensor(root)
    if not whole.is_contiguous():
        raise NotLocalError("a weight is not contiguous")
    skip = 1 if isinstance(site, Stacked) else 0
    start = int(value.storage_offset() - whole.storage_offset())
    lead = value.dim() - whole.dim() + skip
    sizes, strides = [int(n) for n in value.shape[lead:]], [int(n) for n in value.stride()[lead:]]
    return View(tuple(int(n) for n in whole.shape[skip:]), tuple(sizes), tuple(strides), start)


def _owned(view: View, unit: int, groups: int, world: int, rows: dict[int, int]) -> tuple[int, int]:
    """(axis, its size) that the hidden units are; puts the rank of each row into ``rows``."""
    for axis, total in enumerate(view.whole):
        dim, first, step = view.along(axis)
        if dim != unit:
            continue
        count = view.sizes[unit]
        if count % (groups * world):
            raise UnevenError(count // groups, world)
        rows.update(zip(range(first, first + step * count, step), holders(count, groups, world), strict=True))
        return axis, total
    raise NotLocalError("its hidden units are no dimension of a weight")


def _cut(rows: dict[int, int], axis: int, total: int, world: int) -> Cut:
    for blocks in (1, 2, 3, 4):
        if total % (blocks * world) == 0 and [rank for rank, _ in owners(range(total), total, blocks, world)] == [
            rows.get(row) for row in range(total)
        ]:
            return Cut(axis, blocks)
    raise NotLocalError("its hidden units are not in blocks")
