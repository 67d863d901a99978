"""Block sizes and launches of the kernels in ``wgrad.py``: gradients of lists of weights and vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moefuse.kernels.triton.device import wgrad
from moefuse.kernels.triton.device.structs import Experts, Rows, Stored
from moefuse.kernels.triton.host import sorted_rows, specialised
from moefuse.kernels.triton.host.layout import Device, device_of, precision_of, rows_descriptor
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.operands import describe
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted, aligned_rows, fit, whole
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.launch import Begin
from moefuse.tuning.problem import Tiles


def grad_sizes(mean_rows: float, aligned: bool, scaled: bool, dtype: torch.dtype, device: Device) -> tuple[int, Tiles]:
    """(BN, tiles) of ``wgrad.weight_grads``; bn of the tiles is the kernel's BK, bk its rows BR. Scaling rows takes registers."""
    if dtype == torch.float64:
        return 16, Tiles(16, 16, 8, 1)
    if dtype == torch.float32:
        bn = 128 if device.hopper and aligned and mean_rows > 64 and not scaled else 64
        return bn, fit(Tiles(64, 32, 8 if scaled else 4, 3, 8), bn, 4, device)
    if not aligned:
        return 64, fit(Tiles(64, 32, 8, 3, 8), 64, 2, device)
    if not device.hopper:
        return 128, fit(Tiles(128, 64 if mean_rows > 32 and not scaled else 32, 8, 3, 8), 128, 2, device)
    return 128, fit(Tiles(256, 64 if mean_rows > 32 else 32, 8, 3, 8), 128, 2, device)


GRAD_ROWS = 32
"""Mean rows of an expert from which on gradients of weights are worth sorted copies of the tokens, which come through descriptors: measured
there as everywhere above (``benchmarks/wgrad_gpu.py``), 1.3 to 1.7 times as fast as gathering them while they are loaded."""


def grad_tiles(g: Tensor, x: Tensor, it: Sorted) -> tuple[int, Tiles] | None:
    """(BN, tiles) of ``wgrad.weight_grad_tiles`` for factors g [., N] and x [., K]; None where it cannot be or does not pay.

    The tiles' bn is the kernel's BK, bk its BR.
    """
    n, k, device = g.shape[1], x.shape[1], device_of(x.device)
    if not (device.hopper and x.element_size() == 2 and whole(2, n, k) and it.mean_rows >= GRAD_ROWS and min(n, k) >= 64):
        return None
    if it.mean_rows >= 768:
        return 128, fit(Tiles(256, 32, 8, 5, 8), 128, 2, device)
    return 128, fit(Tiles(128, 64, 4, 3, 8) if it.mean_rows <= 128 else Tiles(128, 32, 4, 5, 8), 128, 2, device)


