"""``moefuse::experts_coded`` in PyTorch alone: the experts of ``cpu.py``, each unpacked while it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefuse.ops.meaning.call import Stack
from moefuse.ops.meaning.coded_weights import CodedWeights, codes_of
from moefuse.ops.meaning.reference import expert_vector
from moefuse.ops.meaning.token_codes import as_rounded
from moefuse.runtime import backward, cpu
from moefuse.runtime.cpu import Lists, SortedRows, cut_groups
from moefuse.runtime.expert_grads import empty_grads, vector_grads
from moefuse.runtime.routing import Group, groups_of

if TYPE_CHECKING:
    from moefuse.ops.meaning.coded_calls import CodedCall, CodedGrads


def experts_coded(call: CodedCall) -> Tensor:
    """``moefuse::experts_coded``."""
    with torch.autocast(call.x.device.type, enabled=False):
        return cpu.experts(call.decoded, RoundedRows)


def experts_coded_forward(call: CodedCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets) for backward."""
    with torch.autocast(call.x.device.type, enabled=False):
        return cpu.experts_forward(call.decoded, RoundedRows)


def experts_coded_backward(call: CodedGrads) -> list[Tensor]:
    """The gradients that are wanted, flattened; they pass the rounding of activations as if it was not there."""
    return backward.experts_backward(call.decoded)


def grouped_linear_coded(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    """``moefuse::grouped_linear_coded``."""
    weights, ends = _weights(w, codes, encoding, xs), offsets.tolist()
    out = xs.new_empty((xs.shape[0], weights.shape[0]))
    out[ends[-1] :].zero_()
    groups = groups_of(ends)
    if groups:
        cpu.project(out, xs, Stack(weights, b), groups)
    return out


def grouped_linear_coded_backward(
    grad: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of xs and b that ``needs`` asks for, flattened in that order."""
    ends, grad, out = offsets.tolist(), grad.contiguous(), list[Tensor]()
    groups = groups_of(ends)
    if needs[0]:
        weights = _weights(w, codes, encoding, grad)
        d_xs = grad.new_empty((grad.shape[0], weights.shape[1]))
        d_xs[ends[-1] :].zero_()
        if groups:
            cpu.back_project(d_xs, grad, weights, groups)
        out.append(d_xs)
    if needs[1]:
        d_b = empty_grads(b, groups, 1)
        if groups:
            vector_grads(d_b, grad, groups)
        out += d_b
    return out


def _weights(w: Lists, codes: Lists, encoding: str, x: Tensor) -> CodedWeights:
    return CodedWeights(w, codes_of(w, codes, encoding), x.dtype)


class RoundedRows(SortedRows):
    """Experts whose projections may round their rows."""

    def project(self, out: Tensor, rows: Tensor, stack: Stack, chunk: list[Group]) -> None:
        """out [n, F] = one projection of rows [n, I] of the chunk."""
        activation = stack.rounding
        if activation is None:
            super().project(out, rows, stack, chunk)
            return
        wide = as_rounded(activation, rows).to(self.wide)
        for (e, _, _), into, part in cut_groups(chunk, out, wide):
            weight, bias = stack.weight[e].to(self.wide).t(), expert_vector(stack.bias, e)
            into.copy_(part @ weight if bias is None else torch.addmm(bias.to(out.dtype).to(self.wide), part, weight))
