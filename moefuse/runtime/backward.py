"""Gradients of routed experts from the saved pre-activation: the portable provider of ``moefuse::experts_backward`` and of its three parts.

With y = a @ W_out.T + b_out per slot and out[t] = sum w * y, the routing weight's gradient <dout[t], y> is computed as
<dout[t] @ W_out, a> + <dout[t], b_out>, so y is never stored. Where the second projection rounds its rows, a is what it has multiplied:
a gradient passes the rounding as if it was not there. Weights in few bits have none. A low-rank term is differentiated in the accumulation
dtype, over the same rows.

The parts are ops of their own for devices where memory counts: h is dead after the first of them, its gradient after the second.

* rows: the gradient d_h [S, width] of h, the activation a [S, I] times its routing weight, the gradient of the routing weights;
* in: the gradients of x and of the first projection (and of routing weights on the input), from d_h;
* out: the gradients of the second projection, from a.

Rows past the last valid one are not defined in d_h and a; nothing reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.call import Stack, Term, columns
from moefuse.ops.meaning.grad_calls import GradCall, InCall, OutCall, RowsCall
from moefuse.ops.meaning.reference import accumulation_dtype, expert_weight, split_gate
from moefuse.ops.meaning.token_codes import as_rounded
from moefuse.runtime.cpu import CHUNK_ROWS, back_project, cut_groups, sum_slots, without_autocast
from moefuse.runtime.expert_grads import add_bias_products, empty_grads, vector_grads, weight_grads
from moefuse.runtime.routing import Group, chunked, groups_of, positions


def experts_backward(call: GradCall) -> list[Tensor]:
    """The gradients that ``call.need`` asks for, flattened: all parts, chunk by chunk of whole experts."""
    work = _Work(call)
    d_out, d_in, terms = _OutGrads(work, call.w_out), _InGrads(work, call), [_TermGrads(work, call, i) for i in range(3)]
    d_scale = work.empty_scale()
    for chunk in chunked(work.groups, CHUNK_ROWS):
        d_rows = work.gathered(call.grad, work.span(chunk))
        d_h, a = work.rows(chunk, d_rows, call.h, call.w_out, d_scale)
        if a is not None or work.need.b_out:
            d_out.add(chunk, d_rows, a)
        terms[2].add(chunk, d_rows, a, None if work.need.on_input else work.scale(work.span(chunk)))
        if d_h is not None:
            d_in.add(chunk, d_h, d_scale, terms)
    before = [] if d_in.d_rows is None else [d_in.d_x(d_in.d_rows)]
    before += [] if d_scale is None else [work.by_slot(d_scale)]
    factors = [g for term in terms for g in (*term.a, *term.b)]
    return [*before, *d_in.w_in, *d_in.w_up, *d_out.w, *d_in.b_in, *d_in.b_up, *d_out.b, *factors]


@without_autocast
def experts_extended_backward(call: GradCall) -> list[Tensor]:
    """The same of a call with codes or terms."""
    return experts_backward(call)


def experts_backward_rows(call: RowsCall) -> list[Tensor]:
    """The first part: of d_h, a and the routing weights' gradient what ``call.need`` asks for."""
    work, h = _Work(call), call.h
    d_scale = work.empty_scale() if work.need.products else None
    d_h = torch.zeros_like(h) if work.need.h else None
    a = h.new_zeros((h.shape[0], call.w_out.inputs)) if work.need.w_out else None
    for chunk in chunked(work.groups, CHUNK_ROWS):
        rows = work.span(chunk)
        made = work.rows(chunk, work.gathered(call.grad, rows), h, call.w_out, d_scale)
        for whole, part in zip((d_h, a), made, strict=True):
            if whole is not None and part is not None:
                whole[rows] = part
    return [t for t in (d_h, a, None if d_scale is None else work.by_slot(d_scale)) if t is not None]


def experts_backward_in(call: InCall) -> list[Tensor]:
    """The second part: gradients of x, of routing weights on the input, of w_in and w_up, and of their biases."""
    work = _Work(call)
    d_scale = work.empty_scale() if work.need.on_input else None
    grads = _InGrads(work, call)
    for chunk in chunked(work.groups, CHUNK_ROWS):
        grads.add(chunk, call.d_h[work.span(chunk)], d_scale)
    before = [] if grads.d_rows is None else [grads.d_x(grads.d_rows)]
    before += [] if d_scale is None else [work.by_slot(d_scale)]
    return [*before, *grads.w_in, *grads.w_up, *grads.b_in, *grads.b_up]


def experts_backward_out(call: OutCall) -> list[Tensor]:
    """The third part: gradients of w_out and of its biases."""
    work = _Work(call)
    grads = _OutGrads(work, call.w_out)
    for chunk in chunked(work.groups, CHUNK_ROWS):
        rows = work.span(chunk)
        grads.add(chunk, work.gathered(call.grad, rows), None if call.a is None else call.a[rows])
    return [*grads.w, *grads.b]


