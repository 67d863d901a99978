"""Gradients of routed experts from the saved pre-activation: the portable provider of ``moefuse::experts_backward``.

With y = a @ W_out.T + b_out per slot and out[t] = sum w * y, the routing weight's gradient <dout[t], y> is computed as
<dout[t] @ W_out, a> + <dout[t], b_out>, so y is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse.ops.activations import ACTIVATIONS
from moefuse.ops.reference import accumulation_dtype, expert_vector, expert_weight, split_gate
from moefuse.runtime.cpu import CHUNK_ROWS, Lists, back_project, sum_slots
from moefuse.runtime.gemm import mm_into
from moefuse.runtime.routing import Group, chunked, groups_of, positions

INPUTS = ("x", "weights", "w_in", "w_up", "w_out", "b_in", "b_up", "b_out")
"""Order of the ``needs`` flags, and of the returned gradients (a weight list gives one gradient per tensor)."""


@dataclass
class _Needs:
    x: bool
    weights: bool
    w_in: bool
    w_up: bool
    w_out: bool
    b_in: bool
    b_up: bool
    b_out: bool


def experts_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    h: Tensor,
    order: Tensor,
    offsets: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    needs: Sequence[bool],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    """The gradients that ``needs`` (in the order of :data:`INPUTS`) asks for, flattened."""
    need = _Needs(*needs)
    wide = accumulation_dtype(x.dtype)
    act = ACTIVATIONS[activation]
    top_k = weights.shape[1]
    ends = offsets.tolist()
    groups, valid = groups_of(ends), ends[-1]
    lists = {"w_in": w_in, "w_up": w_up, "w_out": w_out, "b_in": b_in, "b_up": b_up, "b_out": b_out}
    grads = {
        name: empty_grads(tensors, groups, 2 if name[0] == "w" else 1) if getattr(need, name) else [] for name, tensors in lists.items()
    }
    need_h = need.x or need.w_in or need.w_up or need.b_in or need.b_up or (need.weights and weight_on_input)
    d_rows = x.new_empty(order.shape[0], x.shape[1]) if need.x else None
    d_scale = torch.zeros(order.shape[0], dtype=wide, device=x.device) if need.weights else None
    scales = weights.reshape(-1)
    if d_rows is not None:
        d_rows[valid:].zero_()
    for chunk in chunked(groups, CHUNK_ROWS):
        start, end = chunk[0][1], chunk[-1][2]
        slots = order[start:end]
        tokens = slots // top_k
        scale = scales[slots, None].to(wide)
        d_out = grad.index_select(0, tokens).to(x.dtype)
        gate, up = (None if part is None else part.to(wide) for part in split_gate(h[start:end], gating, up_first))
        assert gate is not None
        if need.w_out or (need.weights and not weight_on_input):
            a = act.forward(gate, up, activation_args)
            if need.w_out:
                weight_grads(grads["w_out"], d_out, (a if weight_on_input else a * scale).to(x.dtype), chunk)
        if need.b_out:
            vector_grads(grads["b_out"], d_out.to(wide) if weight_on_input else d_out.to(wide) * scale, chunk)
        if not (need_h or need.weights):
            continue
        d_act = x.new_empty((end - start, w_out[0].shape[-1]))
        back_project(d_act, d_out, w_out, chunk)
        d_a = d_act.to(wide)
        if d_scale is not None and not weight_on_input:
            d_scale[start:end] = (d_a * a).sum(-1)
            if b_out:
                _add_bias_products(d_scale, d_out.to(wide), b_out, chunk)
        if not need_h:
            continue
        d_h = torch.empty_like(h[start:end])
        for target, value in zip(
            split_gate(d_h, gating, up_first),
            act.backward(d_a if weight_on_input else d_a.mul_(scale), gate, up, activation_args),
            strict=True,
        ):
            if target is not None and value is not None:
                target.copy_(value)
        d_gate, d_up = (d_h[:, : d_h.shape[1] // 2], d_h[:, d_h.shape[1] // 2 :]) if gating == "separate" else (d_h, d_h)
        if need.b_in:
            vector_grads(grads["b_in"], d_gate, chunk)
        if need.b_up:
            vector_grads(grads["b_up"], d_up, chunk)
        if need.w_in or need.w_up:
            xs = x.index_select(0, tokens)
            if weight_on_input:
                xs = (xs.to(wide) * scale).to(x.dtype)
            if need.w_in:
                weight_grads(grads["w_in"], d_gate, xs, chunk)
            if need.w_up:
                weight_grads(grads["w_up"], d_up, xs, chunk)
        if d_rows is not None or (d_scale is not None and weight_on_input):
            d_xs = x.new_empty((end - start, x.shape[1])) if d_rows is None else d_rows[start:end]
            back_project(d_xs, d_gate, w_in, chunk)
            if gating == "separate":
                other = torch.empty_like(d_xs)
                back_project(other, d_up, w_up, chunk)
                d_xs.add_(other)
            if weight_on_input:
                if d_scale is not None:
                    d_scale[start:end] = (d_xs.to(wide) * x.index_select(0, tokens)).sum(-1)
                d_xs.copy_(d_xs.to(wide) * scale)
    out: list[Tensor] = []
    if d_rows is not None:
        out.append(sum_slots(d_rows, positions(order), None, top_k).to(x.dtype) if valid else torch.zeros(x.shape, dtype=x.dtype, device=x.device))
    if d_scale is not None:
        by_slot = torch.empty_like(d_scale)
        by_slot[order] = d_scale
        out.append(by_slot.view(weights.shape).to(weights.dtype))
    for name in lists:
        out += grads[name]
    return out


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


def _add_bias_products(d_scale: Tensor, d_out: Tensor, b: Lists, groups: list[Group]) -> None:
    """d_scale[i] += <d_out[i], b[e]>."""
    base = groups[0][1]
    for e, start, end in groups:
        bias = expert_vector(b, e)
        assert bias is not None
        d_scale[start:end] += torch.mv(d_out[start - base : end - base], bias.to(d_out.dtype))
