"""Whole regions without compiling: what lift makes of complete facts, and when two regions count as one for the verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.ir.expr import Gate, weight_leaves
from moefuse.passes.ir.expr_algebra import factors
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Refused, Region
from moefuse.passes.match.lift import lift
from moefuse.passes.prove.region_key import signature
from tests.null.rules_case import E, trace


def layer(
    x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any, act: Callable[[Any], Any] = F.silu, experts: Any = range(E), scale: float = 1.0
) -> Any:
    """A loop over experts."""
    out = torch.zeros_like(x)
    for e in experts:
        tok, slot = torch.where(ids == e)
        y = F.linear(act(F.linear(x[tok], w_up[e])), w_out[e]) * scale
        out = out.index_add(0, tok, y * weights[tok, slot, None])
    return out


def regions(function: Callable[..., Any]) -> list[Region | Refused]:
    return list(lift(trace(function).ctx))


def only_region(**options: Any) -> Region:
    (found,) = regions(lambda x, ids, weights, w_up, w_out: layer(x, ids, weights, w_up, w_out, **options))
    assert isinstance(found, Region), found
    return found


def refusal(**options: Any) -> Lost:
    (found,) = regions(lambda x, ids, weights, w_up, w_out: layer(x, ids, weights, w_up, w_out, **options))
    assert isinstance(found, Refused), found
    return found.lost


def test_a_loop_is_one_region() -> None:
    region = only_region()
    assert (region.domain, region.num_experts, region.base) == ("selected", E, None)
    assert region.anchor.name == "index_add_2"
    assert {n.name for n in region.leaves} == {"x", "weights", "w_up", "w_out", "ids"}


def test_two_layers_are_two_regions() -> None:
    def function(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        h = x + layer(x, ids, weights, w_up, w_out)
        return h + layer(h, ids, weights, w_up, w_out)

    found = regions(function)
    assert [type(r) for r in found] == [Region, Region]
    assert not found[0].nodes & found[1].nodes  # type: ignore[union-attr]


@pytest.mark.parametrize(("experts", "present"), [(range(2), "0..1"), ((0, 2), "0, 2"), ((2, 0), "0, 2")])
def test_missing_experts_are_named(experts: Any, present: str) -> None:
    lost = refusal(experts=experts)
    assert (lost.code, lost.details["present"], lost.details["count"]) == ("missing-experts", present, "3")


def test_the_order_of_experts_does_not_matter() -> None:
    assert only_region(experts=(2, 0, 1)).num_experts == E


def test_an_expert_twice_is_refused() -> None:
    assert refusal(experts=(0, 1, 2, 0)).code == "missing-experts"


def masked(x: Any, ids: Any, weights: Any, one: Any, two: Any, one_b: Any, two_b: Any, product: Callable[..., Any], mul: Any) -> Any:
    """Two experts with matrices of their own, each on every token."""
    out = torch.zeros_like(x)
    for e, (first, second) in enumerate(((one, two), (one_b, two_b))):
        out = out + mul(product(F.silu(product(x, first)), second), (weights * (ids == e)).sum(-1, keepdim=True))
    return out


PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "mm": lambda x, w: x.mm(w.t()),
    "matmul by keywords": lambda x, w: torch.matmul(input=x, other=w.t()),
    "mm by keyword": lambda x, w: torch.mm(x, mat2=w.t()),
    "einsum": lambda x, w: torch.einsum("ti,oi->to", x, w),
    "einsum transposed": lambda x, w: torch.einsum("ab, bc -> ac", x, w.T),
    "einsum, weight first": lambda x, w: torch.einsum("oi,ti->to", (w, x)),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x, w.t()),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("mul", [torch.mul, lambda y, w: torch.mul(input=y, other=w)], ids=["positions", "keywords"])
def test_products_of_every_token(product: Any, mul: Any) -> None:
    (found,) = regions(
        lambda x, ids, weights, one, two, one_b, two_b: masked(x, ids, weights, one, two, one_b, two_b, product=product, mul=mul)
    )
    assert isinstance(found, Region), found
    assert (found.domain, found.num_experts) == ("masked", 2)
    assert [leaf.order for leaf in weight_leaves(found.expr) if len(leaf.order) == 2] == [(0, 1)] * 2
    assert [type(f) for f in factors(found.expr)][1] is Gate


UNKNOWN: dict[str, Callable[..., Any]] = {
    "addmm, scaled": lambda x, w: torch.addmm(w[:, 0], x, w.t(), alpha=2),
    "addmm of a matrix": lambda x, w: torch.addmm(x[:, :1], x, w.t()),
    "einsum, another order": lambda x, w: torch.einsum("ti,oi->ot", x, w).t(),
    "tensordot": lambda x, w: torch.tensordot(x, w.t(), 1),
}


@pytest.mark.parametrize("product", UNKNOWN.values(), ids=UNKNOWN)
def test_other_products_of_every_token(product: Any) -> None:
    (found,) = regions(
        lambda x, ids, weights, one, two, one_b, two_b: masked(x, ids, weights, one, two, one_b, two_b, product=product, mul=torch.mul)
    )
    assert isinstance(found, Refused), found
    assert found.lost.code in ("no-rule", "experts-differ")


@pytest.mark.parametrize(
    "together", [lambda ys, w: torch.einsum("te,eth->th", w, torch.stack(ys)), lambda ys, w: (torch.stack(ys, 1) * w[:, :, None]).sum(1)]
)
def test_unknown_experts_beside_each_other_are_refused_by_name(together: Any) -> None:
    def function(x: Any, scores: Any, ids: Any, weights: Any, one: Any, one_b: Any, one_c: Any, two: Any, two_b: Any, two_c: Any) -> Any:
        pairs = ((one, two), (one_b, two_b), (one_c, two_c))
        table = torch.zeros_like(scores).scatter(1, ids, weights)
        return together([torch.tensordot(F.silu(x @ a.t()), b.t(), 1) for a, b in pairs], table)

    (found,) = regions(function)
    assert isinstance(found, Refused), found
    assert (found.lost.code, found.lost.details) == ("no-rule", {"op": "tensordot"})


def test_a_table_that_weighs_plain_tensors_is_no_layer() -> None:
    def function(x: Any, x2: Any, scores: Any, ids: Any, weights: Any) -> Any:
        table = torch.zeros_like(scores).scatter(1, ids, weights)
        return torch.einsum("te,eth->th", table, torch.stack([x, x2, x]))

    assert regions(function) == []


def signed(function: Callable[..., Any], tier: str = "fused", **known: torch.Tensor) -> Any:
    """The signature of the only region; ``known`` are real values of arguments."""
    ctx = trace(function).ctx
    (found,) = lift(ctx)
    assert isinstance(found, Region), found
    inputs = {n.target: n for n in ctx.graph.find_nodes(op="placeholder")}
    return signature(ctx, found, [], tier, {inputs[name]: value for name, value in known.items()})


def of_layer(tier: str = "fused", **options: Any) -> Any:
    return signed(lambda x, ids, weights, w_up, w_out: layer(x, ids, weights, w_up, w_out, **options), tier)


def test_equal_layers_have_equal_signatures() -> None:
    assert of_layer() == of_layer()


@pytest.mark.parametrize("options", [{"act": torch.tanh}, {"scale": 2.0}])
def test_other_layers_have_other_signatures(options: dict[str, Any]) -> None:
    """Anything that the verification could see differently: operations, constants."""
    assert of_layer() != of_layer(**options)


def test_the_tier_is_part_of_the_signature() -> None:
    assert of_layer() != of_layer("grouped")


def started(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any, vector: Any, *, at: str) -> Any:
    """A vector added in place to the accumulator before the experts, or to what it is made of."""
    start = torch.zeros_like(x)
    if at == "before":
        start = start.add(vector)
    out = start.clone()
    if at == "inside":
        out.add_(vector)
    for e in range(E):
        tok, slot = torch.where(ids == e)
        out.index_add_(0, tok, F.linear(F.silu(F.linear(x[tok], w_up[e])), w_out[e]) * weights[tok, slot, None])
    return out


def from_start(at: str) -> Callable[..., Any]:
    return lambda x, ids, weights, w_up, w_out, vector: started(x, ids, weights, w_up, w_out, vector, at=at)


def test_what_the_accumulator_held_is_part_of_the_signature() -> None:
    """A layer that starts from zeros says nothing about one that adds to something; what was written before is no part of either."""
    nowhere, before, inside = (signed(from_start(at)) for at in ("nowhere", "before", "inside"))
    assert nowhere != before
    assert before == inside
