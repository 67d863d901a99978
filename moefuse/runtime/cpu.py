"""Routed experts as one sort and contiguous per-expert GEMMs over sorted rows: in PyTorch alone, for CPUs and devices without kernels.

Rows are worked on in chunks of whole experts, so temporaries stay small (and in cache) however many slots there are, and the activation
runs once per chunk instead of once per expert. Only experts that have rows are visited. One host read of the expert ids per call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moefuse.ops.activations import ACTIVATIONS
from moefuse.ops.reference import accumulation_dtype, count_experts, expert_vector, expert_weight, split_gate
from moefuse.runtime.gemm import mm_into
from moefuse.runtime.routing import Group, chunked, groups_of, groups_of_ids, sort_slots

FEW_SLOTS = 64
"""Up to this many slots are sorted in Python."""
CHUNK_ROWS = 256
"""Rows of a chunk (more when one expert has more)."""
SUM_AT_ONCE = 1 << 16
"""Up to this many elements [T, K, H] the weighted sum over slots is one expression; above, one slot at a time without the temporaries."""

BLOCK_BYTES = 64 << 20
"""The expert outputs [S, Hout] of a call are bounded by this: a larger call goes in blocks of tokens ..."""
BLOCK_ROWS = 128
"""... but never so short that an expert gets fewer rows than this on average, which would only re-read weights."""

Lists = Sequence[Tensor]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``moefuse::experts``, arguments in schema order."""
    num_experts = count_experts(w_in)
    slots = ids.numel()
    if slots * w_out[0].shape[-2] * x.element_size() > BLOCK_BYTES:
        per_token = ids.shape[1] * w_out[0].shape[-2] * x.element_size()
        block = max(BLOCK_BYTES // per_token, BLOCK_ROWS * num_experts // ids.shape[1], 1)
        if block < x.shape[0]:
            rest = (w_in, w_up, w_out, b_in, b_up, b_out, activation, activation_args, gating, up_first, weight_on_input, out_dtype)
            out = x.new_empty((x.shape[0], w_out[0].shape[-2]), dtype=out_dtype or x.dtype)
            for start in range(0, x.shape[0], block):
                part = slice(start, start + block)
                out[part] = experts(x[part], ids[part], weights[part], *rest)
            return out
    order: Tensor | None
    if slots <= FEW_SLOTS:
        rows, groups = groups_of_ids(ids.reshape(-1).tolist(), num_experts)
        valid = len(rows)
        order = None if rows == list(range(slots)) else torch.tensor(rows, dtype=torch.int64, device=x.device)
    else:
        order, offsets = sort_slots(ids, num_experts)
        ends = offsets.tolist()
        groups, valid = groups_of(ends), ends[-1]
    body = _Body(x, weights, order, w_in, w_up, w_out, b_in, b_up, b_out, activation, activation_args, gating, up_first, weight_on_input)
    ys = body.run(groups, slots, None)
    return _combine(ys, None if weight_on_input else weights, order, valid, x.shape[0], ids.shape[1], out_dtype or x.dtype)


def experts_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``moefuse::experts_forward``: the output and (h, order, offsets) for backward; rows of h past the valid ones are zeros."""
    order, offsets = sort_slots(ids, count_experts(w_in))
    ends = offsets.tolist()
    valid = ends[-1]
    body = _Body(x, weights, order, w_in, w_up, w_out, b_in, b_up, b_out, activation, activation_args, gating, up_first, weight_on_input)
    h = x.new_empty((order.shape[0], body.width))
    h[valid:].zero_()
    ys = body.run(groups_of(ends), order.shape[0], h)
    out = _combine(ys, None if weight_on_input else weights, order, valid, x.shape[0], ids.shape[1], out_dtype or x.dtype)
    return out, h, order, offsets


class _Body:
    """The expert body on sorted rows; holds the arguments of one call."""

    def __init__(
        self,
        x: Tensor,
        weights: Tensor,
        order: Tensor | None,
        w_in: Lists,
        w_up: Lists,
        w_out: Lists,
        b_in: Lists,
        b_up: Lists,
        b_out: Lists,
        activation: str,
        activation_args: Sequence[float],
        gating: str,
        up_first: bool,
        weight_on_input: bool,
    ) -> None:
        self.x, self.order = x, order
        self.top_k = weights.shape[1]
        self.scale = weights.reshape(-1) if weight_on_input else None
        self.w_in, self.w_up, self.w_out, self.b_in, self.b_up, self.b_out = w_in, w_up, w_out, b_in, b_up, b_out
        self.activation, self.args, self.gating, self.up_first = ACTIVATIONS[activation].forward, activation_args, gating, up_first
        self.wide = accumulation_dtype(x.dtype)
        self.out_features = w_in[0].shape[-2]
        self.width = 2 * self.out_features if gating == "separate" else self.out_features

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
        if self.gating == "separate":
            project(h[:, : self.out_features], xs, self.w_in, self.b_in, chunk)
            project(h[:, self.out_features :], xs, self.w_up, self.b_up, chunk)
        else:
            project(h, xs, self.w_in, self.b_in, chunk)

    def run(self, groups: list[Group], slots: int, save: Tensor | None) -> Tensor:
        """Expert outputs [slots, Hout] in sorted order, invalid rows zero; the pre-activation goes to ``save`` [slots, width] if given."""
        ys = self.x.new_empty((slots, self.w_out[0].shape[-2]))
        ys[groups[-1][2] if groups else 0 :].zero_()
        for chunk in chunked(groups, CHUNK_ROWS):
            start, end = chunk[0][1], chunk[-1][2]
            xs = self.rows(start, end)
            h = self.x.new_empty((end - start, self.width)) if save is None else save[start:end]
            self.pre_activation(xs, h, chunk)
            gate, up = split_gate(h, self.gating, self.up_first)
            a = self.activation(gate.to(self.wide), None if up is None else up.to(self.wide), self.args).to(self.x.dtype)
            project(ys[start:end], a, self.w_out, self.b_out, chunk)
        return ys


def project(out: Tensor, rows: Tensor, w: Lists, b: Lists, groups: list[Group]) -> None:
    """out[i] = rows[i] @ w[e].T + b[e] for consecutive groups; row 0 of both tensors is the first row of the first group."""
    stacked = w[0].transpose(1, 2) if len(w) == 1 and w[0].dim() == 3 else None
    for (e, _, _), into, part in _cut(groups, out, rows):
        mm_into(into, part, w[e].t() if stacked is None else stacked[e], expert_vector(b, e))


def back_project(out: Tensor, rows: Tensor, w: Lists, groups: list[Group]) -> None:
    """out[i] = rows[i] @ w[e]."""
    for (e, _, _), into, part in _cut(groups, out, rows):
        mm_into(into, part, expert_weight(w, e))


def _cut(groups: list[Group], out: Tensor, rows: Tensor) -> Iterator[tuple[Group, Tensor, Tensor]]:
    """The rows of each group, of both tensors; rows past the last group are left out."""
    sizes = [end - start for _, start, end in groups]
    rest = rows.shape[0] - sum(sizes)
    return zip(groups, out.split_with_sizes([*sizes, rest]), rows.split_with_sizes([*sizes, rest]), strict=False)


def _combine(ys: Tensor, weights: Tensor | None, order: Tensor | None, valid: int, tokens: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Weighted sum [T, Hout] over the slots of each token. ``order`` may stop after its valid entries; ys is zero past them.

    None as ``order`` says that row i is slot i, and all are valid.
    """
    wide = accumulation_dtype(ys.dtype)
    hidden = ys.shape[1]
    slots = tokens * top_k
    if not valid:
        return torch.zeros((tokens, hidden), dtype=dtype, device=ys.device)
    if order is None:
        weights = None if weights is None else weights.to(wide)
        return sum_slots(ys, None, weights, top_k).to(dtype)
    position = torch.full((slots,), slots - 1, dtype=torch.int64, device=ys.device) if order.shape[0] < slots else order.new_empty(slots)
    position[order] = torch.arange(order.shape[0], device=ys.device)
    if weights is not None:
        weights = weights.to(wide)
        if valid < slots:
            weights = weights.masked_fill((position >= valid).view(tokens, top_k), 0)
    return sum_slots(ys, position, weights, top_k).to(dtype)


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
