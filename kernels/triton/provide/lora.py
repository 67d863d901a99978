"""Experts with low-rank terms and their gradients on CUDA: the products of training, each with its low-rank term before it is rounded.

A term is two small products. Rows times s * A make u [S, r] (a launch that reads the rows once more), and u times B^T is the last step of
the tiles of the base product, so no pass over the output is added. Backward is the same with the factors exchanged: d_y times s * B makes
g [S, r], and g times A goes into the gradient of the rows. dB is the sum of d_y^T u, dA of g^T rows, over an expert's rows in one order, in
float32. Neither a weight with its term nor a gradient of it exists. (Shrink and expand are apart as in Punica's and S-LoRA's papers.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import factors, linear, pointwise, sorted_rows, wgrad
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted
from moefuse.kernels.triton.launch.record import recorded
from moefuse.kernels.triton.provide import lora_vectors
from moefuse.kernels.triton.provide.grouped import supports
from moefuse.kernels.triton.provide.products import Own
from moefuse.ops.meaning.call import ExpertsCall, Term, columns
from moefuse.ops.meaning.grad_calls import GradCall
from moefuse.ops.meaning.reference import accumulation_dtype

__all__ = ["experts", "experts_backward", "experts_forward", "experts_hidden", "supports"]


@recorded
def experts(call: ExpertsCall) -> Tensor:
    """The output [T, Hout]."""
    config = lora_vectors.blocks_of(call)
    if config is not None:
        return lora_vectors.experts(call, config)
    return _forward(call, keep=False)[0]


@recorded
def experts_forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets, u) for backward; dead rows of h and u are zeros."""
    return _forward(call, keep=True)


@recorded
def experts_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """h of :func:`experts_forward`, once more, for the slots in the order that it sorted them into; u is what it made of them."""
    slots = order.shape[0]
    if not slots:
        return torch.empty((0, call.width), dtype=call.x.dtype, device=call.x.device)
    it = Sorted(order, offsets, slots, call.w_in.experts, call.top_k)
    h = _hidden(call, Own(it, call.x.dtype), slots, [u[:, part] for part in columns(call.stacks)], made=True)
    if h.numel():
        sorted_rows.clear_dead(h, it)
    return h