def new_grads(tensors: Lists, dims: int) -> tuple[list[Tensor], Weight, Tensor | None]:
    """(gradients with the strides of their tensors, how a kernel writes them, what it writes instead if their strides differ)."""
    grads = [torch.empty_like(t) for t in tensors]
    operand = describe(grads, dims)
    if not operand.uniform:
        stacked = torch.empty((len(grads), *grads[0].shape), dtype=grads[0].dtype, device=grads[0].device)
        return grads, Weight(stacked, describe([stacked], dims)), stacked
    if not operand.table:
        return grads, Weight(grads[0], operand), None
    table = torch.empty(-(-len(grads) // 8) * 8, dtype=torch.int64, device=grads[0].device)
    for i in range(0, len(grads), 8):
        eight = [*grads[i : i + 8], *[grads[0]] * 7][:8]  # what is behind the last one is read by nobody
        begins = {f"a{at}": Begin(t) for at, t in enumerate(eight)}
        launch(wgrad.write_addresses, (1,), {"table": table, **begins}, warps=1, first=i)
    return grads, Weight(table, operand), None


def spread(grads: list[Tensor], stacked: Tensor | None) -> list[Tensor]:
    """The gradients, filled from what was written in their place."""
    if stacked is not None:
        for g, part in zip(grads, stacked, strict=True):
            g.copy_(part)
    return grads


def weight_grads(
    w: Lists, g: Tensor, x: Tensor, it: Sorted, *, g_tokens: bool = False, x_tokens: bool = False, scale: Tensor | None = None
) -> list[Tensor]:
    """Gradients of a list of weights, from those of the outputs g and the inputs x: [S, N] rows, or [T, N] tokens."""
    grads, target, instead = new_grads(w, 2)
    tiles = None if g_tokens or x_tokens else grad_tiles(g, x, it)
    if tiles is not None and all(aligned_rows(t) for t in (g, x)):
        _weight_grad_tiles(target, w[0].dtype != x.dtype, g, x, it, *tiles)
        return spread(grads, instead)
    n, k = g.shape[1], x.shape[1]
    device = device_of(x.device)
    bn, part = grad_sizes(it.mean_rows, whole(x.element_size(), n, k), scale is not None, x.dtype, device)
    # Gathered rows come one load after their row numbers, and Triton divides the stages between both. Elsewhere registers would not do.
    if device.hopper and x.element_size() == 2 and (g_tokens or x_tokens) and scale is None:
        part = replace(part, stages=2 * part.stages - 1)
    sums(target, w[0].dtype != x.dtype, g, x, it, bn, part, g_tokens=g_tokens, x_tokens=x_tokens, scale=scale)
    return spread(grads, instead)


HALVED = 64 << 20
"""Bytes of a sorted copy of tokens from which on it is made of half of their features at a time: gradients of weights are the last that a
program makes, beside everything else that it holds. The other operand is read once more: 0.05 ms of the 2.8 of a step of one layer at 4096
tokens of Qwen3."""


def halved(w: Lists, tokens: Tensor, rows: Tensor, it: Sorted) -> bool:
    """Whether :func:`weight_grads_by_halves` takes tokens and rows: each half is of whole tiles, and of one tensor of all experts."""
    large = it.slots * tokens.shape[1] * tokens.element_size() >= HALVED
    return large and len(w) == 1 and w[0].dim() == 3 and tokens.shape[1] % 512 == 0 and aligned_rows(rows)


def weight_grads_by_halves(
    w: Lists, g: Tensor, x: Tensor, it: Sorted, tiles: tuple[int, Tiles], sort: Callable[[Tensor], Tensor], *, of_g: bool
) -> list[Tensor]:
    """:func:`weight_grads` with ``tiles`` of :func:`grad_tiles`, where ``sort`` makes the sorted rows of g (``of_g``) or of x."""
    (grad,), _, _ = new_grads(w, 2)
    tokens = g if of_g else x
    half = tokens.shape[1] // 2
    for features in (slice(half), slice(half, None)):
        piece = grad[:, features] if of_g else grad[:, :, features]
        rows = sort(tokens[:, features])
        pair = (rows, x) if of_g else (g, rows)
        _weight_grad_tiles(Weight(piece, describe([piece], 2)), w[0].dtype != x.dtype, *pair, it, *tiles)
        del rows
    return [grad]


def sums(
    target: Weight, held: bool, g: Tensor, x: Tensor, it: Sorted, bn: int, part: Tiles,
    *, g_tokens: bool = False, x_tokens: bool = False, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """``wgrad.weight_grads``: target [E, N, K] = the sums of g^T x, in tiles of bn x ``part.bn`` and steps of ``part.bk`` rows."""
    n, k = g.shape[1], x.shape[1]
    if not (n and k):
        return
    launch(
        wgrad.weight_grads,
        (it.experts * -(-n // bn) * -(-k // part.bn),),
        {"g": g, "x": x, "weights": x if scale is None else scale, "order": it.order, "offsets": it.offsets, "d_w": target.pointer},
        warps=part.warps,
        stages=part.stages,
        top_k=it.top_k,
        N=n,
        K=k,
        at_g=Rows(*g.stride()),
        at_x=Rows(*x.stride()),
        at_weights=sorted_rows.rows_of(scale),
        at_d=Experts(*target.strides),
        GATHER_G=g_tokens,
        GATHER_X=x_tokens,
        SCALE=scale is not None,
        stored=_stored(target, held),
        BN=bn,
        BK=part.bn,
        BR=part.bk,
        GROUP=part.group,
        PRECISION=precision_of(g.dtype, device_of(x.device)),
    )


def _stored(target: Weight, held: bool) -> Stored:
    return Stored(target.operand.table, target.operand.aligned, target.operand.wide, HELD=held)


def _weight_grad_tiles(target: Weight, held: bool, g: Tensor, x: Tensor, it: Sorted, bn: int, part: Tiles) -> None:
    """Gradients of weights from sorted rows that descriptors can show."""
    if target.strides[1] == 1 != target.strides[2]:  # stored in-out: the transpose, whose rows are contiguous
        g, x, target = x, g, target.transposed()
    n, k = g.shape[1], x.shape[1]
    at = Experts(*target.strides)
    cut = None if held or target.operand.table else specialised.grad_cut(g, x, target.strides, it)
    if cut is not None and target.pointer.data_ptr() % 16 == 0:
        specialised.weight_grads(target.pointer, at, g, x, it, cut)
        return
    launch(
        wgrad.weight_grad_tiles,
        (it.experts * -(-n // bn) * -(-k // part.bn),),
        {
            "g_rows": Described(g, *rows_descriptor(n, part.bk, bn, g.stride(0))),
            "x_rows": Described(x, *rows_descriptor(k, part.bk, part.bn, x.stride(0))),
            "offsets": it.offsets,
            "d_w": target.pointer,
        },
        warps=part.warps,
        stages=part.stages,
        N=n,
        K=k,
        at_d=at,
        stored=_stored(target, held),
        BN=bn,
        BK=part.bn,
        BR=part.bk,
        GROUP=part.group,
    )


def vector_grads(v: Lists, g: Tensor, it: Sorted, *, tokens: bool = False, scale: Tensor | None = None) -> list[Tensor]:
    """Gradients [N] of a list of vectors: the sum of each expert's rows of g [., N], (``scale``) times their routing weights."""
    grads, target, instead = new_grads(v, 1)
    n = g.shape[1]
    if n:
        launch(
            wgrad.vector_grads,
            (it.experts, -(-n // 64)),
            {"g": g, "weights": g if scale is None else scale, "order": it.order, "offsets": it.offsets, "d_b": target.pointer},
            top_k=it.top_k,
            N=n,
            at_g=Rows(*g.stride()),
            at_weights=sorted_rows.rows_of(scale),
            at_d=Rows(*target.strides),
            GATHER=tokens,
            SCALE=scale is not None,
            stored=_stored(target, v[0].dtype != g.dtype),
            BR=32,
            BN=64,
        )
    return spread(grads, instead)
