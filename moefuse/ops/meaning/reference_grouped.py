"""What the ops of the grouped tier mean, in plain torch: differentiable by autograd as often as anybody likes, and by ``torch.func``.

order and offsets are described in ``moefuse/runtime/routing.py``; rows from offsets[E] on are of no expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moefuse.ops.meaning.reference import accumulation_dtype, count_experts, expert_vector, expert_weight

Lists = Sequence[Tensor]


def expert_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """[S]: the expert of each sorted row, E for one of none."""
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(rows, device=offsets.device), right=True)


def ids_of_rows(order: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """ids [T, K] that were sorted so; E for a slot of no expert."""
    return torch.empty_like(order).scatter(0, order, expert_of_rows(offsets, order.shape[0])).view(-1, top_k)


def permute_reference(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moefuse::permute``: rows [S, H] of x [T, H] in the order of their experts, order and offsets."""
    flat = ids.reshape(-1).to(torch.int64)
    key, order = torch.sort(torch.where((flat < 0) | (flat > num_experts), num_experts, flat), stable=True)
    offsets = torch.searchsorted(key, torch.arange(num_experts + 1, device=ids.device))
    return x.index_select(0, order // max(ids.shape[1], 1)), order, offsets


def grouped_linear_reference(xs: Tensor, offsets: Tensor, w: Lists, b: Lists) -> Tensor:
    """``moefuse::grouped_linear``: each row of xs [S, K] times its expert's weight, with its bias; zeros for rows of no expert."""
    of = expert_of_rows(offsets, xs.shape[0])
    out = xs.new_zeros((xs.shape[0], expert_weight(w, 0).shape[0]))
    for e in range(count_experts(w)):
        (rows,) = torch.where(of == e)
        bias = expert_vector(b, e)
        weight = expert_weight(w, e).to(xs.dtype)
        out = out.index_put((rows,), F.linear(xs[rows], weight, None if bias is None else bias.to(xs.dtype)))
    return out


def expert_rows_reference(v: Lists, offsets: Tensor, num_rows: int) -> Tensor:
    """``moefuse::expert_rows``: for each row the vector of its expert, [num_rows, n]; zeros for rows of none."""
    table = v[0] if len(v) == 1 and v[0].dim() == 2 else torch.stack(list(v))
    of = expert_of_rows(offsets, num_rows)
    return table.index_select(0, of.clamp(max=table.shape[0] - 1)).masked_fill((of == table.shape[0])[:, None], 0)


def combine_reference(
    ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None
) -> Tensor:
    """``moefuse::combine``: the weighted sum [T, H] of each token's rows of ys [S, H], slot 0 first; those of no expert add nothing."""
    wide = accumulation_dtype(ys.dtype)
    position = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device)).view(-1, top_k)
    dead = position >= offsets[-1]
    out = torch.zeros((position.shape[0], ys.shape[1]), dtype=wide, device=ys.device)
    for k in range(top_k):
        rows = ys.index_select(0, position[:, k]).to(wide)
        rows = rows if weights is None else rows * weights[:, k : k + 1].to(wide)
        out = out + rows.masked_fill(dead[:, k : k + 1], 0)
    return out.to(out_dtype or ys.dtype)
