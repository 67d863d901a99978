"""Gradients of routed experts from the saved pre-activation: the portable provider of ``moefuse::experts_backward``.

With y = a @ W_out.T + b_out per slot and out[t] = sum w * y, the routing weight's gradient <dout[t], y> is computed as
<dout[t] @ W_out, a> + <dout[t], b_out>, so y is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse.ops.activations import ACTIVATIONS, Activation
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
    lists = {"w_in": w_in, "w_up": w_up, "w_out": w_out, "b_in": b_in, "b_up": b_up, "b_out": b_out}
    work = _Backward(grad, x, weights, h, order, offsets, lists, _Needs(*needs))
    work.activation, work.args, work.gating, work.up_first = ACTIVATIONS[activation], activation_args, gating, up_first
    work.on_input = weight_on_input
    return work.run()


class _Backward:
    """One backward call: the buffers of its gradients, filled chunk by chunk of whole experts."""

    activation: Activation
    args: Sequence[float]
    gating: str
    up_first: bool
    on_input: bool

    def __init__(
        self,
        grad: Tensor,
        x: Tensor,
        weights: Tensor,
        h: Tensor,
        order: Tensor,
        offsets: Tensor,
        lists: dict[str, Lists],
        need: _Needs,
    ) -> None:
        self.grad, self.x, self.weights, self.h, self.order, self.lists, self.need = grad, x, weights, h, order, lists, need
        self.wide = accumulation_dtype(x.dtype)
        self.top_k = weights.shape[1]
        ends = offsets.tolist()
        self.groups, self.valid = groups_of(ends), ends[-1]
        self.grads = {
            name: empty_grads(tensors, self.groups, 2 if name.startswith("w") else 1) if getattr(need, name) else []
            for name, tensors in lists.items()
        }
        slots = order.shape[0]
        self.d_rows = x.new_empty((slots, x.shape[1])) if need.x else None
        self.d_scale = torch.zeros(slots, dtype=self.wide, device=x.device) if need.weights else None

    def run(self) -> list[Tensor]:
        """All chunks, then the sums over slots."""
        for chunk in chunked(self.groups, CHUNK_ROWS):
            self.chunk(chunk)
        out: list[Tensor] = []
        if self.d_rows is not None:
            self.d_rows[self.valid :].zero_()
            out.append(self.d_x(self.d_rows))
        if self.d_scale is not None:
            by_slot = torch.empty_like(self.d_scale)
            by_slot[self.order] = self.d_scale
            out.append(by_slot.view(self.weights.shape).to(self.weights.dtype))
        for grads in self.grads.values():
            out += grads
        return out

    def d_x(self, d_rows: Tensor) -> Tensor:
        """Gradient [T, H] of x from that of its rows."""
        if not self.valid:
            return torch.zeros(self.x.shape, dtype=self.x.dtype, device=self.x.device)
        return sum_slots(d_rows, positions(self.order), None, self.top_k).to(self.x.dtype)

    def chunk(self, chunk: list[Group]) -> None:
        """Everything that the rows of these experts contribute."""
        need, wide = self.need, self.wide
        rows = slice(chunk[0][1], chunk[-1][2])
        slots = self.order[rows]
        tokens = slots // self.top_k
        scale = self.weights.reshape(-1)[slots, None].to(wide)
        d_out = self.grad.index_select(0, tokens).to(self.x.dtype)
        gate, up = split_gate(self.h[rows], self.gating, self.up_first)
        gate, up = gate.to(wide), None if up is None else up.to(wide)
        need_h = need.x or need.w_in or need.w_up or need.b_in or need.b_up or (need.weights and self.on_input)
        if need.b_out:
            vector_grads(self.grads["b_out"], d_out.to(wide) if self.on_input else d_out.to(wide) * scale, chunk)
        a = None
        if need.w_out or (need.weights and not self.on_input):
            a = self.activation.forward(gate, up, self.args)
        if need.w_out and a is not None:
            weight_grads(self.grads["w_out"], d_out, (a if self.on_input else a * scale).to(self.x.dtype), chunk)
        if not (need_h or need.weights):
            return
        d_act = self.x.new_empty((tokens.shape[0], self.lists["w_out"][0].shape[-1]))
        back_project(d_act, d_out, self.lists["w_out"], chunk)
        d_a = d_act.to(wide)
        if self.d_scale is not None and a is not None and not self.on_input:
            self.d_scale[rows] = (d_a * a).sum(-1)
            if self.lists["b_out"]:
                _add_bias_products(self.d_scale, d_out.to(wide), self.lists["b_out"], chunk)
        if need_h:
            d_a = d_a if self.on_input else d_a * scale
            self.first_projection(chunk, rows, tokens, scale, self.d_pre_activation(rows, d_a, gate, up))

    def d_pre_activation(self, rows: slice, d_a: Tensor, gate: Tensor, up: Tensor | None) -> Tensor:
        """Gradient [n, width] of h, in the feature order of h."""
        d_h = torch.empty_like(self.h[rows])
        targets = split_gate(d_h, self.gating, self.up_first)
        for target, value in zip(targets, self.activation.backward(d_a, gate, up, self.args), strict=True):
            if target is not None and value is not None:
                target.copy_(value)
        return d_h

    def first_projection(self, chunk: list[Group], rows: slice, tokens: Tensor, scale: Tensor, d_h: Tensor) -> None:
        """Gradients of the first projection's weights, biases and rows."""
        half = d_h.shape[1] // 2
        parts = {"in": d_h[:, :half], "up": d_h[:, half:]} if self.gating == "separate" else {"in": d_h}
        xs = None
        if self.need.w_in or self.need.w_up:
            xs = self.x.index_select(0, tokens)
            if self.on_input:
                xs = (xs.to(self.wide) * scale).to(self.x.dtype)
        for name, d_part in parts.items():
            if self.grads[f"b_{name}"]:
                vector_grads(self.grads[f"b_{name}"], d_part, chunk)
            if xs is not None and self.grads[f"w_{name}"]:
                weight_grads(self.grads[f"w_{name}"], d_part, xs, chunk)
        if self.d_rows is None and not (self.need.weights and self.on_input):
            return
        d_xs = self.x.new_empty((tokens.shape[0], self.x.shape[1])) if self.d_rows is None else self.d_rows[rows]
        back_project(d_xs, parts["in"], self.lists["w_in"], chunk)
        if "up" in parts:
            other = torch.empty_like(d_xs)
            back_project(other, parts["up"], self.lists["w_up"], chunk)
            d_xs.add_(other)
        if self.on_input:
            if self.d_scale is not None:
                self.d_scale[rows] = (d_xs.to(self.wide) * self.x.index_select(0, tokens)).sum(-1)
            d_xs.copy_(d_xs.to(self.wide) * scale)


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
