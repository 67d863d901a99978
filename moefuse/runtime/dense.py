"""Routed experts on CUDA without Triton: every expert on every token, in plain torch.

E/K times the arithmetic of a sorted program, but its launches and buffers do not depend on the routing: nothing waits for the device, and a
CUDA graph can record it. It runs what the Triton kernels do not take, and everything where Triton cannot be imported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.call import Body, ExpertsCall, Stack
from moefuse.ops.meaning.reference import accumulation_dtype, split_gate


def supports(call: ExpertsCall) -> str | None:
    """None for tensors on a CUDA device: elsewhere a host that reads the routing is quicker."""
    return None if call.device.type == "cuda" else f"tensors on {call.device.type}, where reading the routing costs nothing"


def activate(gate: Tensor, up: Tensor | None, body: Body) -> Tensor:
    """The activation of gate and up [n, I], computed in the accumulation dtype, rounded to that of ``gate``."""
    wide = accumulation_dtype(gate.dtype)
    return ACTIVATIONS[body.activation].forward(gate.to(wide), None if up is None else up.to(wide), body.args).to(gate.dtype)


def one_expert(
    rows: Tensor,
    weights: tuple[Stack, Stack, Stack],
    body: Body,
    e: int,
    act: Callable[[Tensor, Tensor | None, Body], Tensor] = activate,
) -> Tensor:
    """[n, Hout]: expert ``e`` on every row [n, H]; ``act`` is given gate and up [n, I], and its result is in their dtype."""
    w_in, w_up, w_out = weights
    h = linear(rows, *w_in.expert(e))
    gate, up = (h, linear(rows, *w_up.expert(e))) if body.split else split_gate(h, body.gating, body.up_first)
    return linear(act(gate, up, body), *w_out.expert(e))


def linear(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """One projection of rows [n, in] by w [out, in], in the dtype of the rows: [n, out]."""
    return torch.nn.functional.linear(rows, w.to(rows.dtype), None if b is None else b.to(rows.dtype))


def experts(call: ExpertsCall) -> Tensor:
    """``moefuse::experts``; any device.

    The result of a slot is selected, not multiplied by a mask, so a NaN stays in its token and its expert.
    """
    x, ids, on_input = call.x, call.ids, call.body.on_input
    tokens, top_k = ids.shape
    wide = accumulation_dtype(x.dtype)
    scale = call.weights.to(wide)
    hidden_out, num_experts = call.w_out.features, call.w_in.experts
    weights = call.w_in, call.w_up, call.w_out
    if not (tokens and top_k):
        return torch.zeros((tokens, hidden_out), dtype=call.out_dtype, device=x.device)
    y = torch.zeros((top_k, tokens, hidden_out), dtype=x.dtype, device=x.device)
    for e in range(num_experts):
        chosen = (ids == e).t()
        # A token's weight for this expert; with the same expert in several slots, the rows differ only if the weight is on the input.
        for slots in range(top_k) if on_input else (slice(None),):
            rows = (x.to(wide) * scale[:, slots, None]).to(x.dtype) if isinstance(slots, int) else x
            y[slots] = torch.where(chosen[slots, :, None], one_expert(rows, weights, call.body, e), y[slots])
    out = torch.zeros((tokens, hidden_out), dtype=wide, device=x.device)
    valid = (ids >= 0) & (ids < num_experts)
    for k in range(top_k):
        term = y[k].to(wide)
        if not on_input:
            term = term * scale[:, k : k + 1].masked_fill(~valid[:, k : k + 1], 0)
        out += term
    return out.to(call.out_dtype)
