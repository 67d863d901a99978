"""Routed experts as one sort and contiguous per-expert GEMMs over sorted rows: in PyTorch alone, for CPUs and devices without kernels.

Rows are worked on in chunks of whole experts, so temporaries stay small (and in cache) however many slots there are, and the activation
runs once per chunk instead of once per expert. Only experts that have rows are visited. One host read of the expert ids per call. Weights
in few bits are unpacked expert by expert, and a low-rank term adds ``s * (rows @ A.T) @ B.T`` to what its projection made, in the
accumulation dtype: neither a weight with its term nor a gradient of it ever exists. Every sum has a fixed order: the same bits every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall, Stack, Term, columns
from moefuse.ops.meaning.reference import accumulation_dtype, expert_vector, expert_weight, split_gate
from moefuse.ops.meaning.token_codes import Rounding, as_rounded
from moefuse.runtime.dense import activate
from moefuse.runtime.gemm import mm_into
from moefuse.runtime.routing import FEW_SLOTS, Group, chunked, groups_of, groups_of_ids, sort_slots

CHUNK_ROWS = 256
"""Rows of a chunk (more when one expert has more)."""
SUM_AT_ONCE = 1 << 16
"""Up to this many elements [T, K, H] the weighted sum over slots is one expression; above, one slot at a time without the temporaries."""

BLOCK_BYTES = 64 << 20
"""The expert outputs [S, Hout] of a call are bounded by this: a larger call goes in blocks of tokens ..."""
BLOCK_ROWS = 128
"""... but never so short that an expert gets fewer rows than this on average, which would only re-read weights."""

Lists = Sequence[Tensor]


def without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a call which computes in the dtypes of what it is given, whatever autocast is around it outside of compiled code."""

    @functools.wraps(run)
    def function(call: Any, *rest: Any) -> Any:
        with torch.autocast(call.x.device.type, enabled=False):
            return run(call, *rest)

    return function


def experts(call: ExpertsCall) -> Tensor:
    """``moefuse::experts``."""
    num_experts, tokens, slots = call.w_in.experts, call.x.shape[0], call.ids.numel()
    per_token = call.top_k * call.w_out.features * call.dtype.itemsize
    if tokens * per_token > BLOCK_BYTES:
        block = max(BLOCK_BYTES // per_token, BLOCK_ROWS * num_experts // call.top_k, 1)
        if block < tokens:
            out = call.x.new_empty((tokens, call.w_out.features), dtype=call.out_dtype)
            for start in range(0, tokens, block):
                part = slice(start, start + block)
                out[part] = experts(call.of_tokens(part))
            return out
    order: Tensor | None
    if slots <= FEW_SLOTS:
        rows, groups = groups_of_ids(call.ids.reshape(-1).tolist(), num_experts)
        valid = len(rows)
        order = None if rows == list(range(slots)) else torch.tensor(rows, dtype=torch.int64, device=call.device)
    else:
        order, offsets = sort_slots(call.ids, num_experts)
        ends = offsets.tolist()
        groups, valid = groups_of(ends), ends[-1]
    return combine(SortedRows(call, order).run(groups, slots, None), call, order, valid)


def experts_forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``moefuse::experts_forward``: the output [T, Hout], and h [S, width] (zeros past the valid rows), order [S], offsets [E + 1]."""
    return experts_forward_with_u(call)[:4]


def experts_forward_with_u(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, and u [S, r of all terms] in the accumulation dtype: each term's rows times s * A, with zeros past the valid ones."""
    order, offsets = sort_slots(call.ids, call.w_in.experts)
    ends = offsets.tolist()
    slots, valid = order.shape[0], ends[-1]
    h = call.x.new_empty((slots, call.width))
    h[valid:].zero_()
    u = call.x.new_empty((slots, call.ranks), dtype=accumulation_dtype(call.dtype))
    u[valid:].zero_()
    ys = SortedRows(call, order, u).run(groups_of(ends), slots, h)
    return combine(ys, call, order, valid), h, order, offsets, u


def experts_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor) -> Tensor:
    """h [S, width] of :func:`experts_forward` once more, for the slots in the order [S] that it sorted them into."""
    ends = offsets.tolist()
    h = call.x.new_empty((order.shape[0], call.width))
    h[ends[-1] :].zero_()
    rows = SortedRows(call, order)
    for chunk in chunked(groups_of(ends), CHUNK_ROWS):
        start, end = chunk[0][1], chunk[-1][2]
        rows.pre_activation(rows.rows(start, end), h[start:end], chunk)
    return h


