"""Floats of a layer that change between calls: each call computes with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import moefuse
from moefuse import _torch_private
from tests.programs.effects import floats
from tests.programs.effects.broken import put_back
from tests.programs.effects.floats import Floating, Layer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACK = (1.0, 0.7, 0.3, 0.7)


@pytest.mark.parametrize(("spelling", "grad"), [("loop", True), ("masked", False)])
def test_a_limit_that_is_in_a_product_too(spelling: str, grad: bool) -> None:
    """torch's cache would give what was compiled for the second value to the third, and forget to ask for it."""
    assert floats.wrong(Floating(spelling, "clamp and product", "nothing", grad, BACK)) == []
    assert str(moefuse.last_report()).startswith("moefuse: fused 1 of 1"), moefuse.last_report()


def test_a_float_that_was_compiled_before() -> None:
    """What an earlier compilation left in torch's caches has the guards of its floats."""
    p = Floating("slots", "clamp and product", "nothing", False, (1.0, 0.3, 0.7))
    assert floats.wrong(p) == []
    assert floats.wrong(p) == []


def test_a_scale_has_one_program_for_all_values() -> None:
    counters.clear()
    assert floats.wrong(Floating("slots", "product", "temperature", True, (1.0, 0.7, 0.3, 1.9, 0.05)), code=False) == []
    assert counters["stats"]["unique_graphs"] == 2, "of the first value, and of any other"


@pytest.mark.parametrize("hidden", floats.HIDDEN)
@pytest.mark.thorough
def test_each_use(hidden: str) -> None:
    for grad in (False, True):
        assert floats.wrong(Floating("loop", hidden, "nothing", grad, BACK), code=False) == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.thorough
def test_drawn_programs(seed: int) -> None:
    p = floats.draw(seed)
    assert floats.wrong(p) == [], p


@pytest.mark.parametrize("name", floats.FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    with put_back(floats.FAULTS[name]):
        assert floats.wrong(floats.SHOWN[name])


def test_which_graphs_have_floats() -> None:
    """Numbers that only the run reads out of a tensor are no such floats: nothing makes a constant of them."""
    found: list[bool] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.append(_torch_private.has_floats(gm))
        return gm.forward

    layer = Layer(floats.SHOWN["floats that no key has"])

    def scaled(x: Tensor) -> Tensor:
        return x * layer.limit

    def read(x: Tensor) -> Tensor:
        return x * x.sum().item()

    compiled = torch.compile(scaled, backend=backend)
    for value in (1.0, 0.5):
        layer.limit = value
        compiled(torch.ones(2))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(read, backend=backend)(torch.ones(2))
    assert found == [False, True, False]
