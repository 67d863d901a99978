"""Gradients of expert weights and vectors from consecutive rows of each expert, and products of rows with vectors: portable code."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops.meaning.reference import expert_vector, expert_weight
from moefuse.runtime.cpu import Lists
from moefuse.runtime.gemm import mm_into
from moefuse.runtime.routing import Group


def empty_grads(tensors: Lists, groups: list[Group], rank: int) -> list[Tensor]:
    """Uninitialised gradients with the strides of their tensors (rank of one expert's: 2 for weights, 1 for vectors).

    The parts of experts without rows are zeros already.
    """
    grads = [torch.empty_like(t) for t in tensors]
    if not grads:
        return grads
    parts = grads[0] if len(grads) == 1 and grads[0].dim() > rank else grads
    used = {e for e, _, _ in groups}
    if len(used) * 4 < len(parts):
        for g in grads:
            g.zero_()
        return grads
    for e in range(len(parts)):
        if e not in used:
            parts[e].zero_()
    return grads


def weight_grads(grads: Lists, d_out: Tensor, rows: Tensor, groups: list[Group]) -> None:
    """Gradient [out, in] of each expert in ``groups``: d_out[i].T @ rows[i]."""
    base = groups[0][1]
    for e, start, end in groups:
        part = slice(start - base, end - base)
        target = expert_weight(grads, e)
        if target.stride(0) == 1:  # stored in-out: fill the transpose, whose rows are contiguous
            mm_into(target.t(), rows[part].t(), d_out[part])
        else:
            mm_into(target, d_out[part].t(), rows[part])


def vector_grads(grads: Lists, rows: Tensor, groups: list[Group]) -> None:
    """Gradient [out] of each expert's vector in ``groups``: the sum of its rows, accumulated in at least float32."""
    base = groups[0][1]
    for e, start, end in groups:
        target = expert_vector(grads, e)
        assert target is not None
        target.copy_(rows[start - base : end - base].sum(0))


def add_bias_products(d_scale: Tensor, d_out: Tensor, b: Lists, groups: list[Group]) -> None:
    """d_scale[i] += <d_out[i], b[e]>, in the dtype of d_scale; vectors in a wider dtype than d_out are rounded to it."""
    base, wide = groups[0][1], d_out.to(d_scale.dtype)
    for e, start, end in groups:
        bias = expert_vector(b, e)
        assert bias is not None
        d_scale[start:end] += torch.mv(wide[start - base : end - base], bias.to(d_out.dtype).to(wide.dtype))