@without_autocast
def experts_extended(call: ExpertsCall) -> Tensor:
    """The same as :func:`experts`, of a call with codes or terms."""
    return experts(call)


experts_extended_forward = without_autocast(experts_forward_with_u)


@without_autocast
def experts_extended_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """h [S, width] of it once more. Terms are made again too: from u, products might round otherwise."""
    return experts_hidden(call, order, offsets)


class SortedRows:
    """The experts of one call on its sorted rows; ``u`` [S, r of all terms] takes the terms' rows times s * A, if given."""

    def __init__(self, call: ExpertsCall, order: Tensor | None, u: Tensor | None = None) -> None:
        self.u = u
        self.call, self.x, self.order, self.top_k = call, call.x, order, call.top_k
        self.scale = call.weights.reshape(-1) if call.body.on_input else None
        self.wide = accumulation_dtype(call.dtype)

    def rows(self, start: int, end: int) -> Tensor:
        """Inputs [n, H] of sorted rows [start, end), times the routing weight if it goes on the input."""
        if self.scale is None:
            if self.x.shape[0] == 1:
                return self.x.expand(end - start, -1)
            if self.order is None and self.top_k == 1:
                return self.x[start:end]
        slots = torch.arange(start, end, device=self.x.device) if self.order is None else self.order[start:end]
        xs = self.x.index_select(0, slots // self.top_k)
        if self.scale is None:
            return xs
        return (xs.to(self.wide) * self.scale[slots, None].to(self.wide)).to(self.x.dtype)

    def pre_activation(self, xs: Tensor, h: Tensor, chunk: list[Group]) -> None:
        """h [n, width] = first projection(s) of the chunk."""
        call, features = self.call, self.call.w_in.features
        self.project(0, h[:, :features], xs, chunk)
        if call.body.split:
            self.project(1, h[:, features:], xs, chunk)

    def run(self, groups: list[Group], slots: int, save: Tensor | None) -> Tensor:
        """Expert outputs [slots, Hout] in sorted order, invalid rows zero; the pre-activation goes to ``save`` [slots, width] if given."""
        call, body = self.call, self.call.body
        ys = self.x.new_empty((slots, call.w_out.features), dtype=call.dtype)
        ys[groups[-1][2] if groups else 0 :].zero_()
        for chunk in chunked(groups, CHUNK_ROWS):
            start, end = chunk[0][1], chunk[-1][2]
            xs = self.rows(start, end)
            h = self.x.new_empty((end - start, call.width), dtype=call.dtype) if save is None else save[start:end]
            self.pre_activation(xs, h, chunk)
            self.project(2, ys[start:end], activate(*split_gate(h, body.gating, body.up_first), body), chunk)
        return ys

    def project(self, which: int, out: Tensor, rows: Tensor, chunk: list[Group]) -> None:
        """out [n, F] = one projection of rows [n, I] of the chunk."""
        stack = self.call.stacks[which]
        project(out, rows, stack, chunk)
        if stack.term is not None:
            self.add_term(which, out, rows, chunk)

    def add_term(self, which: int, out: Tensor, rows: Tensor, chunk: list[Group]) -> None:
        """out [n, F] += s * (rows [n, I] @ A.T) @ B.T."""
        of, first = self.call.stacks, chunk[0][1]
        a, b, scale = of[which].term or Term()
        kept = None if self.u is None else self.u[:, columns(of)[which]]
        for e, start, end in chunk:
            part = slice(start - first, end - first)
            made = (rows[part].to(self.wide) @ expert_weight(a, e).to(self.wide).t()).mul_(scale)
            if kept is not None:
                kept[start:end] = made
            factor = expert_weight(b, e).to(self.wide).t()
            if out.dtype == self.wide:
                out[part].addmm_(made, factor)
            else:
                out[part] += made @ factor


def project(out: Tensor, rows: Tensor, stack: Stack, groups: list[Group]) -> None:
    """out[i] = rows[i] @ w[e].T + b[e] for consecutive groups; row 0 of both tensors is the first row of the first group."""
    if stack.rounding is not None:
        project_rounded(out, rows, stack, stack.rounding, groups)
        return
    w, b = stack.weights(rows.dtype), stack.bias
    stacked = w[0].transpose(1, 2) if len(w) == 1 and w[0].dim() == 3 else None
    for (e, _, _), into, part in cut_groups(groups, out, rows):
        mm_into(into, part, w[e].t() if stacked is None else stacked[e], expert_vector(b, e))


def project_rounded(out: Tensor, rows: Tensor, stack: Stack, rounding: Rounding, groups: list[Group]) -> None:
    """The same where the projection rounds its rows: the product is in the accumulation dtype, and rounded once."""
    inner = accumulation_dtype(out.dtype)
    w = stack.weights(inner)
    for (e, _, _), into, part in cut_groups(groups, out, as_rounded(rounding, rows).to(inner)):
        weight, bias = w[e].t(), expert_vector(stack.bias, e)
        into.copy_(part @ weight if bias is None else torch.addmm(bias.to(out.dtype).to(inner), part, weight))


def back_project(out: Tensor, rows: Tensor, w: Lists, groups: list[Group]) -> None:
    """out [n, I]: out[i] = rows[i] @ w[e], of rows [n, F]."""
    for (e, _, _), into, part in cut_groups(groups, out, rows):
        mm_into(into, part, expert_weight(w, e))


def cut_groups(groups: list[Group], out: Tensor, rows: Tensor) -> Iterator[tuple[Group, Tensor, Tensor]]:
    """The rows of each group, of both tensors [n, ...]; rows past the last group are left out."""
    sizes = [end - start for _, start, end in groups]
    rest = rows.shape[0] - sum(sizes)
    return zip(groups, out.split_with_sizes([*sizes, rest]), rows.split_with_sizes([*sizes, rest]), strict=False)


def combine(ys: Tensor, call: ExpertsCall, order: Tensor | None, valid: int) -> Tensor:
    """Weighted sum [T, Hout] over the slots of each token. ``order`` may stop after its valid entries; ys is zero past them.

    None as ``order`` says that row i is slot i, and all are valid.
    """
    tokens, top_k = call.ids.shape
    slots = tokens * top_k
    if not valid:
        return torch.zeros((tokens, ys.shape[1]), dtype=call.out_dtype, device=ys.device)
    weights = None if call.body.on_input else call.weights.to(accumulation_dtype(ys.dtype))
    if order is None:
        return sum_slots(ys, None, weights, top_k).to(call.out_dtype)
    position = torch.full((slots,), slots - 1, dtype=torch.int64, device=ys.device) if order.shape[0] < slots else order.new_empty(slots)
    position[order] = torch.arange(order.shape[0], device=ys.device)
    if weights is not None and valid < slots:
        weights = weights.masked_fill((position >= valid).view(tokens, top_k), 0)
    return sum_slots(ys, position, weights, top_k).to(call.out_dtype)


def sum_slots(ys: Tensor, position: Tensor | None, weights: Tensor | None, top_k: int) -> Tensor:
    """sum over k of weights[t, k] * ys[position of slot (t, k)], slot 0 first, in the accumulation dtype. [T, Hout].

    ``position`` [S] None: rows are in slot order already.
    """
    wide = accumulation_dtype(ys.dtype)
    slots, hidden = ys.shape
    if slots * hidden <= SUM_AT_ONCE:
        rows = ys if position is None else ys.index_select(0, position)
        terms = rows.view(-1, top_k, hidden).to(wide)
        return (terms if weights is None else terms * weights[:, :, None]).sum(1)
    out = torch.zeros((slots // top_k, hidden), dtype=wide, device=ys.device)
    for k in range(top_k):
        rows = ys[k::top_k] if position is None else ys.index_select(0, position[k::top_k])
        if weights is None:
            out.add_(rows)
        else:
            out.addcmul_(rows.to(wide), weights[:, k : k + 1])
    return out
