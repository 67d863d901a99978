"""The products of a call over its sorted rows: each projection by the kernel that reads its weights, with its low-rank term.

A term is two small products. Rows times s * A make u [S, r] (a launch that reads the rows once more), and u times B^T is the last step of
the tiles of the base product, so no pass over the output is added; to what was made of weights in few bits it is added by a product of its
own. Backward is the same with the factors exchanged: d_y times s * B makes g [S, r], and g times A goes into the gradient of the rows.
Neither a weight with its term nor a gradient of it exists. (Shrink and expand are apart as in Punica's and S-LoRA's papers.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, factors, linear, pointwise, sorted_rows, token_codes
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide.coded_products import Product, Rows, product
from moefuse.kernels.triton.provide.products import Own
from moefuse.ops.meaning.call import ExpertsCall, Stack, Stacks, columns


class Products:
    """``u`` [S, r of all terms]: each term's rows times s * A, which :meth:`forward` writes; None where no projection has a term."""

    def __init__(self, it: Sorted, dtype: torch.dtype, stacks: Stacks, u: Tensor | None) -> None:
        self.it, self.own, self.stacks = it, Own(it, dtype), stacks
        self.rows = Rows(self.own)
        self.held: list[Held | None] = [None if s.codes is None else coded.held(s.weight, s.codes) for s in stacks]
        self.u = [None if u is None or s.term is None else u[:, part] for s, part in zip(stacks, columns(stacks), strict=True)]

    def forward(self, which: int, x: Tensor, out: Tensor, *, made: bool = False, **how: Any) -> Tensor:
        """out [S, features] = rows of x times the weights of a projection and its term, plus its biases. ``made``: u is there already.

        ``how``: ``tokens`` and ``scale``, as of ``linear.linear``.
        """
        (weight, bias, _, term), held, u, added = self.stacks[which], self.held[which], self.u[which], None
        if term is not None and u is not None:
            if not made:
                self.own.linear(x, [factors.copied(term.a, x.dtype, term.scale)], out=u, **how)
            added = linear.Term(u, factors.copied(term.b, x.dtype))
        if held is None:
            return self.own.linear(x, weight, bias, out=out, term=added, **how)
        return self.add(product(Product(out, x, held, self.rows, bias, **how)), added)

    def back(self, which: int, d_y: Tensor, out: Tensor, term: linear.Term | None, *, add: bool = False, tokens: bool = False) -> Tensor:
        """out [S, inputs] = rows of d_y times the weights of a projection, and what its term adds to that (:meth:`back_term`)."""
        held = self.held[which]
        if held is None:
            return self.own.linear(d_y, self.stacks[which].weight, back=True, out=out, add=add, tokens=tokens, term=term)
        return self.add(product(Product(out, d_y, held, self.rows, back=True, add=add, tokens=tokens)), term)

    def add(self, out: Tensor, term: linear.Term | None) -> Tensor:
        """out [S, N] += u [S, r] times the factor [E, N, r]."""
        if term is not None and term.rank:
            self.own.linear(term.u.to(out.dtype), [term.factor], out=out, add=True)
        return out

    def back_term(self, which: int, d_y: Tensor, *, tokens: bool = False) -> tuple[Tensor, linear.Term]:
        """g [S, r] = d_y times s * B, and what it adds to the gradient of the rows."""
        term, u = self.stacks[which].term, self.u[which]
        assert term is not None
        assert u is not None
        g = torch.empty((self.it.slots, term.rank), dtype=u.dtype, device=d_y.device)
        self.own.linear(d_y, [factors.copied(term.b, d_y.dtype, term.scale)], back=True, tokens=tokens, out=g)
        return g, linear.Term(g, factors.copied(term.a, d_y.dtype).transpose(1, 2))

    def hidden(self, call: ExpertsCall, h: Tensor, *, made: bool = False) -> None:
        """h [S, width] = the first projection, or both of them side by side; rows that are nobody's are not written."""
        scale, features = call.weights if call.body.on_input else None, call.w_in.features
        for which, target in enumerate((h[:, :features], h[:, features:]) if call.body.split else (h,)):
            self.forward(which, call.x, target, tokens=True, scale=scale, made=made)

    def weight_grads(self, stack: Stack, d_weights: Tensor, d_a: Tensor, h: Tensor, how: Activation, grad: Tensor) -> None:
        """The gradient of routing weights on the output, where the last projection rounds: from the activation as it was multiplied.

        ``d_a`` [S, I]: of the activation, without that of a term.
        """
        held, a = self.held[2], torch.empty_like(d_a)
        assert held is not None
        if a.numel():
            pointwise.activate(a, h, self.it, how)
        rows = token_codes.round_rows(a, self.it, held.codes.encoding)
        token_codes.weight_grads(d_a, rows, self.it, held, d_weights, grad, linear.weight(stack.bias, 1) if stack.bias else None)

    def term_weight_grads(self, d_weights: Tensor, g: Tensor) -> None:
        """What the last projection's term adds to that: of each slot <d_y times B, u>, for its rows are not rounded."""
        u, term = self.u[2], self.stacks[2].term
        assert u is not None
        assert term is not None
        if not term.scale:
            return
        sorted_rows.clear_dead(g, self.it)
        share = (g * u).sum(1) / term.scale
        d_weights += torch.empty_like(share).index_copy_(0, self.it.order, share).view(d_weights.shape)
