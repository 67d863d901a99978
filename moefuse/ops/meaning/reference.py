"""What ``moefuse::experts`` means, in plain torch: the oracle of the tests and the text that fakes, providers and docs derive from.

Numerics, for storage dtype D (the dtype of x) and accumulation dtype A (float64 if D is float64, else float32):

* expert weights and biases are in D or, where D has 16 bits, in float32: then each is rounded to D as it is read, and has its gradient in
  float32 (what ``torch.autocast`` does with float32 Parameters);
* each projection is a GEMM on D operands accumulated in at least A, rounded to D; its bias is added with it;
* the activation runs in A and its result is rounded to D before the second projection;
* routing weights multiply in A, and the K slots of a token are added in A, slot 0 first; the sum is rounded once to the output dtype;
* with ``weight_on_input`` the token times its routing weight is computed in A and rounded to D before the first projection.

An id outside [0, E) contributes nothing, whatever its routing weight holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS

GATINGS = ("merged", "interleaved", "separate", "plain")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """A, the dtype in which activations, weighting and the sum over slots are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_experts(w: Sequence[Tensor]) -> int:
    """E of one weight list: its single stacked [E, out, in] tensor, or one [out, in] tensor per expert."""
    return w[0].shape[0] if len(w) == 1 and w[0].dim() == 3 else len(w)


def expert_weight(w: Sequence[Tensor], expert: int) -> Tensor:
    """Weight [out, in] of one expert, a view."""
    return w[0][expert] if len(w) == 1 and w[0].dim() == 3 else w[expert]


def expert_vector(v: Sequence[Tensor], expert: int) -> Tensor | None:
    """Bias [out] of one expert, a view; None when there is none."""
    if not v:
        return None
    return v[0][expert] if len(v) == 1 and v[0].dim() == 2 else v[expert]


def split_gate(h: Tensor, gating: str, up_first: bool) -> tuple[Tensor, Tensor | None]:
    """Views (gate, up) of a pre-activation [n, 2I]; (h, None) for a plain expert. "separate" is kept as gate | up."""
    if gating == "plain":
        return h, None
    if gating == "interleaved":
        first, second = h[:, 0::2], h[:, 1::2]
    else:
        half = h.shape[1] // 2
        first, second = h[:, :half], h[:, half:]
    return (second, first) if up_first else (first, second)


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Sequence[Tensor],
    w_up: Sequence[Tensor],
    w_out: Sequence[Tensor],
    b_in: Sequence[Tensor],
    b_up: Sequence[Tensor],
    b_out: Sequence[Tensor],
    *,
    activation: str = "silu",
    activation_args: Sequence[float] = (),
    gating: str = "merged",
    up_first: bool = False,
    weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Routed experts, one expert at a time, differentiable by autograd.

    Args:
        x: [T, H] in D, the dtype that is computed in.
        ids: [T, K], any integer dtype.
        weights: [T, K], any floating dtype.
        w_in, w_up, w_out: weight lists ([E, out, in] or E times [out, in]); w_up is empty unless gating is "separate". All in D, or all in
            float32 where D has 16 bits; biases as they are.
        b_in, b_up, b_out: bias lists ([E, out] or E times [out]), each may be empty.
        activation, activation_args: a key of :data:`~moefuse.ops.meaning.activations.ACTIVATIONS` and its constants.
        gating: "merged", "interleaved", "separate" or "plain".
        up_first: the up half (or the even features) comes first.
        weight_on_input: routing weights multiply the token instead of the expert's output.
        out_dtype: dtype of the result, x.dtype when None.

    Returns:
        [T, Hout].
    """
    lists = ((w_in, b_in), (w_up, b_up), (w_out, b_out))

    def project(rows: Tensor, which: int, e: int) -> Tensor:
        w, b = lists[which]
        bias = expert_vector(b, e)
        return F.linear(rows, expert_weight(w, e).to(x.dtype), None if bias is None else bias.to(x.dtype))

    options = activation, activation_args, gating, up_first, weight_on_input
    count, hidden = count_experts(w_in), expert_weight(w_out, 0).shape[0]
    return experts_by_projections(x, ids, weights, count, hidden, project, *options, out_dtype, x.dtype)


def experts_by_projections(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    hidden_out: int,
    project: Callable[[Tensor, int, int], Tensor],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> Tensor:
    """:func:`experts_reference`, given what its projections do: ``project(rows [n, ..], 0 for w_in or 1 for w_up or 2 for w_out, e)``.

    ``dtype``: that is computed in; tokens that come rounded are bytes.
    """
    tokens, top_k = ids.shape
    wide = accumulation_dtype(dtype)
    act = ACTIVATIONS[activation].forward
    scale = weights.to(wide)
    y = x.new_zeros((tokens, top_k, hidden_out), dtype=dtype)
    for e in range(num_experts):
        token, slot = torch.where(ids == e)
        rows = x[token]
        if weight_on_input:
            rows = (rows.to(wide) * scale[token, slot, None]).to(dtype)
        h = project(rows, 0, e)
        gate, up = split_gate(h, gating, up_first)
        if gating == "separate":
            gate, up = h, project(rows, 1, e)
        a = act(gate.to(wide), None if up is None else up.to(wide), activation_args).to(dtype)
        y = y.index_put((token, slot), project(a, 2, e))
    valid = (ids >= 0) & (ids < num_experts)
    out = torch.zeros((tokens, hidden_out), dtype=wide, device=x.device)
    for k in range(top_k):
        term = y[:, k].to(wide)
        if not weight_on_input:
            term = term * scale[:, k : k + 1].masked_fill(~valid[:, k : k + 1], 0)
        out = out + term
    return out.to(out_dtype or dtype)


def topk_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk``: scores [..., E] -> their k greatest [..., K], and the positions of these, int64 [..., K].

    What ``torch.topk(scores, k)`` gives, greatest first and NaN before all else, with what torch leaves open decided: of equal values (0.0
    and -0.0 are equal, and so are all NaN) the lowest position comes first. Values keep their bits.
    """
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), ids[..., :k].contiguous()


def router_logits_reference(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``moefuse::router_logits``: x [..., H] times w [E, H] transposed, plus bias [E], summed in the accumulation dtype: [..., E]."""
    acc = torch.promote_types(accumulation_dtype(x.dtype), accumulation_dtype(w.dtype))
    return F.linear(x.to(acc), w.to(acc), None if bias is None else bias.to(acc)).to(out_dtype)
