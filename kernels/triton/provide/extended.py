"""Experts whose projections are held in few bits or have low-rank terms, on CUDA: who computes a call.

No weight is unpacked in memory as a whole, in forward or backward: the gradient of a projection's rows reads the same storage again.
Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moefuse.kernels.triton.host import coded, token_codes
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide import extended_grads, extended_layer, lora_vectors, packed, projections, rounded, words
from moefuse.kernels.triton.provide.choice import REST, Kernel, choose
from moefuse.ops.meaning.call import ExpertsCall, Stack
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.grad_calls import GradCall


def supports(call: ExpertsCall | GradCall, *rest: object) -> str | None:
    """None, or why no kernel takes a call."""
    given = [(stack.codes, stack) for stack in call.stacks if stack.codes is not None]
    if call.dtype not in (coded.DTYPES if given else DTYPES):
        return f"no kernel for {call.dtype}"
    refused = [coded.refusal(codes, stack.weight[0]) for codes, stack in given]
    refused += [token_codes.refusal(codes, call.x) for codes, stack in given if stack.rounding is not None]
    return next((reason for reason in refused if reason is not None), None)


def experts_extended(call: ExpertsCall) -> Tensor:
    """The output [T, Hout]."""
    found: Tensor = _inference(as_bytes(call))
    return found


def experts_extended_forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets, u) for backward; dead rows of h and u are zeros."""
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _forward(as_bytes(call))
    return found


def experts_extended_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """h once more, for the slots in the order that they were sorted into; u is what forward made of them."""
    found: Tensor = _hidden(as_bytes(call), order, offsets, u)
    return found


def experts_extended_backward(call: GradCall) -> list[Tensor]:
    """The gradients that ``call.need`` asks for, flattened."""
    found: list[Tensor] = _backward(as_bytes(call))
    return found


def as_bytes(call: Any) -> Any:
    """The call with float8 as bytes: kernels make numbers of these by themselves, on devices without it as well."""

    def of(stack: Stack) -> Stack:
        if stack.codes is None:
            return stack
        encoding, scale, zero = stack.codes
        return stack._replace(weight=coded.as_bytes(stack.weight), codes=Codes(encoding, coded.as_bytes(scale), coded.as_bytes(zero)))

    return call.with_stacks(tuple(map(of, call.stacks)))


def _vectors(call: ExpertsCall) -> str | None:
    if any(stack.codes is not None for stack in call.stacks):
        return "weights are held in few bits"
    return "many slots, or experts that it does not read" if lora_vectors.blocks_of(call) is None else None


def _where(refusal: Callable[[ExpertsCall], str | None], kind: str, wanted: bool) -> Callable[[ExpertsCall], str | None]:
    """The refusal of a kernel that is asked only where codes of a projection are of a kind (``wanted``), or those of none."""

    def function(call: ExpertsCall) -> str | None:
        if any(stack.term is not None for stack in call.stacks):
            return projections.MIXED
        kinds = {coded.kind_of(stack.codes.encoding)[0] for stack in call.stacks if stack.codes is not None}
        return refusal(call) if wanted is (kind in kinds) else "codes are of another kind"

    return function


def _words(call: ExpertsCall) -> str | None:
    return "rows are rounded" if _rounds(call) else words.refusal(call)


def _rounds(call: ExpertsCall) -> bool:
    return any(stack.rounding is not None for stack in call.stacks)


def _words_rounded(call: ExpertsCall) -> str | None:
    return words.refusal(call) if _rounds(call) else "rows are not rounded"


def _layer(call: ExpertsCall) -> Tensor:
    return extended_layer.forward(call, keep=False)[0]


KERNELS = (
    Kernel("vectors and low-rank terms", _vectors, (0, REST), lora_vectors.experts),
    Kernel("packed weights, e2m1, specialised warps", _where(packed.refusal, "e2m1", True), (7, REST), packed.experts),
    Kernel("packed weights, specialised warps", _where(packed.refusal, "e2m1", False), (4, REST), packed.experts),
    Kernel("words, rows rounded", _words_rounded, (0, 5), words.experts),
    Kernel("words, codes that count on", _where(_words, "range", True), (0, 24), words.experts),
    Kernel("words, other codes", _where(_words, "range", False), (0, 40), words.experts),
    Kernel("rows rounded, specialised warps", rounded.refusal, (8, REST), rounded.experts),
    Kernel("a product for each projection", lambda _: None, (0, REST), _layer),
)
"""Inference. Rows were measured on an H200 (benchmarks/results/coded-h200.json)."""


@recorded
def _inference(call: ExpertsCall) -> Tensor:
    found: Tensor = choose(KERNELS, call.ids.numel() / call.w_in.experts, call).run(call)
    return found


@recorded
def _forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return extended_layer.forward(call, keep=True)


_hidden = recorded(extended_layer.hidden)
_backward = recorded(extended_grads.backward)