def _forward(call: ExpertsCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``keep``: whether anything but the output is read, so that dead rows count."""
    x, body = call.x, call.body
    (hidden, inter), slots = call.w_out.weight[0].shape[-2:], call.ids.numel()
    order, offsets = sorted_rows.sort(call.ids, call.w_in.experts)
    out = torch.empty((x.shape[0], hidden), dtype=call.out_dtype, device=x.device)
    u = torch.empty((slots, call.ranks), dtype=accumulation_dtype(x.dtype), device=x.device)
    if not slots:
        return out.zero_(), torch.empty((0, call.width), dtype=x.dtype, device=x.device), order, offsets, u
    it = Sorted(order, offsets, slots, call.w_in.experts, call.top_k)
    by, parts = Own(it, x.dtype), [u[:, part] for part in columns(call.stacks)]
    h = _hidden(call, by, slots, parts)
    a = torch.empty((slots, inter), dtype=x.dtype, device=x.device)
    if inter:
        pointwise.activate(a, h, it, Activation(body, inter))
    _rows_times_a(by, call.w_out.term, a, parts[2])
    y = by.linear(a, *call.w_out[:2], term=_term(call.w_out.term, parts[2], a.dtype))
    for kept in (h, u) if keep else ():
        if kept.numel():
            sorted_rows.clear_dead(kept, it)
    if hidden:
        sorted_rows.sum_slots(out, y, it, None if body.on_input else call.weights)
    return out, h, order, offsets, u


def _hidden(call: ExpertsCall, by: Own, slots: int, u: list[Tensor], made: bool = False) -> Tensor:
    """The first projection, or both of them side by side; rows that are nobody's are not written.

    ``u``: for each projection the columns that its term's rows times s * A go to, or are in (``made``).
    """
    x = call.x
    scale, features = call.weights if call.body.on_input else None, call.w_in.features
    h = torch.empty((slots, call.width), dtype=x.dtype, device=x.device)
    targets = [(call.w_in, h[:, :features]), (call.w_up, h[:, features:])] if call.body.split else [(call.w_in, h)]
    for (stack, target), columns_of in zip(targets, u, strict=False):
        if not made:
            _rows_times_a(by, stack.term, x, columns_of, tokens=True, scale=scale)
        by.linear(x, *stack[:2], tokens=True, scale=scale, out=target, term=_term(stack.term, columns_of, x.dtype))
    return h


def _rows_times_a(by: Own, term: Term | None, rows: Tensor, u: Tensor, tokens: bool = False, scale: Tensor | None = None) -> None:
    """Rows times s * A into u, where there is a term."""
    if term is not None:
        by.linear(rows, [factors.copied(term.a, rows.dtype, term.scale)], tokens=tokens, scale=scale, out=u)


def _term(term: Term | None, u: Tensor, dtype: torch.dtype) -> linear.Term | None:
    """What the product adds."""
    return None if term is None else linear.Term(u, factors.copied(term.b, dtype))


@recorded
def experts_backward(call: GradCall) -> list[Tensor]:
    """The gradients that ``call.need`` asks for, flattened."""
    return _Backward(call).run()


class _Backward:
    """One backward call: the last projection, the activation, the first ones."""

    def __init__(self, call: GradCall) -> None:
        self.call, self.body = call, call.body
        slots = call.order.shape[0]
        self.it = Sorted(call.order.contiguous(), call.offsets.contiguous(), slots, call.w_in.experts, call.weights.shape[1])
        self.by = Own(self.it, call.x.dtype)
        self.need_x, self.need_weights, *self.needs = call.need.flags
        assert call.u is not None
        self.u = [call.u[:, part] for part in columns(call.stacks)]
        self.stacks = call.stacks
        self.found: dict[int, Lists] = {}

    def run(self) -> list[Tensor]:
        """Gradients in the order of the op's arguments."""
        call, body = self.call, self.body
        weights = call.weights
        d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=weights.device) if self.need_weights else None
        if not self.it.slots:
            return self.nothing(d_weights)
        d_h = self.last(call.grad.to(call.x.dtype), None if body.on_input else d_weights)
        d_x = self.first(d_h, d_weights if body.on_input else None)
        before = ([d_x] if d_x is not None else []) + ([d_weights] if d_weights is not None else [])
        return [*before, *(g for i in range(len(self.needs)) for g in self.found.get(i, ()))]

    def nothing(self, d_weights: Tensor | None) -> list[Tensor]:
        """Gradients of a call without tokens."""
        zeros = [torch.zeros_like(t) for tensors, wanted in zip(self.call.lists, self.needs, strict=True) if wanted for t in tensors]
        x = self.call.x
        return [*([x.new_zeros(x.shape)] if self.need_x else []), *([d_weights] if d_weights is not None else []), *zeros]

    def last(self, d_out: Tensor, d_weights: Tensor | None) -> Tensor:
        """Through the last projection and the activation: the gradient [S, width] of h. Dead rows are not defined."""
        call, body, it = self.call, self.body, self.it
        h, inter, scale = call.h.contiguous(), call.w_out.inputs, None if body.on_input else call.weights
        d_h = torch.empty_like(h)
        g, term = self.backward_term(2, d_out, tokens=True)
        d_a = self.by.linear(d_out, call.w_out.weight, back=True, tokens=True, term=term)
        bias = linear.weight(call.w_out.bias, 1) if call.w_out.bias else None
        how = Activation(body, inter)
        a = d_a if self.needs[2] or self.needs[10] else None
        pointwise.activate_grads(it, h, d_a, how, scale=scale, d_h=d_h, a=a, d_weights=d_weights, grad=d_out, bias=bias)
        self.gradients(2, d_out, d_a, g, tokens=True, scale=scale)
        return d_h

    def first(self, d_h: Tensor, d_weights: Tensor | None) -> Tensor | None:
        """Through the first projections: the gradient [T, H] of x if it is wanted; with the weight on the input d_weights is filled."""
        call, it, by, x, body = self.call, self.it, self.by, self.call.x, self.body
        features, scale = call.w_in.features, call.weights if body.on_input else None
        parts = [d_h[:, :features], d_h[:, features:]] if body.split else [d_h]
        wanted = self.need_x or d_weights is not None
        d_rows: Tensor | None = None
        for i, part in enumerate(parts):
            g, term = self.backward_term(i, part, wanted)
            if wanted and x.shape[1]:
                d_rows = by.linear(part, self.stacks[i].weight, back=True, out=d_rows, add=i > 0, term=term)
            self.gradients(i, part, x, g, x_tokens=True, scale=scale)
        if d_rows is not None and body.on_input:
            pointwise.pair(it, x, d_rows, call.weights, out=d_rows if self.need_x else None, d_weights=d_weights, from_rows=True)
        if not self.need_x:
            return None
        if d_rows is None:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sorted_rows.sum_slots(d_x, d_rows, it, None)
        return d_x

    def backward_term(self, which: int, d_y: Tensor, wanted: bool = True, tokens: bool = False) -> tuple[Tensor | None, linear.Term | None]:
        """g = d_y times s * B, and what it adds to the gradient of the rows (``wanted``); nothing where there is no term."""
        term = self.stacks[which].term
        if term is None or not (wanted or self.needs[6 + 2 * which]):
            return None, None
        b = factors.copied(term.b, d_y.dtype, term.scale)
        g = torch.empty((self.it.slots, term.rank), dtype=self.u[which].dtype, device=d_y.device)
        self.by.linear(d_y, [b], back=True, tokens=tokens, out=g)
        return g, linear.Term(g, factors.copied(term.a, d_y.dtype).transpose(1, 2)) if wanted else None

    def gradients(
        self,
        which: int,
        d_y: Tensor,
        rows: Tensor,
        g: Tensor | None,
        *,
        tokens: bool = False,
        x_tokens: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        """Of a projection's weight, bias, A and B. ``d_y`` ([T, out] with ``tokens``) and ``rows`` ([T, in] with ``x_tokens``).

        ``scale``: the routing weight of each row. That of the last projection is in ``rows`` already.
        """
        stack, it = self.stacks[which], self.it
        term = stack.term or Term()
        need_w, need_b, (need_a, need_l) = self.needs[which], self.needs[3 + which], self.needs[6 + 2 * which : 8 + 2 * which]
        of_rows = scale if x_tokens else None
        if need_w:
            self.found[which] = self.by.weight_grads(stack.weight, d_y, rows, g_tokens=tokens, x_tokens=x_tokens, scale=of_rows)
        if need_b:
            self.found[3 + which] = wgrad.vector_grads(stack.bias, d_y, it, tokens=tokens, scale=scale if tokens else None)
        if need_a:
            assert g is not None
            self.found[6 + 2 * which] = factors.grads(term.a, rows, g, it, transposed=True, tokens=x_tokens, scale=of_rows)
        if need_l:
            self.found[7 + 2 * which] = factors.grads(term.b, d_y, self.u[which], it, tokens=tokens, scale=scale if tokens else None)
