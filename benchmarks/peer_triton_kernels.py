"""A peer of ``layer.py``: the same layer by OpenAI's triton_kernels (3.5), where that package can be imported.

It takes router logits, so the logarithms of the given weights are scattered to the given ids, and its time includes its own top-k. Its
weights are packed as it wants them beforehand (gate and up interleaved), which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_shapes import Shape
from torch import Tensor


@triton.jit
def silu_pairs(x, unused):
    """silu(even columns) * odd columns, [M, 2N] -> [M, N]: the activation in the form that triton_kernels fuses."""
    gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return gate / (1 + tl.exp(-gate)) * up


def triton_kernels_layer(s: Shape, lists: tuple[list[Tensor], ...]) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The experts of ``s`` over the weights ``lists``.

    Raises:
        ImportError: triton_kernels is not there.
    """
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn

    w_in, _, w_out, b_in, _, b_out = lists
    w1, w2 = w_in[0].transpose(1, 2), w_out[0].transpose(1, 2)
    if not s.oai:
        w1 = torch.stack(w_in[0].chunk(2, 1), 2).flatten(1, 2).transpose(1, 2)
    bias1, bias2 = (b_in[0].float(), b_out[0].float()) if s.oai else (None, None)
    if s.oai:
        activation = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)
    else:
        activation = FusedActivation(FnSpecs("silu_pairs", silu_pairs, ("unused",)), (0.0,), 2)
    logits: dict[int, Tensor] = {}

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        scores = logits.get(ids.data_ptr())
        if scores is None:
            scores = torch.full((x.shape[0], s.experts), -1e4, device=x.device).scatter_(1, ids, weights.float().log())
            logits[ids.data_ptr()] = scores
        data, gather, scatter = routing(scores, s.top_k)
        h = matmul_ogs(x, w1, bias1, data, gather_indx=gather, fused_activation=activation)
        return matmul_ogs(h, w2, bias2, data, scatter_indx=scatter, gammas=data.gate_scal)

    return call
