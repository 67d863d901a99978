"""Routed experts with low-rank terms in PyTorch alone: the portable provider of ``moefuse::experts_lora``.

Rows are sorted and taken in chunks of whole experts as in ``cpu.py``. A term adds ``s * (rows @ A.T) @ B.T`` to what the projection made,
in the accumulation dtype; backward contracts over the same rows, so neither a weight with its term nor a gradient of it ever exists. Every
sum has a fixed order: the same bits every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.reference import accumulation_dtype, expert_weight, split_gate
from moefuse.runtime.cpu import CHUNK_ROWS, SortedRows, back_project, combine, sum_slots
from moefuse.runtime.expert_grads import add_bias_products, empty_grads, vector_grads, weight_grads
from moefuse.runtime.routing import Group, chunked, groups_of, positions, sort_slots

if TYPE_CHECKING:
    from moefuse.ops.meaning.lora_calls import LoraCall, LoraGradCall, Term


def experts_lora(call: LoraCall) -> Tensor:
    """``moefuse::experts_lora``."""
    return _forward(call, save=False)[0]


def experts_lora_forward(call: LoraCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets, u) for backward; rows of h and u past the valid ones are zeros."""
    return _forward(call, save=True)


def experts_lora_hidden(call: LoraCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """``moefuse::experts_lora_hidden``: h of the forward pass once more. Terms are, too: from u products might round otherwise."""
    ends = offsets.tolist()
    h = call.base.x.new_empty((order.shape[0], call.base.width))
    h[ends[-1] :].zero_()
    rows = _LoraRows(call, order, None)
    with _autocast_off(call.base.x):
        for chunk in chunked(groups_of(ends), CHUNK_ROWS):
            start, end = chunk[0][1], chunk[-1][2]
            rows.pre_activation(rows.rows(start, end), h[start:end], chunk)
    return h


def _forward(call: LoraCall, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _autocast_off(call.base.x):
        return _computed(call, save)


def _autocast_off(x: Tensor) -> torch.autocast:
    """The op computes in the dtypes of what it is given, whatever autocast is around a call outside of compiled code."""
    return torch.autocast(x.device.type, enabled=False)


def _computed(call: LoraCall, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    base = call.base
    order, offsets = sort_slots(base.ids, base.w_in.experts)
    ends = offsets.tolist()
    slots, valid = order.shape[0], ends[-1]
    h = base.x.new_empty((slots if save else 0, base.width))
    u = base.x.new_empty((slots if save else 0, call.ranks), dtype=accumulation_dtype(base.dtype))
    h[valid:].zero_()
    u[valid:].zero_()
    rows = _LoraRows(call, order, u if save else None)
    ys = rows.run(groups_of(ends), slots, h if save else None)
    return combine(ys, base, order, valid), h, order, offsets, u


class _LoraRows(SortedRows):
    """The experts of one call on its sorted rows; ``u`` [S, ranks] takes the terms' rows times s * A, if given."""

    def __init__(self, call: LoraCall, order: Tensor, u: Tensor | None) -> None:
        super().__init__(call.base, order)
        self.terms, self.u = call.terms, u
        self.columns = columns(call.terms)

    def pre_activation(self, xs: Tensor, h: Tensor, chunk: list[Group]) -> None:
        """h [n, width] = first projection(s) of the chunk, with their terms."""
        super().pre_activation(xs, h, chunk)
        features = self.call.w_in.features
        self.add(0, h[:, :features], xs, chunk)
        if self.call.body.split:
            self.add(1, h[:, features:], xs, chunk)

    def outputs(self, ys: Tensor, a: Tensor, chunk: list[Group]) -> None:
        """ys [n, Hout] = last projection of the chunk, with its term."""
        super().outputs(ys, a, chunk)
        self.add(2, ys, a, chunk)

    def add(self, which: int, out: Tensor, rows: Tensor, chunk: list[Group]) -> None:
        """out += s * (rows @ A.T) @ B.T."""
        term = self.terms[which]
        if not term.rank:
            return
        first = chunk[0][1]
        for e, start, end in chunk:
            part = slice(start - first, end - first)
            made = (rows[part].to(self.wide) @ expert_weight(term.a, e).to(self.wide).t()).mul_(term.scale)
            if self.u is not None:
                self.u[start:end, self.columns[which]] = made
            b = expert_weight(term.b, e).to(self.wide).t()
            if out.dtype == self.wide:
                out[part].addmm_(made, b)
            else:
                out[part] += made @ b


def columns(terms: tuple[Term, ...]) -> list[slice]:
    """The columns of u of each term."""
    ends = [sum(t.rank for t in terms[: i + 1]) for i in range(len(terms))]
    return [slice(end - t.rank, end) for t, end in zip(terms, ends, strict=True)]


def experts_lora_backward(call: LoraGradCall) -> list[Tensor]:
    """The gradients that ``call.needs`` asks for, flattened."""
    with _autocast_off(call.x):
        return _Backward(call).run()


class _Backward:
    """One backward call, chunk by chunk of whole experts."""

    def __init__(self, call: LoraGradCall) -> None:
        self.call, self.body = call, call.body
        ends = call.offsets.tolist()
        self.groups, self.valid, self.top_k = groups_of(ends), ends[-1], call.weights.shape[1]
        self.dtype, self.columns = call.x.dtype, columns(call.terms)
        self.wide = accumulation_dtype(self.dtype)
        self.stacks = call.w_in, call.w_up, call.w_out
        self.need_x, self.need_weights, *needs = call.needs
        lists = (*(s.weight for s in self.stacks), *(s.bias for s in self.stacks), *(part for t in call.terms for part in (t.a, t.b)))
        ranks = (2, 2, 2, 1, 1, 1, *(2 for _ in range(6)))
        found = zip(lists, ranks, needs, strict=True)
        self.grads = [empty_grads(tensors, self.groups, rank) if wanted else [] for tensors, rank, wanted in found]
        slots = call.order.shape[0]
        self.d_scale = torch.zeros(slots, dtype=self.wide, device=call.x.device) if self.need_weights else None
        self.d_rows = call.x.new_empty((slots, call.x.shape[1])) if self.need_x else None

    def run(self) -> list[Tensor]:
        """Gradients in the order of the op's arguments."""
        call = self.call
        for chunk in chunked(self.groups, CHUNK_ROWS):
            self.chunk(chunk)
        out: list[Tensor] = []
        if self.d_rows is not None:
            self.d_rows[self.valid :].zero_()
            x = call.x
            empty = not self.valid
            summed = x.new_zeros(x.shape) if empty else sum_slots(self.d_rows, positions(call.order), None, self.top_k)
            out.append(summed.to(x.dtype))
        if self.d_scale is not None:
            by_slot = torch.empty_like(self.d_scale)
            by_slot[call.order] = self.d_scale
            out.append(by_slot.view(call.weights.shape).to(call.weights.dtype))
        return [*out, *(g for part in self.grads for g in part)]

    def chunk(self, chunk: list[Group]) -> None:
        """What a chunk contributes to every gradient."""
        call, body = self.call, self.body
        rows = slice(chunk[0][1], chunk[-1][2])
        slots = call.order[rows]
        scale = call.weights.reshape(-1)[slots, None].to(self.wide)
        d_out = call.grad.index_select(0, slots // self.top_k).to(self.dtype)
        act = ACTIVATIONS[body.activation]
        gate, up = split_gate(call.h[rows], body.gating, body.up_first)
        gate, up = gate.to(self.wide), None if up is None else up.to(self.wide)
        value = act.forward(gate, up, body.args)
        weighted = d_out if body.on_input else (d_out.to(self.wide) * scale)
        d_a = self.back(2, weighted, value.to(self.dtype), chunk, d_out)
        if self.d_scale is not None and not body.on_input:
            self.d_scale[rows] = (d_a * value).sum(-1)
            if call.w_out.bias:
                add_bias_products(self.d_scale, d_out, call.w_out.bias, chunk)
        d_h = torch.empty_like(call.h[rows])
        made = act.backward(d_a if body.on_input else d_a * scale, gate, up, body.args)
        for target, part in zip(split_gate(d_h, body.gating, body.up_first), made, strict=True):
            if target is not None and part is not None:
                target.copy_(part)
        self.inputs(chunk, d_h, scale, slots // self.top_k)

    def inputs(self, chunk: list[Group], d_h: Tensor, scale: Tensor, tokens: Tensor) -> None:
        """From the gradient of the pre-activation to those of the first projections and of the tokens."""
        call, on_input, rows = self.call, self.body.on_input, slice(chunk[0][1], chunk[-1][2])
        xs = call.x.index_select(0, tokens)
        given = (xs.to(self.wide) * scale).to(self.dtype) if on_input else xs
        half = call.w_in.features
        parts = [d_h[:, :half], d_h[:, half:]] if self.body.split else [d_h]
        d_xs = sum(self.back(i, part, given, chunk, part) for i, part in enumerate(parts))
        assert isinstance(d_xs, Tensor)
        if on_input and self.d_scale is not None:
            self.d_scale[rows] = (d_xs * xs).sum(-1)
        if self.d_rows is not None:
            self.d_rows[rows] = (d_xs * scale if on_input else d_xs).to(self.dtype)

    def back(self, which: int, d_y: Tensor, rows: Tensor, chunk: list[Group], unscaled: Tensor) -> Tensor:
        """Through one projection: fills the gradients of its weights, and returns that of its input, [n, in] in the accumulation dtype.

        Args:
            d_y: the gradient of what it made, [n, out].
            rows: its input, [n, in].
            unscaled: the gradient to go on with, [n, out]: that of the last projection without its routing weight.
        """
        stack, term = self.stacks[which], self.call.terms[which]
        d_w, d_b = self.grads[which], self.grads[3 + which]
        if d_w:
            weight_grads(d_w, d_y.to(self.dtype), rows, chunk)
        if d_b:
            vector_grads(d_b, d_y.to(self.wide), chunk)
        base = rows.new_empty((rows.shape[0], stack.inputs))
        back_project(base, unscaled.to(self.dtype), stack.weight, chunk)
        out = base.to(self.wide)
        if term.rank:
            self.term(which, d_y, rows, chunk, unscaled, out)
        return out

    def term(self, which: int, d_y: Tensor, rows: Tensor, chunk: list[Group], unscaled: Tensor, out: Tensor) -> None:
        """dB = dY.T u, dA = s (dY B).T rows; adds s (dY B) A to ``out``."""
        term, first = self.call.terms[which], chunk[0][1]
        d_a, d_b = self.grads[6 + 2 * which : 8 + 2 * which]
        for e, start, end in chunk:
            part = slice(start - first, end - first)
            dy = d_y[part].to(self.wide)
            a, b = expert_weight(term.a, e).to(self.wide), expert_weight(term.b, e).to(self.wide)
            if d_b:
                expert_weight(d_b, e).copy_(dy.t() @ self.call.u[start:end, self.columns[which]])
            if d_a:
                expert_weight(d_a, e).copy_(((dy @ b) * term.scale).t() @ rows[part].to(self.wide))
            out[part].addmm_(unscaled[part].to(self.wide) @ b, a, alpha=term.scale)
