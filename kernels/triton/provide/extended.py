"""Experts whose projections have codes or terms on CUDA: who computes them."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moefuse.kernels.triton.provide import coded, lora
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.grad_calls import GradCall


def supports(call: ExpertsCall | GradCall, *rest: object) -> str | None:
    """None, or why no kernel takes a call."""
    if _has_codes(call) and any(stack.term is not None for stack in call.stacks):
        return "no kernel adds low-rank terms to products with weights in few bits"
    refusal: str | None = _kernels(call).supports(call)
    return refusal


def experts_extended(call: ExpertsCall) -> Tensor:
    """The output [T, Hout]."""
    out: Tensor = _kernels(call).experts(call)
    return out


def experts_extended_forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets, u) for backward."""
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _kernels(call).experts_forward(call)
    return found


def experts_extended_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """h once more, for the slots in the order that they were sorted into."""
    h: Tensor = _kernels(call).experts_hidden(call, order, offsets, u)
    return h


def experts_extended_backward(call: GradCall) -> list[Tensor]:
    """The gradients that ``call.need`` asks for, flattened."""
    grads: list[Tensor] = _kernels(call).experts_backward(call)
    return grads


def _has_codes(call: ExpertsCall | GradCall) -> bool:
    return any(stack.codes is not None for stack in call.stacks)


def _kernels(call: ExpertsCall | GradCall) -> ModuleType:
    return coded if _has_codes(call) else lora
