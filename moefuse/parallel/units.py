"""Which dimension of an expert's Parameters its hidden units are, for tensor parallelism: read from what moefuse makes of the layer.

Shapes do not say it (as many hidden units as features, a latent width, gate and up projection one behind the other or row by row). So the
layer is traced with a few tokens, up to the first graph in which its experts are recognised, and nothing of that graph is run.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
from moefuse.ops.schema import TAKES_IDS
from moefuse.parallel.find import Site, Stacked
from moefuse.passes.graph.sharded import is_root, viewed
from moefuse.passes.graph.slices import NotLocalError, View, holders, owners
from moefuse.passes.graph.values import tensor
from moefuse.pipeline import rewrite


@dataclass(frozen=True)
class Cut:
    """A dimension of an expert's Parameter that consists of hidden units, in equal ``blocks`` of which each rank has its part, in order."""

    axis: int
    blocks: int


class _FoundError(BaseException):
    """Ends a trace; no ``Exception``, which compilers hold for failures of a backend."""


def cuts_of(model: nn.Module, site: Site, world: int) -> dict[str, Cut | None]:
    """Of each Parameter of a layer's experts, by its name in ``site``: where it is cut; None for one that every rank needs whole.

    Raises:
        ParallelError: the experts are not recognised, or their hidden units do not divide by the ranks.
    """
    name = site.layer or site.name
    layer = model.get_submodule(site.layer)
    layer = _on_cpu(layer) if any(p.is_meta for p in layer.parameters()) else layer
    found, why = _traced(layer, site)
    if found is None:
        raise ParallelError(f"{name}: which of its weights' dimensions are hidden units is not known, for {why}; use experts='ep'")
    try:
        return _cuts(layer, site, found, world)
    except NotLocalError as error:
        raise ParallelError(f"{name}: {error}; use experts='ep', or another number of ranks") from None


def _on_cpu(layer: nn.Module) -> nn.Module:
    """A layer without memory, with some that nobody writes to."""
    return copy.deepcopy(layer).to_empty(device="cpu")


@dataclass(frozen=True)
class _Call:
    """One ``moefuse::experts`` of a graph; ``values``: what its inputs are."""

    node: Node
    values: Mapping[Node, Any]


def _traced(layer: nn.Module, site: Site) -> tuple[_Call | None, str]:
    """The fused op that a call of the layer with a few tokens has, or why there is none."""
    first = next(layer.parameters())
    seen: list[_Call] = []
    reasons: list[str] = []
    failed: list[str] = []
    options = dataclasses.replace(Options.from_user(None)[0], enabled=True, strict=False, verify="off", cost_gate=False)

    def backend(gm: GraphModule, example_inputs: Sequence[object]) -> Any:
        report = rewrite.rewrite(gm, example_inputs, options, entry.frame())
        reasons.extend(skipped.message for skipped in report.skipped)
        seen.extend(_calls(gm, example_inputs))
        if seen:
            raise _FoundError
        others = (str(n.target).split(".")[1] for n in gm.graph.nodes if n.target in TAKES_IDS)
        reasons.extend(f"they run as `moefuse::{name}`, of whose weights no slice is known" for name in others)
        return gm.forward

    entry.enable(backend, lambda _arguments: options, lambda report, *_: reasons.extend(s.message for s in report.skipped))
    for shape in (shape for width in site.widths for shape in ((2, 3, width), (6, width))):
        x = torch.zeros(shape, dtype=first.dtype, device=first.device)
        try:
            with torch.no_grad(), quiet(), _torch_private.borrowed_dynamo(), taken_back(layer, x):
                _torch_private.compile_isolated(layer, backend)(x)
        except _FoundError:
            return seen[0], ""
        except Exception as error:
            failed.append(f"a call with tokens {list(shape)} raises {type(error).__name__}")
    return None, next(iter([*reasons, *failed]), "moefuse does not recognise its experts")


def _calls(gm: GraphModule, example_inputs: Sequence[object]) -> Iterator[_Call]:
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values: dict[Node, Any] = dict(zip(places, example_inputs, strict=False))
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(gm, str(node.target), None)
        if node.target is torch.ops.moefuse.experts.default:
            yield _Call(node, values)


def _cuts(layer: nn.Module, site: Site, call: _Call, world: int) -> dict[str, Cut | None]:
    names = _names(layer, site)
    parts = dict(zip(("w_in", "w_up", "w_out", "b_in", "b_up", "b_out"), call.node.args[3:], strict=False))
    groups = 2 if call.node.kwargs.get("gating", "merged") == "merged" else 1
    # Of each operand: the dimension of hidden units, and how often they stand in it one behind the other.
    out = (0, groups)
    units: dict[str, tuple[int, int] | None] = {"w_in": out, "w_up": out, "w_out": (1, 1), "b_in": out, "b_up": out, "b_out": None}
    rows: dict[str, dict[int, int]] = {}
    axes: dict[str, tuple[int, int]] = {}
    whole: set[str] = set()
    for part, nodes in parts.items():
        for node in nodes if isinstance(nodes, list | tuple) else ():
            root = _root(node)
            name = names.get(id(call.values.get(root)), "")
            if not name:
                raise NotLocalError("some of its weights are no Parameters of the experts")
            unit = units[part]
            if unit is None:
                whole.add(name)
                continue
            view = _of_one_expert(node, root, site)
            axes[name] = _owned(view, *unit, world, rows.setdefault(name, {}))
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
            raise NotLocalError(f"{count // groups} hidden units do not divide by {world} ranks")
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
