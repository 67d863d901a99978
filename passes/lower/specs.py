"""What the report says of a lowered region: the spec of an op that a template describes, or of grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moefuse.passes.graph.calls import tensor
from moefuse.passes.ir.expr import ExpertVector, Leaf, Linear, computed_in, walk, weight_leaves
from moefuse.passes.ir.expr_algebra import LowRank, size
from moefuse.passes.ir.lowrank import adapters
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.templates import Body
from moefuse.spec import ExpertsSpec


def dtype_of(leaf: Leaf) -> torch.dtype:
    value = tensor(leaf.source)
    assert value is not None
    return value.dtype


def compute_of(region: Region) -> str:
    """The dtype that is computed in, where it is not that of the weights."""
    return str(computed_in(region.expr) or "").removeprefix("torch.")


def layout(leaf: Leaf) -> str:
    return "out-in" if list(leaf.order) == sorted(leaf.order) else "in-out"


def features(leaf: Leaf, which: int) -> int:
    return size(leaf, which)


def fused_spec(region: Region, body: Body) -> ExpertsSpec:
    """What a template found."""
    return ExpertsSpec(
        num_experts=region.num_experts,
        top_k=region.routing.top_k,
        hidden=body.token.width,
        intermediate=features(body.last.weight, 1),
        dtype=str(dtype_of(body.first.weight)).removeprefix("torch."),
        activation=body.activation,
        activation_args=body.arguments,
        gating=body.gating,
        up_first=body.up_first,
        weights="stacked" if body.first.weight.stacked else "per_expert",
        layout=(layout(body.first.weight), layout(body.last.weight)),
        bias=any(p is not None and p.biased for p in (body.first, body.up, body.last)),
        weight_on="input" if body.weight_on_input else "output",
        hidden_out=features(body.last.weight, 0),
        compute=compute_of(region),
        **lora([term for p in body.projections if p is not None for term in p.terms]),
    )


def grouped_spec(region: Region) -> ExpertsSpec:
    """What can be said of a body that no template describes."""
    adapted = adapters(region.expr)
    beside = {id(linear) for a in adapted for linear in a.linears[1:]}
    linears = [e for e in walk(region.expr) if isinstance(e, Linear) and id(e) not in beside]
    below = {id(e): {id(inner) for inner in walk(e.child)} for e in linears}
    linears.sort(key=lambda e: sum(id(e) in inside for inside in below.values()))
    leaves = weight_leaves(region.expr)
    return ExpertsSpec(
        num_experts=region.num_experts,
        top_k=region.routing.top_k,
        hidden=features(linears[-1].weight, 1),
        intermediate=features(linears[0].weight, 1) if len(linears) > 1 else 0,
        dtype=str(dtype_of(linears[0].weight)).removeprefix("torch."),
        activation="custom",
        gating="plain",
        weights="stacked" if leaves[0].stacked else "per_expert",
        layout=(layout(linears[-1].weight), layout(linears[0].weight)),
        bias=any(isinstance(e, ExpertVector) for e in walk(region.expr)),
        compute=compute_of(region),
        **lora([term for a in adapted for term in a.projection.terms]),
    )


def lora(terms: Sequence[LowRank]) -> dict[str, Any]:
    """Ranks and dropouts of adapters, each once."""
    ranks, dropouts = {t.rank for t in terms}, {t.dropout for t in terms} - {0.0}
    return {"lora": tuple(sorted(ranks)), "dropout": tuple(sorted(dropouts))}
