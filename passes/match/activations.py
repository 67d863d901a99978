"""Activation matching: the function between the projections of an expert, and which of its operands are gate and up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from moefuse.passes.ir.evaluate import apply
from moefuse.passes.ir.expr import Cast, Expr, Gate, Linear, Op, Slice
from moefuse.passes.ir.expr_algebra import Projection, bare, factors, projection, same_expr


def gate_and_up(expr: Any, find: Callable[[Any], Projection | None] = projection) -> tuple[str, tuple[float, ...], Any, Any] | None:
    """(activation, its constants, gate, up or None) of the value between the projections. ``find``: what is one projection."""
    plain = unary(expr)
    if plain is not None and find(plain[1]) is not None:
        return plain[0], (), plain[1], None
    found = oai(expr) or clamped(expr)
    if found is not None:
        return found
    if find(expr) is not None:
        return "identity", (), expr, None
    terms = factors(expr)
    silu = _sigmoid_product(terms)
    if silu is not None:
        return "silu", (), silu[0], silu[1]
    squared = _relu_twice(terms)
    if squared is not None:
        return "relu2", (), *squared
    if len(terms) != 2:
        return None
    for a, b in (terms, terms[::-1]):
        activated = unary(a)
        if activated is not None and (isinstance(bare(activated[1]), Slice) or find(activated[1]) is not None):
            return activated[0], (), activated[1], b
    return ("identity", (), terms[0], terms[1]) if all(isinstance(bare(t), Slice) or find(t) for t in terms) else None


def _sigmoid_product(terms: list[Any]) -> tuple[Any, Any] | None:
    """``g * sigmoid(g) * up``, in any order; up is None without a third factor."""
    if len(terms) not in (2, 3):
        return None
    for s in terms:
        if not (isinstance(s, Op) and s.name == "sigmoid"):
            continue
        others = [t for t in terms if t is not s]
        for g in others:
            if same_expr(g, s.args[0]):
                rest = [t for t in others if t is not g]
                return g, rest[0] if rest else None
    return None


def _relu_twice(terms: list[Any]) -> tuple[Any, Any] | None:
    """``relu(g) * relu(g) * up``, in any order."""
    if len(terms) != 3:
        return None
    for i, up in enumerate(terms):
        cut = _same_relu(*(t for at, t in enumerate(terms) if at != i))
        if cut is not None:
            return cut, up
    return None


def _same_relu(a: Any, b: Any) -> Any:
    """What two expressions are the relu of, if that is one value."""
    first, second = _cut(a), _cut(b)
    return first if first is not None and second is not None and same_expr(first, second) else None


def _cut(expr: Any) -> Any:
    """What an expression is the relu of."""
    expr = bare(expr)
    if isinstance(expr, Op) and expr.name == "relu" and len(expr.args) == 1 and not expr.kwargs:
        return expr.args[0]
    bounds = clamp(expr)
    return bounds[0] if bounds is not None and bounds[1:] == (0.0, math.inf) else None


def unary(expr: Any) -> tuple[str, Any] | None:
    """A known activation and its argument."""
    expr = bare(expr)
    if not isinstance(expr, Op) or not expr.args:
        return None
    x = expr.args[0]
    if (cut := _cut(expr)) is not None:
        return "relu", cut
    if expr.name in ("silu", "sigmoid", "tanh", "mish") and len(expr.args) == 1 and not expr.kwargs:
        return expr.name, x
    if expr.name == "gelu":
        kind = expr.options.get("approximate", expr.args[1] if len(expr.args) > 1 else "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(kind, ""), x
    inner = bare(x)
    squared = expr.name == "square" or (expr.name == "pow" and expr.args[1:] == (2,)) or (expr.name == "pow" and expr.args[1:] == (2.0,))
    if squared and (cut := _cut(inner)) is not None:
        return "relu2", cut
    if expr.name == "mul" and len(expr.args) == 2:
        a, b = bare(expr.args[0]), bare(expr.args[1])
        if (cut := _same_relu(a, b)) is not None:
            return "relu2", cut
        product = _sigmoid_product([a, b])
        if product is not None:
            return "silu", product[0]
    return None


def clamp(expr: Any) -> tuple[Any, float, float] | None:
    """``clamp(x, low, high)`` with constants; missing bounds are infinite."""
    expr = bare(expr)
    if not isinstance(expr, Op) or expr.name not in ("clamp", "clamp_max", "clamp_min"):
        return None
    names = {"clamp": ("min", "max"), "clamp_max": ("max",), "clamp_min": ("min",)}[expr.name]
    bounds = dict(zip(names, expr.args[1:], strict=False)) | expr.options
    if any(not isinstance(v, int | float | None) for v in bounds.values()):
        return None
    low, high = bounds.get("min"), bounds.get("max")
    return expr.args[0], -math.inf if low is None else float(low), math.inf if high is None else float(high)


def oai(expr: Any) -> tuple[str, tuple[float, ...], Any, Any] | None:
    """``(clamp(up, ±limit) + 1) * g * sigmoid(alpha * g)`` with ``g = clamp(gate, max=limit)``."""
    terms = factors(expr)
    plus = [t for t in terms if isinstance(t, Op) and t.name == "add" and any(a == 1 for a in t.args if not isinstance(a, Expr))]
    gates = [t for t in terms if t not in plus]
    if len(terms) != 3 or len(plus) != 1:
        return None
    up = clamp(next((a for a in plus[0].args if isinstance(a, Expr)), None))
    for g, s in (gates, gates[::-1]):
        gate = clamp(g)
        if gate is None or up is None or not (isinstance(s, Op) and s.name == "sigmoid"):
            continue
        scaled = bare(s.args[0])
        if not (isinstance(scaled, Op) and scaled.name == "mul"):
            continue
        alpha = [a for a in scaled.args if isinstance(a, int | float)]
        inner = [a for a in scaled.args if isinstance(a, Expr)]
        if len(alpha) == 1 and len(inner) == 1 and same_expr(inner[0], g) and gate[1] == -math.inf and up[1] == -up[2] and up[2] == gate[2]:
            return "swiglu_oai", (float(alpha[0]), gate[2]), gate[0], up[0]
    return None


def clamped(expr: Any) -> tuple[str, tuple[float, ...], Any, Any] | None:
    """``silu(clamp(gate, max=limit)) * clamp(up, ±limit)``."""
    terms = factors(expr)
    if len(terms) != 2:
        return None
    for a, b in (terms, terms[::-1]):
        up = clamp(b)
        gate = clamp(a.args[0]) if isinstance(a, Op) and a.name == "silu" else None
        if up is not None and gate is not None and gate[1] == -math.inf and up[1] == -up[2] and up[2] == gate[2]:
            return "silu_clamp", (gate[2],), gate[0], up[0]
    return None


def vanishes(expr: Any) -> bool:
    """Whether a contribution is exactly zero where the routing table is: then experts that were not chosen may be left out."""
    match expr:
        case Gate():
            return True
        case Linear() | Slice() | Cast():
            return vanishes(expr.child)
        case Op(name="mul"):
            return any(vanishes(a) for a in expr.args)
        case Op(name="div"):
            return vanishes(expr.args[0])
        case Op(name="add" | "sub"):
            return all(vanishes(a) for a in expr.args)
        case Op():
            return vanishes(expr.args[0]) and _zero_at_zero(expr)
    return False


def _zero_at_zero(expr: Op) -> bool:
    if any(isinstance(a, Expr) for a in (*expr.args[1:], *expr.options.values())):
        return False
    try:
        value = apply(expr.name, (torch.zeros(1, 4, dtype=torch.float64), *expr.args[1:]), expr.options)
    except (TypeError, RuntimeError, AttributeError):
        return False
    return bool((value == 0).all())
