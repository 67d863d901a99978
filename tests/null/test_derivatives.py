"""What has the values of an activation is one, where gradients are wanted, only with its derivatives: at zeros, limits and ties too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.ops.meaning.activations import ACTIVATIONS, limits_pass
from moefuse.passes.ir.expr import Linear, walk
from moefuse.passes.match import derivatives
from moefuse.passes.match.derivatives import same_derivative
from moefuse.passes.match.templates import match
from tests.null.test_rules_templates import Between, halves, merged, oai, plain

OTHER: dict[str, Between] = {
    "clamp": lambda h: h.clamp(min=0),
    "clamp of a float": lambda h: torch.clamp(h, 0.0),
    "clamp of minus zero": lambda h: h.clamp(min=-0.0),
    "clamp_min": lambda h: torch.clamp_min(h, 0),
    "clip": lambda h: h.clip(0),
    "cast": lambda h: h.double().clamp(min=0).float(),
}
"""Relu by its values; at 0 a clamp passes gradients on, up to torch 2.13."""

SAME: dict[str, tuple[str, Between]] = {
    "relu": ("relu", F.relu),
    "squared": ("relu2", lambda h: h.clamp(min=0).square()),
    "to the power": ("relu2", lambda h: h.clamp(min=0) ** 2),
    "squared by factors": ("relu2", lambda h: h.clamp(min=0) * h.clamp(min=0)),
    "mixed": ("relu2", lambda h: torch.relu(h) * h.clamp(min=0)),
}
"""Where a factor of 0 takes the difference away."""


@pytest.mark.parametrize("name", OTHER)
def test_a_clamp_is_relu_only_without_gradients(name: str) -> None:
    expr = plain(OTHER[name])
    assert (match(expr, trained=True) is None) == limits_pass()
    body = match(expr, trained=False)
    assert body is not None
    assert body.activation == "relu"


@pytest.mark.parametrize("name", OTHER)
def test_gated_by_a_clamp(name: str) -> None:
    expr = merged(lambda h: OTHER[name](halves(h)[0]) * halves(h)[1])
    assert (match(expr, trained=True) is None) == limits_pass()
    assert match(expr, trained=False) is not None


@pytest.mark.parametrize("name", SAME)
def test_the_same_derivative_in_other_words(name: str) -> None:
    activation, between = SAME[name]
    body = match(plain(between), trained=True)
    assert body is not None
    assert body.activation == activation


def test_limits_of_clamps_pass_gradients_on() -> None:
    """As the ops have it; what is made of minimum and hardtanh is no template."""
    assert match(merged(oai), trained=True) is not None
    assert match(merged(lambda h: F.silu(halves(h)[0].clamp(max=7.0)) * halves(h)[1].clamp(-7.0, 7.0)), trained=True) is not None
    assert match(merged(lambda h: F.silu(halves(h)[0].clamp(max=7.0)) * F.hardtanh(halves(h)[1], -7.0, 7.0)), trained=True) is None


def _parts(between: Between) -> tuple[Any, Any]:
    """What stands between the projections, and the first of them."""
    linears = [e for e in walk(plain(between)) if isinstance(e, Linear)]
    return linears[0].child, linears[-1]


@pytest.mark.parametrize("name", [n for n, a in ACTIVATIONS.items() if not a.needs_gate])
def test_another_activation_is_told(name: str) -> None:
    expr, gate = _parts(F.silu)
    assert same_derivative(expr, gate, None, name, ()) is (name == "silu")


def test_what_cannot_be_run_is_another() -> None:
    expr, gate = _parts(F.silu)
    assert not same_derivative(expr, gate, None, "silu", (1.0, "no number"))  # type: ignore[arg-type]
    assert not same_derivative(expr, expr.node, None, "silu", ())


def test_one_value_for_gate_and_up() -> None:
    """Its gradient is the sum of both."""
    expr, gate = _parts(lambda h: torch.relu(h) * h)
    assert same_derivative(expr, gate, gate, "relu", ())
    expr, gate = _parts(lambda h: h.clamp(min=0) * h)
    assert same_derivative(expr, gate, gate, "relu", ())  # times 0 there
    expr, gate = _parts(lambda h: torch.relu(h) * h * 0.5)
    assert not same_derivative(expr, gate, gate, "relu", ())


def test_equal_trees_are_run_once() -> None:
    """Layers of one model share an answer."""
    derivatives._agree.cache_clear()
    for _ in range(3):
        match(merged(oai), trained=True)
    assert derivatives._agree.cache_info()[:2] == (2, 1)
