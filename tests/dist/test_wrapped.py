"""DDP around models whose experts are spread, compiled and wrapped in either order."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.dist import layers, wrapped
from tests.dist.workers import Workers

CASES: dict[str, tuple[type[nn.Module], str, dict[str, Any], bool, bool]] = {
    # Each case says why it is there: (kind, form, settings of DDP, one graph, no_sync).
    "cut at buckets": (layers.Stacked, "compiled around DDP", {"gradient_as_bucket_view": True}, False, False),
    "one graph, unused": (layers.Listed, "compiled around DDP", {"find_unused_parameters": True}, True, False),
    "the model is compiled, not reduced every time": (layers.Stacked, "DDP around compiled", {}, False, True),
    "each part by itself, experts at its root": (layers.Stacked, "parts", {}, False, False),
    "compiled parts, static": (layers.Listed, "compiled parts", {"static_graph": True}, False, False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_ddp(two: Workers, name: str) -> None:
    for outs, grads, fused in two.run(wrapped.ddp, *CASES[name]):
        assert outs <= 1e-5
        assert grads <= 1e-6
        assert fused == 4  # two layers, twice: the second micro-batch has another size


def test_ddp_of_one_dimension(two: Workers) -> None:
    assert (
        two.run(wrapped.ddp_of_a_mesh)
        == [
            "gate_up of Stacked is no DTensor any more: something has put another tensor in its place since moefuse.parallelize, as a "
            "parametrization that stays, torch.func.functional_call with full weights, or "
            "DistributedDataParallel(device_mesh=...), which has to be called without it"
        ]
        * 2
    )
