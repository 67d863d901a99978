"""``moefuse::grouped_linear_coded`` in PyTorch alone: each expert's weights are unpacked while they are used."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moefuse.ops.meaning.call import Stack
from moefuse.ops.meaning.coded_weights import CodedWeights, codes_of
from moefuse.runtime import cpu
from moefuse.runtime.cpu import Lists
from moefuse.runtime.expert_grads import empty_grads, vector_grads
from moefuse.runtime.routing import groups_of


def grouped_linear_coded(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    """``moefuse::grouped_linear_coded``: rows xs [S, in], cut by offsets [E + 1], to [S, out]; zeros for rows of no expert."""
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
    """Gradients of xs [S, in] and b that ``needs`` asks for, flattened in that order, from grad [S, out]."""
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
