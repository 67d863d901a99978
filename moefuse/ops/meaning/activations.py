"""The activations an expert may use: one table of forward and derivative formulas, written in plain torch on float32 or float64 tensors.

A gated expert computes ``forward(gate, up, args)``, a plain one ``forward(h, None, args)``. The formulas take and return the
accumulation dtype; rounding to the storage dtype is the caller's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten

Forward = Callable[[Tensor, "Tensor | None", Sequence[float]], Tensor]
Backward = Callable[[Tensor, Tensor, "Tensor | None", Sequence[float]], "tuple[Tensor, Tensor | None]"]


@dataclass(frozen=True)
class Activation:
    """One row of the table.

    Attributes:
        num_args: how many constants ``activation_args`` holds.
        needs_gate: True when the formula mixes gate and up, so an expert without a gate cannot use it.
        arg_names: names of the constants in order, for messages.
        forward: ``(gate, up or None, args) -> result``; out of place, differentiable by autograd.
        backward: ``(grad of result, gate, up or None, args) -> (grad of gate, grad of up or None)``.
    """

    num_args: int
    needs_gate: bool
    arg_names: tuple[str, ...]
    forward: Forward
    backward: Backward


def _pointwise(function: Callable[[Tensor], Tensor], derivative: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    """An activation of one value: ``function(gate) * up`` when gated, ``function(h)`` when plain. ``derivative(grad, h)`` is its vjp."""

    def forward(gate: Tensor, up: Tensor | None, args: Sequence[float]) -> Tensor:
        return function(gate) if up is None else function(gate) * up

    def backward(grad: Tensor, gate: Tensor, up: Tensor | None, args: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        if up is None:
            return derivative(grad, gate), None
        return derivative(grad * up, gate), grad * function(gate)

    return Activation(0, False, (), forward, backward)


def _sigmoid_vjp(grad: Tensor, h: Tensor) -> Tensor:
    out: Tensor = _aten.sigmoid_backward(grad, torch.sigmoid(h))
    return out


def _tanh_vjp(grad: Tensor, h: Tensor) -> Tensor:
    out: Tensor = _aten.tanh_backward(grad, torch.tanh(h))
    return out


def _relu_vjp(grad: Tensor, h: Tensor) -> Tensor:
    out: Tensor = _aten.threshold_backward(grad, h, 0)
    return out


def _silu_vjp(grad: Tensor, h: Tensor) -> Tensor:
    out: Tensor = _aten.silu_backward(grad, h)
    return out


def _mish_vjp(grad: Tensor, h: Tensor) -> Tensor:
    out: Tensor = _aten.mish_backward(grad, h)
    return out


def _gelu(approximate: str) -> Activation:
    def derivative(grad: Tensor, h: Tensor) -> Tensor:
        out: Tensor = _aten.gelu_backward(grad, h, approximate=approximate)
        return out

    return _pointwise(lambda h: torch.nn.functional.gelu(h, approximate=approximate), derivative)


def _relu2_vjp(grad: Tensor, h: Tensor) -> Tensor:
    return _relu_vjp(grad * 2 * torch.relu(h), h)


@functools.cache
def limits_pass() -> bool:
    """Whether torch gives a value that is exactly a clamp's limit the gradient of what it became: up to torch 2.13 it does.

    torch is asked, once, in a thread of its own, where no mode of the caller is on.
    """
    found = []

    def ask() -> None:
        value = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        found.append(bool(torch.autograd.grad(value.clamp(max=1.0), value)[0]))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def _inside(grad: Tensor, value: Tensor, low: float | None, high: float) -> Tensor:
    """The gradient behind a clamp. Selected and not multiplied, as torch does: an infinite one is zero where it is off."""
    below = torch.le if limits_pass() else torch.lt
    mask = below(value, high)
    return torch.where(mask if low is None else mask & below(-value, -low), grad, 0.0)


def _swiglu_oai_forward(gate: Tensor, up: Tensor | None, args: Sequence[float]) -> Tensor:
    assert up is not None
    alpha, limit = args
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    return g * torch.sigmoid(g * alpha) * (u + 1)


def _swiglu_oai_backward(grad: Tensor, gate: Tensor, up: Tensor | None, args: Sequence[float]) -> tuple[Tensor, Tensor | None]:
    assert up is not None
    alpha, limit = args
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(g * alpha)
    dg = grad * (u + 1) * s * (1 + alpha * g * (1 - s))
    du = grad * g * s
    return _inside(dg, gate, None, limit), _inside(du, up, -limit, limit)


def _silu_clamp_forward(gate: Tensor, up: Tensor | None, args: Sequence[float]) -> Tensor:
    assert up is not None
    (limit,) = args
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _silu_clamp_backward(grad: Tensor, gate: Tensor, up: Tensor | None, args: Sequence[float]) -> tuple[Tensor, Tensor | None]:
    assert up is not None
    (limit,) = args
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    dg, du = _silu_vjp(grad * u, g), grad * torch.nn.functional.silu(g)
    return _inside(dg, gate, None, limit), _inside(du, up, -limit, limit)


ACTIVATIONS: dict[str, Activation] = {
    "silu": _pointwise(torch.nn.functional.silu, _silu_vjp),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": _pointwise(torch.relu, _relu_vjp),
    "relu2": _pointwise(lambda h: torch.relu(h).square(), _relu2_vjp),
    "sigmoid": _pointwise(torch.sigmoid, _sigmoid_vjp),
    "tanh": _pointwise(torch.tanh, _tanh_vjp),
    "identity": _pointwise(lambda h: h, lambda grad, h: grad),
    "swiglu_oai": Activation(2, True, ("alpha", "limit"), _swiglu_oai_forward, _swiglu_oai_backward),
    "silu_clamp": Activation(1, True, ("limit",), _silu_clamp_forward, _silu_clamp_backward),
    "mish": _pointwise(torch.nn.functional.mish, _mish_vjp),
}
