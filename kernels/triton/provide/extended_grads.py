"""Gradients of experts with codes or terms: the products of backward, each by the kernel that reads its weights.

What weights are held in has no gradients. dB is the sum of d_y^T u, dA of g^T rows, over an expert's rows in one order, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import factors, linear, pointwise, sorted_rows, wgrad
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted
from moefuse.kernels.triton.provide.extended_products import Products
from moefuse.ops.meaning.call import Term
from moefuse.ops.meaning.grad_calls import GradCall


def backward(call: GradCall) -> list[Tensor]:
    """The gradients that ``call.need`` asks for, flattened."""
    return _Backward(call).run()


class _Backward:
    """One backward call: the last projection, the activation, the first ones."""

    def __init__(self, call: GradCall) -> None:
        self.call, self.body = call, call.body
        slots = call.order.shape[0]
        self.it = Sorted(call.order.contiguous(), call.offsets.contiguous(), slots, call.offsets.shape[0] - 1, call.weights.shape[1])
        self.by = Products(self.it, call.x.dtype, call.stacks, call.u)
        self.need_x, self.need_weights, *self.needs = call.need.flags
        self.stacks = call.stacks
        self.found: dict[int, Lists] = {}

    def run(self) -> list[Tensor]:
        """Gradients in the order of the op's arguments."""
        call, weights = self.call, self.call.weights
        d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=weights.device) if self.need_weights else None
        if not self.it.slots:
            return self.nothing(d_weights)
        d_h = self.last(call.grad.to(call.x.dtype), None if self.body.on_input else d_weights)
        d_x = self.first(d_h, d_weights if self.body.on_input else None)
        before = ([d_x] if d_x is not None else []) + ([d_weights] if d_weights is not None else [])
        return [*before, *(g for i in range(len(self.needs)) for g in self.found.get(i, ()))]

    def nothing(self, d_weights: Tensor | None) -> list[Tensor]:
        """Gradients of a call without tokens."""
        zeros = [torch.zeros_like(t) for tensors, wanted in zip(self.call.lists, self.needs, strict=True) if wanted for t in tensors]
        x = self.call.x
        return [*([x.new_zeros(x.shape)] if self.need_x else []), *([d_weights] if d_weights is not None else []), *zeros]

    def last(self, d_out: Tensor, d_weights: Tensor | None) -> Tensor:
        """Through the last projection and the activation: the gradient [S, width] of h. Dead rows are not defined."""
        call, it, by, stack = self.call, self.it, self.by, self.stacks[2]
        h, scale, how = call.h.contiguous(), None if self.body.on_input else call.weights, Activation(self.body, stack.inputs)
        d_h, d_a = torch.empty_like(h), torch.empty((it.slots, stack.inputs), dtype=h.dtype, device=h.device)
        g, term = self.back_term(2, d_out, tokens=True)
        if d_weights is not None and stack.rounding is not None:
            by.weight_grads(stack, d_weights, by.back(2, d_out, d_a, None, tokens=True), h, how, d_out)
            by.add(d_a, term)
            if g is not None:
                by.term_weight_grads(d_weights, g)
            d_weights = None
        else:
            by.back(2, d_out, d_a, term, tokens=True)
        bias = linear.weight(stack.bias, 1) if stack.bias else None
        a = d_a if self.needs[2] or self.of_term(2)[0] else None
        pointwise.activate_grads(it, h, d_a, how, scale=scale, d_h=d_h, a=a, d_weights=d_weights, grad=d_out, bias=bias)
        self.gradients(2, d_out, d_a, g, tokens=True, scale=scale)
        return d_h

    def first(self, d_h: Tensor, d_weights: Tensor | None) -> Tensor | None:
        """Through the first projections: the gradient [T, H] of x if it is wanted; with the weight on the input d_weights is filled."""
        call, it, by, x, body = self.call, self.it, self.by, self.call.x, self.body
        features, scale = call.w_in.features, call.weights if body.on_input else None
        parts = [d_h[:, :features], d_h[:, features:]] if body.split else [d_h]
        wanted = (self.need_x or d_weights is not None) and x.shape[1] > 0
        d_rows = torch.empty((it.slots, x.shape[1]), dtype=x.dtype, device=x.device) if wanted else None
        for i, part in enumerate(parts):
            g, term = self.back_term(i, part, wanted=wanted)
            if d_rows is not None:
                by.back(i, part, d_rows, term, add=i > 0)
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

    def of_term(self, which: int) -> tuple[bool, bool]:
        """Whether the gradients of A and of B are wanted."""
        return self.call.need.of_term(which)

    def back_term(self, which: int, d_y: Tensor, wanted: bool = True, tokens: bool = False) -> tuple[Tensor | None, linear.Term | None]:
        """``Products.back_term`` where there is a term and somebody reads it: for the gradient of the rows (``wanted``), or of A."""
        if self.stacks[which].term is None or not (wanted or self.of_term(which)[0]):
            return None, None
        g, term = self.by.back_term(which, d_y, tokens=tokens)
        return g, term if wanted else None

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
        stack, it, u = self.stacks[which], self.it, self.by.u[which]
        term, (need_a, need_l) = stack.term or Term(), self.of_term(which)
        of_rows = scale if x_tokens else None
        if self.needs[which]:
            self.found[which] = self.by.own.weight_grads(stack.weight, d_y, rows, g_tokens=tokens, x_tokens=x_tokens, scale=of_rows)
        if self.needs[3 + which]:
            self.found[3 + which] = wgrad.vector_grads(stack.bias, d_y, it, tokens=tokens, scale=scale if tokens else None)
        if need_a and g is not None:
            self.found[6 + 2 * which] = factors.grads(term.a, rows, g, it, transposed=True, tokens=x_tokens, scale=of_rows)
        if need_l and u is not None:
            self.found[7 + 2 * which] = factors.grads(term.b, d_y, u, it, tokens=tokens, scale=scale if tokens else None)
