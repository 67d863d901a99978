"""From expressions to known experts: every activation in its spellings, both gate orders, every storage; and near-misses of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.passes.ir.anti_unify import generalise
from moefuse.passes.ir.expr import Expr, Linear, SlotWeight, has_linear, walk
from moefuse.passes.ir.expr_algebra import factors, same_expr
from moefuse.passes.ir.facts import Lost, Rows
from moefuse.passes.match.activations import vanishes
from moefuse.passes.match.templates import Body, match
from tests.null.rules_case import E, H, I, K, T, fact_of, trace

Between = Callable[..., Any]


def expression(function: Callable[..., Any]) -> Expr:
    fact = fact_of(function)
    assert isinstance(fact, Rows), f"{fact}"
    return fact.expr


def projected(x: Any, ids: Any, w: Any) -> Any:
    return torch.einsum("th,tkih->tki", x, w[ids])


def back(a: Any, ids: Any, w_out: Any) -> Any:
    return torch.einsum("tki,tkhi->tkh", a, w_out[ids])


def merged(between: Between) -> Expr:
    """An expert over one merged projection: ``between`` gets its 2I features."""
    return expression(lambda x, ids, weights, w_in, w_out: back(between(projected(x, ids, w_in)), ids, w_out) * weights[..., None])


def plain(between: Between) -> Expr:
    return expression(lambda x, ids, weights, w_up, w_out: back(between(projected(x, ids, w_up)), ids, w_out) * weights[..., None])


def body_of(expr: Expr) -> Body:
    body = match(expr, trained=True)
    assert body is not None
    return body


def halves(h: Any) -> tuple[Any, Any]:
    gate, up = h.chunk(2, dim=-1)
    return gate, up


def sigmoid_gate(h: Any) -> Any:
    gate, up = halves(h)
    return gate * torch.sigmoid(gate) * up


PLAIN: list[tuple[str, Between]] = [
    ("silu", F.silu),
    ("silu", lambda h: h * torch.sigmoid(h)),
    ("silu", lambda h: torch.sigmoid(h) * h),
    ("gelu", F.gelu),
    ("gelu", lambda h: F.gelu(h, approximate="none")),
    ("gelu_tanh", lambda h: F.gelu(h, approximate="tanh")),
    ("relu", torch.relu),
    ("relu", lambda h: F.relu(h)),
    ("relu2", lambda h: torch.relu(h) ** 2),
    ("relu2", lambda h: torch.relu(h).square()),
    ("relu2", lambda h: torch.square(F.relu(h))),
    ("relu2", lambda h: torch.relu(h) * h.clamp(min=0)),
    ("sigmoid", torch.sigmoid),
    ("tanh", torch.tanh),
    ("mish", F.mish),
    ("identity", lambda h: h),
    ("silu", lambda h: F.silu(h.float()).to(torch.float32)),
]


@pytest.mark.parametrize(("name", "between"), PLAIN)
def test_plain_experts(name: str, between: Between) -> None:
    body = body_of(plain(between))
    assert (body.activation, body.gating, body.up, body.weight_on_input) == (name, "plain", None, False)
    assert isinstance(body.weight, SlotWeight)


@pytest.mark.parametrize(("name", "between"), [p for p in PLAIN if p[0] != "identity"])
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("gate_left", [False, True])
def test_gated_experts(name: str, between: Between, up_first: bool, gate_left: bool) -> None:
    """Which half is the gate is read from the activation, not from the order of the factors."""

    def gated(h: Any) -> Any:
        first, second = halves(h)
        gate, up = (second, first) if up_first else (first, second)
        return between(gate) * up if gate_left else up * between(gate)

    body = body_of(merged(gated))
    assert (body.activation, body.gating, body.up_first) == (name, "merged", up_first)


STORED: list[tuple[str, bool, Between]] = [
    ("merged", False, lambda h: F.silu(h[..., :I]) * h[..., I:]),
    ("merged", True, lambda h: h[..., :I] * F.silu(h[..., I:])),
    ("merged", False, lambda h: F.silu(h.split(I, -1)[0]) * h.split(I, -1)[1]),
    ("merged", False, lambda h: F.silu(h.narrow(-1, 0, I)) * h.narrow(-1, I, I)),
    ("merged", False, lambda h: F.silu(h.unflatten(-1, (2, I))[..., 0, :]) * h.unflatten(-1, (2, I))[..., 1, :]),
    ("interleaved", False, lambda h: F.silu(h[..., ::2]) * h[..., 1::2]),
    ("interleaved", True, lambda h: h[..., ::2] * F.silu(h[..., 1::2])),
    ("interleaved", False, lambda h: F.silu(h.unflatten(-1, (I, 2))[..., 0]) * h.unflatten(-1, (I, 2))[..., 1]),
]


@pytest.mark.parametrize(("gating", "up_first", "between"), STORED)
def test_storage_of_gate_and_up(gating: str, up_first: bool, between: Between) -> None:
    body = body_of(merged(between))
    assert (body.gating, body.up_first) == (gating, up_first)


def test_split_projections() -> None:
    """Two tensors, or a half of one: each projection has its own weight."""

    def function(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any, w_in: Any) -> Any:
        gate = projected(x, ids, w_in[:, :I])
        return back(F.silu(gate) * projected(x, ids, w_up), ids, w_out) * weights[..., None]

    body = body_of(expression(function))
    assert (body.gating, body.activation) == ("split", "silu")
    assert body.up is not None
    assert body.up.weight.source.name == "w_up"


def oai(h: Any, alpha: float = 1.702, low: float = -7.0, high: float = 7.0, top: float = 7.0, one: float = 1) -> Any:
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(max=top), up.clamp(min=low, max=high)
    return (up + one) * (gate * torch.sigmoid(gate * alpha))


def test_gpt_oss_gate() -> None:
    body = body_of(merged(oai))
    assert (body.activation, body.arguments, body.gating) == ("swiglu_oai", (1.702, 7.0), "interleaved")


def test_clamped_silu() -> None:
    def between(h: Any) -> Any:
        gate, up = halves(h)
        return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

    body = body_of(merged(between))
    assert (body.activation, body.arguments) == ("silu_clamp", (10.0,))


NEAR: list[tuple[str, Between]] = [
    ("two_limits", lambda h: oai(h, top=5.0)),
    ("lopsided_limit", lambda h: oai(h, low=-6.0)),
    ("plus_two", lambda h: oai(h, one=2)),
    ("thirds", lambda h: F.silu(h[..., : I - 1]) * h[..., I + 1 :]),
    ("overlapping", lambda h: F.silu(h[..., :I]) * h[..., I - 1 : -1]),
    ("same_half_twice", lambda h: F.silu(h[..., :I]) * h[..., :I]),
    ("sum_instead_of_product", lambda h: F.silu(halves(h)[0]) + halves(h)[1]),
    ("both_activated", lambda h: F.silu(halves(h)[0]) * torch.tanh(halves(h)[1])),
    ("softmax", lambda h: halves(h)[0].softmax(-1) * halves(h)[1]),
    ("shifted", lambda h: F.silu(halves(h)[0] + 1.0) * halves(h)[1]),
    ("scaled", lambda h: F.silu(halves(h)[0]) * halves(h)[1] * 0.5),
    ("other_sigmoid", lambda h: halves(h)[0] * torch.sigmoid(halves(h)[1]) * halves(h)[1] * halves(h)[0]),
    ("sigmoid_alpha", lambda h: halves(h)[0] * torch.sigmoid(halves(h)[0] * 1.702) * halves(h)[1]),
    ("cubed by factors", lambda h: torch.relu(halves(h)[0]) * torch.relu(halves(h)[0]) * torch.relu(halves(h)[0])),
    ("both_halves_cut", lambda h: torch.relu(halves(h)[0]) * torch.relu(halves(h)[1]) * halves(h)[0]),
    ("cubed", lambda h: torch.relu(halves(h)[0]) ** 3 * halves(h)[1]),
    ("leaky", lambda h: F.leaky_relu(halves(h)[0]) * halves(h)[1]),
]


@pytest.mark.parametrize("between", [b for _, b in NEAR], ids=[n for n, _ in NEAR])
def test_near_misses_of_templates(between: Between) -> None:
    """Not one of the fused experts; the grouped tier runs them as they are."""
    expr = expression(lambda x, ids, w_in: between(projected(x, ids, w_in)))
    assert has_linear(expr)
    whole = lambda x, ids, weights, w_in, w_out: between(projected(x, ids, w_in))  # noqa: E731
    assert match(expression(whole), trained=True) is None


def test_the_weight_may_stand_on_the_input() -> None:
    def function(x: Any, ids: Any, weights: Any, w_in: Any, w_out: Any) -> Any:
        rows = (x.unsqueeze(1) * weights.unsqueeze(-1)).reshape(T * K, H)
        flat = ids.reshape(-1)
        h = torch.bmm(w_in[flat], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = halves(h)
        return torch.bmm(w_out[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)

    body = body_of(expression(function))
    assert body.weight_on_input
    assert isinstance(body.weight, SlotWeight)


def test_weights_on_both_sides_are_no_template() -> None:
    expr = expression(
        lambda x, ids, weights, w_up, w_out: back(projected(x, ids, w_up) * weights[..., None], ids, w_out) * weights[..., None]
    )
    assert match(expr, trained=True) is None


def test_a_squared_weight_is_no_template() -> None:
    assert match(plain(lambda h: h * 1.0), trained=True) is None
    twice = lambda x, ids, weights, w_up, w_out: back(F.silu(projected(x, ids, w_up)), ids, w_out) * weights[..., None] * weights[..., None]  # noqa: E731
    assert match(expression(twice), trained=True) is None


def test_every_activation_of_the_ops_is_reached() -> None:
    """An activation that no template leads to would be dead code in the ops."""
    assert {name for name, _ in PLAIN} | {"swiglu_oai", "silu_clamp"} == set(ACTIVATIONS)


def test_factors_look_through_casts() -> None:
    expr = expression(lambda x, ids, weights, w_up: (projected(x, ids, w_up).double() * weights[..., None]).float() * 2.0)
    assert [type(f).__name__ for f in factors(expr)] == ["Linear", "SlotWeight", "float"]


def test_same_expressions() -> None:
    """Equal is what computes the same value from the same tensors; names of nodes do not matter."""
    a, b = plain(F.silu), plain(F.silu)
    assert same_expr(a, a)
    assert not same_expr(a, b)  # other graphs, other tensors
    both = expression(lambda x, ids, w_up: F.silu(projected(x, ids, w_up)) * F.silu(projected(x, ids, w_up)))
    left, right = both.children
    assert left is not right
    assert same_expr(left, right)
    other = expression(lambda x, x2, ids, w_up: F.silu(projected(x, ids, w_up)) * F.silu(projected(x2, ids, w_up)))
    assert not same_expr(*other.children)


# --- vanishing where an expert was not chosen -----------------------------------------------------------------------------------


def gated_by_table(between: Callable[[Any, Any], Any]) -> Expr:
    """``between(outputs of all experts [T, E, H], table [T, E, 1])``."""

    def function(x: Any, ids: Any, weights: Any, scores: Any, w_up: Any) -> Any:
        table = torch.zeros_like(scores).scatter(1, ids, weights)
        return between(torch.einsum("th,eih->tei", x, w_up), table.unsqueeze(-1))

    return expression(function)


VANISHES: list[tuple[bool, Callable[[Any, Any], Any]]] = [
    (True, lambda y, w: y * w),
    (True, lambda y, w: w * y * 2.0),
    (True, lambda y, w: torch.tanh(y * w)),
    (True, lambda y, w: (y * w).to(torch.bfloat16)),
    (True, lambda y, w: (y * w) / 3.0),
    (True, lambda y, w: y * w + y * w),
    (False, lambda y, w: y),
    (False, lambda y, w: y * w + y),
    (False, lambda y, w: y * w + 1.0),
    (False, lambda y, w: torch.exp(y * w)),
    (False, lambda y, w: torch.sigmoid(y * w)),
    (False, lambda y, w: (y * w).softmax(-1)),
]


@pytest.mark.parametrize(("expected", "between"), VANISHES)
def test_vanishing(expected: bool, between: Callable[[Any, Any], Any]) -> None:
    """Experts that were not chosen may be left out only if they would add exactly zero."""
    assert vanishes(gated_by_table(between)) is expected


# --- one expression for all experts ---------------------------------------------------------------------------------------------


def per_expert(change: Callable[[int, Any], Any], weight_of: Callable[[int], int] = lambda e: e) -> Expr | Lost:
    """Generalise ``change(e, silu(linear(rows of e, w_up[e])))`` over all experts of one graph."""

    def function(x: Any, ids: Any, w_up: Any) -> Any:
        out = []
        for e in range(E):
            tok = torch.where(ids == e)[0]
            out.append(change(e, F.silu(F.linear(x[tok], w_up[weight_of(e)]))))
        return tuple(out)

    traced = trace(function)
    facts = [traced.ctx.facts[n] for n in traced.returned]  # type: ignore[attr-defined]
    assert all(isinstance(f, Rows) for f in facts), facts
    return generalise([f.expr for f in facts], list(range(E)), traced.returned[0])  # type: ignore[index]


def test_equal_experts_become_one() -> None:
    found = per_expert(lambda e, h: h * 2.0)
    assert isinstance(found, Expr)
    (linear,) = [x for x in walk(found) if isinstance(x, Linear)]
    assert (linear.weight.expert, linear.weight.source.name) == (None, "w_up")


DIFFERENT: list[tuple[str, Callable[[int, Any], Any]]] = [
    ("operation tanh instead of exp", lambda e, h: torch.tanh(h) if e == 2 else torch.exp(h)),
    ("`mul` with 3.0 instead of 2.0", lambda e, h: h * (3.0 if e == 2 else 2.0)),
    ("`exp` where expert 0 has some of the features", lambda e, h: torch.exp(h[:, :4]) if e == 2 else h[:, :4]),
    ("slice start 1 instead of 0", lambda e, h: h[:, 1:5] if e == 2 else h[:, 0:4]),
    ("dtype torch.float16 instead of torch.bfloat16", lambda e, h: h.half() if e == 2 else h.bfloat16()),
    ("`clamp` with other arguments", lambda e, h: h.clamp(0.0) if e == 2 else h.clamp(0.0, 1.0)),
]


@pytest.mark.parametrize(("detail", "change"), DIFFERENT)
def test_different_experts_are_told_apart(detail: str, change: Callable[[int, Any], Any]) -> None:
    found = per_expert(change)
    assert isinstance(found, Lost)
    assert (found.code, found.details) == ("experts-differ", {"expert": "2", "detail": detail})


def test_infinite_bounds() -> None:
    """A clamp with one bound is no limit on the other side."""
    body = match(merged(lambda h: oai(h, top=math.inf)), trained=True)
    assert body is None
