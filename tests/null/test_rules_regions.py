"""Whole regions without compiling: what lift makes of complete facts, and when two regions count as one for the verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.facts import Lost
from moefuse.passes.lift import lift
from moefuse.passes.regions import Refused, Region
from moefuse.passes.signature import signature
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


@pytest.mark.parametrize(("experts", "present"), [(range(2), "0..1"), ((0, 2), "[0, 2]"), ((2, 0), "[0, 2]")])
def test_missing_experts_are_named(experts: Any, present: str) -> None:
    lost = refusal(experts=experts)
    assert (lost.code, lost.details) == ("missing-experts", {"present": present, "count": "3"})


def test_the_order_of_experts_does_not_matter() -> None:
    assert only_region(experts=(2, 0, 1)).num_experts == E


def test_an_expert_twice_is_refused() -> None:
    assert refusal(experts=(0, 1, 2, 0)).code == "missing-experts"


def test_equal_layers_have_equal_signatures() -> None:
    assert signature(only_region(), "fused") == signature(only_region(), "fused")


@pytest.mark.parametrize("options", [{"act": torch.tanh}, {"scale": 2.0}])
def test_other_layers_have_other_signatures(options: dict[str, Any]) -> None:
    """Anything that the verification could see differently: operations, constants."""
    assert signature(only_region(), "fused") != signature(only_region(**options), "fused")


def test_the_tier_is_part_of_the_signature() -> None:
    assert signature(only_region(), "fused") != signature(only_region(), "grouped")