def worked_in(call: GradCall | RowsCall | InCall | OutCall) -> torch.dtype:
    """The dtype that is computed in: weights may be held in a wider one, and the gradient of the output may have another."""
    if isinstance(call, OutCall):
        return call.w_out.weight[0].dtype if call.a is None else call.a.dtype
    return call.d_h.dtype if isinstance(call, InCall) else call.h.dtype


class _Work:
    """What the parts of one backward call share."""

    def __init__(self, call: GradCall | RowsCall | InCall | OutCall) -> None:
        self.body, self.need = call.body, call.need
        self.activation = ACTIVATIONS[self.body.activation]
        self.dtype = worked_in(call)
        self.wide = accumulation_dtype(self.dtype)
        self.weights, self.order, self.top_k = call.weights, call.order, call.weights.shape[1]
        ends = call.offsets.tolist()
        self.groups, self.valid = groups_of(ends), ends[-1]

    @staticmethod
    def span(chunk: list[Group]) -> slice:
        """The rows of a chunk."""
        return slice(chunk[0][1], chunk[-1][2])

    def gathered(self, tokens: Tensor, rows: slice) -> Tensor:
        """Rows [n, N] of tokens [T, N], in the dtype of the work."""
        return tokens.index_select(0, self.order[rows] // self.top_k).to(self.dtype)

    def scale(self, rows: slice) -> Tensor:
        """Routing weights [n, 1]."""
        return self.weights.reshape(-1)[self.order[rows], None].to(self.wide)

    def empty_scale(self) -> Tensor | None:
        """Zeros [S], for the gradient of the routing weights in sorted order, if that is wanted."""
        return torch.zeros(self.order.shape[0], dtype=self.wide, device=self.order.device) if self.need.weights else None

    def by_slot(self, d_scale: Tensor) -> Tensor:
        """The gradient [T, K] of the routing weights."""
        out = torch.empty_like(d_scale)
        out[self.order] = d_scale
        return out.view(self.weights.shape).to(self.weights.dtype)

    def rows(
        self, chunk: list[Group], d_out: Tensor, h: Tensor, w_out: Stack, d_scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(d_h, a) of a chunk, whichever is wanted; fills the routing weights' gradient where they are on the output."""
        need, rows = self.need, self.span(chunk)
        scale = self.scale(rows)
        gate, up = split_gate(h[rows], self.body.gating, self.body.up_first)
        gate, up = gate.to(self.wide), None if up is None else up.to(self.wide)
        value = self.activation.forward(gate, up, self.body.args) if need.activation or need.products else None
        a = (value if need.on_input else value * scale).to(self.dtype) if need.activation and value is not None else None
        if not (need.h or need.products):
            return None, a
        d_act = d_out.new_empty((d_out.shape[0], w_out.inputs))
        back_project(d_act, d_out, w_out.weights(self.dtype), chunk)
        d_a, through = d_act.to(self.wide), self.through_term(w_out, d_out, chunk)
        if d_scale is not None and value is not None and need.products:
            products = d_a * self.multiplied(value, w_out)
            d_scale[rows] = (products if through is None else products + through * value).sum(-1)
            if w_out.bias:
                add_bias_products(d_scale, d_out, w_out.bias, chunk)
        if not need.h:
            return None, a
        d_a = d_a if through is None else d_a + through
        d_h = torch.empty_like(h[rows])
        grads = self.activation.backward(d_a if need.on_input else d_a * scale, gate, up, self.body.args)
        for target, part in zip(split_gate(d_h, self.body.gating, self.body.up_first), grads, strict=True):
            if target is not None and part is not None:
                target.copy_(part)
        return d_h, a

    def through_term(self, stack: Stack, d_y: Tensor, chunk: list[Group]) -> Tensor | None:
        """s (dY B) A, [n, in] in the accumulation dtype: what the gradient of a projection's rows is through its term."""
        if stack.term is None:
            return None
        out = torch.zeros((d_y.shape[0], stack.inputs), dtype=self.wide, device=d_y.device)
        for (e, _, _), into, dy in cut_groups(chunk, out, d_y):
            a, b = (expert_weight(factor, e).to(self.wide) for factor in stack.term[:2])
            into.addmm_(dy.to(self.wide) @ b, a, alpha=stack.term.scale)
        return out

    def multiplied(self, value: Tensor, w_out: Stack) -> Tensor:
        """What forward has multiplied with the second projection, given the activation [n, I] in the accumulation dtype."""
        return value if w_out.rounding is None else as_rounded(w_out.rounding, value.to(self.dtype)).to(self.wide)


class _InGrads:
    """The gradients of the first projection and of what goes into it."""

    def __init__(self, work: _Work, call: GradCall | InCall) -> None:
        need, (w_in, b_in, *_), (w_up, b_up, *_) = work.need, call.w_in, call.w_up
        self.work, self.x, self.stacks = work, call.x, (call.w_in, call.w_up)
        self.w_in, self.w_up = (empty_grads(t, work.groups, 2) if wanted else [] for t, wanted in ((w_in, need.w_in), (w_up, need.w_up)))
        self.b_in, self.b_up = (empty_grads(t, work.groups, 1) if wanted else [] for t, wanted in ((b_in, need.b_in), (b_up, need.b_up)))
        self.d_rows = self.x.new_empty((work.order.shape[0], self.x.shape[1])) if need.x else None

    def add(self, chunk: list[Group], d_h: Tensor, d_scale: Tensor | None, terms: Sequence[_TermGrads] = ()) -> None:
        """What a chunk contributes; fills the routing weights' gradient where they are on the input."""
        work, rows, half = self.work, self.work.span(chunk), d_h.shape[1] // 2
        parts = [d_h[:, :half], d_h[:, half:]] if work.body.split else [d_h]
        xs = None
        if self.w_in or self.w_up or any(work.need.factors[:4]) or (work.need.on_input and work.need.weights):
            xs = work.gathered(self.x, rows)
        scaled = xs if xs is None or not work.need.on_input else (xs.to(work.wide) * work.scale(rows)).to(work.dtype)
        for d_part, w, b in zip(parts, (self.w_in, self.w_up), (self.b_in, self.b_up), strict=False):
            if b:
                vector_grads(b, d_part, chunk)
            if w and scaled is not None:
                weight_grads(w, d_part, scaled, chunk)
        for term, d_part in zip(terms, parts, strict=False):
            term.add(chunk, d_part, scaled)
        if not work.need.tokens:
            return
        d_xs = self.x.new_empty((d_h.shape[0], self.x.shape[1])) if self.d_rows is None else self.d_rows[rows]
        back_project(d_xs, parts[0], self.stacks[0].weights(work.dtype), chunk)
        if len(parts) > 1:
            other = torch.empty_like(d_xs)
            back_project(other, parts[1], self.stacks[1].weights(work.dtype), chunk)
            d_xs.add_(other)
        found = d_xs
        for stack, d_part in zip(self.stacks, parts, strict=False):
            through = work.through_term(stack, d_part, chunk)
            found = found if through is None else found + through
        if work.need.on_input:
            if d_scale is not None and xs is not None:
                d_scale[rows] = (found.to(work.wide) * xs).sum(-1)
            found = found.to(work.wide) * work.scale(rows)
        if found is not d_xs:
            d_xs.copy_(found)

    def d_x(self, d_rows: Tensor) -> Tensor:
        """Gradient [T, H] of x from that of its rows."""
        d_rows[self.work.valid :].zero_()
        if not self.work.valid:
            return torch.zeros(self.x.shape, dtype=self.x.dtype, device=self.x.device)
        return sum_slots(d_rows, positions(self.work.order), None, self.work.top_k).to(self.x.dtype)


class _TermGrads:
    """The gradients of A and B of one projection: dA = s (dY B).T rows, dB = dY.T u."""

    def __init__(self, work: _Work, call: GradCall, which: int) -> None:
        self.work, self.term, (need_a, need_b) = work, call.stacks[which].term or Term(), work.need.of_term(which)
        self.u = None if call.u is None else call.u[:, columns(call.stacks)[which]]
        self.a, self.b = (empty_grads(t, work.groups, 2) if n else [] for t, n in ((self.term.a, need_a), (self.term.b, need_b)))

    def add(self, chunk: list[Group], d_y: Tensor, rows: Tensor | None, scale: Tensor | None = None) -> None:
        """What a chunk contributes: d_y [n, out], rows [n, in] with their routing weights; ``scale`` [n, 1]: those that u lacks."""
        first, wide = chunk[0][1], self.work.wide
        for e, start, end in chunk if self.a or self.b else ():
            part = slice(start - first, end - first)
            dy = d_y[part].to(wide)
            if self.b and self.u is not None:
                u = self.u[start:end]
                expert_weight(self.b, e).copy_(dy.t() @ (u if scale is None else u * scale[part]))
            if self.a and rows is not None:
                made = (dy @ expert_weight(self.term.b, e).to(wide)) * self.term.scale
                expert_weight(self.a, e).copy_(made.t() @ rows[part].to(wide))


class _OutGrads:
    """The gradients of the second projection."""

    def __init__(self, work: _Work, w_out: Stack) -> None:
        self.work = work
        self.w = empty_grads(w_out.weight, work.groups, 2) if work.need.w_out else []
        self.b = empty_grads(w_out.bias, work.groups, 1) if work.need.b_out else []

    def add(self, chunk: list[Group], d_out: Tensor, a: Tensor | None) -> None:
        """What a chunk contributes."""
        work = self.work
        if self.b:
            wide = d_out.to(work.wide)
            vector_grads(self.b, wide if work.need.on_input else wide * work.scale(work.span(chunk)), chunk)
        if self.w and a is not None:
            weight_grads(self.w, d_out, a, chunk)
