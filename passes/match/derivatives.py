"""Whether what stands between the projections has the derivatives of an activation, and not only its values.

``h.clamp(min=0)`` is relu, but at 0, where a clamp passes a gradient on and relu does not: a layer of zeros learns with one of them only.
Random values hit no such place. So the program's own operations and the activation with its backward formula are run on made-up values:
zeros, limits and the numbers next to them, and ties.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.passes.ir.evaluate import apply
from moefuse.passes.ir.expr import Cast, Expr, Op
from moefuse.passes.ir.expr_algebra import same_expr

_PLACES = (0.0, -0.0, 1e-300, -1e-300, 1e-3, -1e-3, 0.5, -0.7, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 50.0, -50.0)
_GATE, _UP = "gate", "up"


def same_derivative(expr: Expr, gate: Expr, up: Expr | None, activation: str, arguments: tuple[float, ...]) -> bool:
    """Whether a tree of ``gate`` and ``up`` is the activation of both, derivatives included. False where nobody knows."""
    try:
        return _agree(_program(expr, gate, up), up is not None, up is not None and same_expr(gate, up), activation, arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


def _program(expr: Any, gate: Expr, up: Expr | None) -> Any:
    """The tree as nested tuples, the same for all that differ only in what gate and up are."""
    if not isinstance(expr, Expr):
        return "constant", type(expr), expr
    if same_expr(expr, gate):
        return _GATE
    if up is not None and same_expr(expr, up):
        return _UP
    if isinstance(expr, Cast) and expr.rounds:
        return _program(expr.child, gate, up)
    if not isinstance(expr, Op):
        raise ValueError(f"a {type(expr).__name__} between the projections")
    options = tuple((name, _program(value, gate, up)) for name, value in expr.kwargs)
    return "op", expr.name, tuple(_program(a, gate, up) for a in expr.args), options


@functools.lru_cache(256)
def _agree(program: Any, gated: bool, tied: bool, activation: str, arguments: tuple[float, ...]) -> bool:
    """``tied``: gate and up are one value, whose gradient is the sum of both."""
    numbers = [*_PLACES, *(n for c in (*_constants(program), *arguments) for n in _around(c) if math.isfinite(n))]
    pairs = itertools.product(numbers, numbers) if gated and not tied else zip(numbers, numbers, strict=True)
    with torch.inference_mode(False), torch.enable_grad():
        values = torch.tensor(list(pairs), dtype=torch.float64, device="cpu").T
        gate, up = (v.clone().requires_grad_() for v in values)
        theirs = _run(program, gate, gate if tied else up)
        grads = torch.autograd.grad(theirs.sum(), (gate, up) if gated and not tied else (gate,))
    known = ACTIVATIONS[activation]
    gate, up = values
    ours = known.forward(gate, up if gated else None, arguments)
    of_gate, of_up = known.backward(torch.ones_like(gate), gate, up if gated else None, arguments)
    wanted = (of_gate + of_up,) if tied and of_up is not None else (of_gate, of_up) if of_up is not None else (of_gate,)
    return _equal(theirs.detach(), ours) and all(map(_equal, grads, wanted))


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-8, atol=1e-10, equal_nan=True)


def _constants(program: Any) -> Iterator[float]:
    """Numbers of a program."""
    if not isinstance(program, tuple):
        return
    if program[0] == "constant":
        if isinstance(program[2], int | float) and math.isfinite(program[2]):
            yield float(program[2])
        return
    for part in (*program[2], *(value for _, value in program[3])):
        yield from _constants(part)


def _around(number: float) -> Iterator[float]:
    """A number and its negative, and those next to them."""
    for sign in (number, -number):
        yield from (math.nextafter(sign, -math.inf), sign, math.nextafter(sign, math.inf))


def _run(program: Any, gate: Tensor, up: Tensor) -> Any:
    if program == _GATE:
        return gate
    if program == _UP:
        return up
    if program[0] == "constant":
        return program[2]
    _, name, args, options = program
    return apply(name, tuple(_run(a, gate, up) for a in args), {key: _run(value, gate, up) for key, value in options})
