"""Routed experts on CUDA without Triton: every expert on every token, in plain torch.

E/K times the arithmetic of a sorted program, but its launches and buffers do not depend on the routing: nothing waits for the device, and a
CUDA graph can record it. It runs what the Triton kernels do not take, and everything where Triton cannot be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moefuse.ops.activations import ACTIVATIONS
from moefuse.ops.reference import accumulation_dtype, count_experts, expert_vector, expert_weight, split_gate

Lists = Sequence[Tensor]


def supports(x: Tensor, *rest: object) -> str | None:
    """None for tensors on a CUDA device: elsewhere a host that reads the routing is quicker."""
    return None if x.device.type == "cuda" else f"tensors on {x.device.type}, where reading the routing costs nothing"


def one_expert(
    rows: Tensor, lists: Sequence[Lists], e: int, gating: str, up_first: bool, act: Callable[[Tensor, Tensor | None], Tensor]
) -> Tensor:
    """[n, Hout]: expert ``e`` on every row [n, H]; ``act`` is given gate and up [n, I], and its result is in their dtype."""
    w_in, w_up, w_out, b_in, b_up, b_out = lists
    linear = torch.nn.functional.linear
    h = linear(rows, expert_weight(w_in, e), expert_vector(b_in, e))
    gate, up = split_gate(h, gating, up_first)
    if gating == "separate":
        gate, up = h, linear(rows, expert_weight(w_up, e), expert_vector(b_up, e))
    return linear(act(gate, up), expert_weight(w_out, e), expert_vector(b_out, e))


def activate(gate: Tensor, up: Tensor | None, activation: str, args: Sequence[float]) -> Tensor:
    """The activation in the accumulation dtype, rounded to that of ``gate``."""
    wide = accumulation_dtype(gate.dtype)
    return ACTIVATIONS[activation].forward(gate.to(wide), None if up is None else up.to(wide), args).to(gate.dtype)


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
    """``moefuse::experts``, arguments in schema order; any device.

    The result of a slot is selected, not multiplied by a mask, so a NaN stays in its token and its expert.
    """
    tokens, top_k = ids.shape
    wide = accumulation_dtype(x.dtype)
    lists = (w_in, w_up, w_out, b_in, b_up, b_out)
    scale = weights.to(wide)
    hidden_out = expert_weight(w_out, 0).shape[0]
    num_experts = count_experts(w_in)
    if not (tokens and top_k):
        return torch.zeros((tokens, hidden_out), dtype=out_dtype or x.dtype, device=x.device)
    y = torch.zeros((top_k, tokens, hidden_out), dtype=x.dtype, device=x.device)
    for e in range(num_experts):
        chosen = (ids == e).t()
        # A token's weight for this expert; with the same expert in several slots, the rows differ only if the weight is on the input.
        for slots in range(top_k) if weight_on_input else (slice(None),):
            rows = (x.to(wide) * scale[:, slots, None]).to(x.dtype) if isinstance(slots, int) else x
            result = one_expert(rows, lists, e, gating, up_first, lambda gate, up: activate(gate, up, activation, activation_args))
            y[slots] = torch.where(chosen[slots, :, None], result, y[slots])
    out = torch.zeros((tokens, hidden_out), dtype=wide, device=x.device)
    valid = (ids >= 0) & (ids < num_experts)
    for k in range(top_k):
        term = y[k].to(wide)
        if not weight_on_input:
            term = term * scale[:, k : k + 1].masked_fill(~valid[:, k : k + 1], 0)
        out += term
    return out.to(out_dtype or x.dtype)
