"""Products of the grouped tier and of training by warp-specialised kernels (``hopper/``): which they take, how they are cut, and the
launches; descriptors that the products of a plan share (``plan_specialised.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.config import SPECIALISED_ROWS, specialised_down, tile_bytes
from moefuse.kernels.triton.device.structs import Experts
from moefuse.kernels.triton.hopper.forms import Cut, Form, cut_of, parts_of, rows_layout
from moefuse.kernels.triton.host.available import available
from moefuse.kernels.triton.host.layout import Device, device_of, rows_descriptor
from moefuse.kernels.triton.host.operands import Operand, is_apart, steps_table
from moefuse.kernels.triton.host.sorted_rows import Sorted, aligned_rows, whole
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.record import as_value
from moefuse.tuning.problem import BLOCK_INPUTS

DTYPES = (torch.bfloat16, torch.float16)
"""What they multiply."""
LINEAR, GRADS = "shared", "pingpong"
"""The form of products with weights and of gradients of weights. Benchmarks set it."""
ROWS = 128
"""Rows of a tile. Where rows come in lower tiles these kernels do not pay."""
LEAST_ROWS = SPECIALISED_ROWS
"""Mean rows of an expert from which on they are taken. Tests set it."""
LEAST = 64
"""Features and inputs from which on."""


def weights(array: Any, w: Operand, form: str, experts: int, features: int, inputs: int, width: int, cut: Cut) -> Described:
    """The descriptor of a list of weights, in blocks of ``width`` features."""
    shape, strides, block = w.matrix(form, experts, features, inputs, width, cut.BK, 2)
    return Described(array, shape, strides, block, rows_layout(block[-1], len(block)))


def rows_in(array: Any, slots: int, features: int, cut: Cut, stride: int | None = None) -> Described:
    """The descriptor through which rows come, in pieces."""
    return Described(array, (slots, features), (stride or features, 1), (cut.piece, cut.BK), rows_layout(cut.BK))


def rows_out(array: Any, features: int, width: int, cut: Cut, stride: int | None = None) -> Described:
    """The descriptor through which tiles ``width`` columns wide leave."""
    return clipped(array, features, cut.rows, width // cut.PARTS, stride)


def clipped(array: Any, features: int, rows: int, columns: int, stride: int | None = None) -> Described:
    """A descriptor of rows that are clipped anywhere (``layout.rows_descriptor``)."""
    shape, strides, block = rows_descriptor(features, rows, columns, stride)
    return Described(array, shape, strides, block, rows_layout(columns, 4))


def reaches_over(form: str, inputs: int) -> bool:
    """Whether a block of weights would reach into the next expert's inputs."""
    return form == "in-out" and inputs % BLOCK_INPUTS > 0


def linear_cut(x: Tensor, w: Operand, item: int, it: Sorted, n: int, k: int) -> Cut | None:
    """How rows of x, or of tokens x once they are sorted, are multiplied with weights [n, k] of ``item`` bytes; None if not by them."""
    device = device_of(x.device)
    if not available(device) or x.dtype not in DTYPES or item != 2 or it.bm != ROWS or it.mean_rows < LEAST_ROWS:
        return None
    form = w.form(item)
    if not form or min(n, k) < LEAST or not whole(item, n, k) or reaches_over(form, k):
        return None
    return _cut(LINEAR, device)


def linear(out: Tensor, x: Tensor, w: Any, it: Sorted, bias: Any, cut: Cut) -> None:
    """out [S, N] = rows x [S, K] times w[e]^T (+ bias[e]); dead rows are not written. ``w`` and ``bias`` are a :class:`linear.Weight`."""
    from moefuse.kernels.triton.hopper.products import product_tiles

    assert it.tiles is not None
    assert it.num_tiles is not None
    cut = cut._replace(PARTS=parts_of(cut.PARTS, bias is not None))
    n, k = out.shape[1], x.shape[1]
    form = w.operand.form(2)
    pointer, steps = as_value(steps_table, w.tensors) if is_apart(form) else (w.pointer, w.pointer)
    blocks = -(-n // cut.BN)
    matrix = weights(pointer, w.operand, form, it.experts, n, k, cut.BN, cut)
    biases = pointer if bias is None else bias.pointer
    at = w.operand.at(None if bias is None else bias.operand, form, 0)
    launch(
        product_tiles,
        (min(device_of(x.device).sms, it.max_tiles * blocks),),
        {
            "x_rows": rows_in(x, it.slots, k, cut, x.stride(0)), "w_a": matrix, "w_b": matrix, "b_a": biases, "b_b": biases,
            "out_rows": rows_out(out, n, cut.BN, cut, out.stride(0)), "tiles": it.tiles, "num_tiles": it.num_tiles,
            "steps_a": steps, "steps_b": steps,
        },
        max_tiles=it.max_tiles,
        blocks=blocks,
        K=k,
        features=n,
        at_a=at,
        at_b=at,
        args=(0.0, 0.0),
        form=Form(1, form, bias is not None, BIAS_TABLE=bias is not None and bias.operand.table),
        cut=cut,
    )  # fmt: skip


def _cut(form: str, device: Device) -> Cut | None:
    """The usual tiles, where they fit."""
    tiles = specialised_down(ROWS, form)
    return cut_of(tiles, ROWS, 1, False) if tile_bytes(tiles, ROWS, 1, 2) <= device.shared else None


def takes_rows(x: Tensor, out: Tensor) -> bool:
    """Whether descriptors can show rows that come and rows that leave."""
    return aligned_rows(x) and aligned_rows(out) and out.dtype == x.dtype


def grad_cut(g: Tensor, x: Tensor, strides: tuple[int, ...], it: Sorted) -> Cut | None:
    """How gradients [E, N, K] of weights, with these strides, are made of sorted rows g [S, N] and x [S, K]; None if not by them."""
    device, (n, k), (e, row, col) = device_of(x.device), (g.shape[1], x.shape[1]), strides
    if not available(device) or x.dtype not in DTYPES or g.dtype != x.dtype or it.mean_rows < LEAST_ROWS or min(n, k) < LEAST:
        return None
    if col != 1 or row % 8 or e % 8 or not whole(2, n, k):
        return None
    cut = _cut(GRADS, device)
    # A group that takes tiles by turns reads the columns of g as one piece.
    return cut._replace(PIECES=1) if cut is not None and GRADS == "pingpong" else cut


def weight_grads(target: Tensor, at: Experts, g: Tensor, x: Tensor, it: Sorted, cut: Cut) -> None:
    """target [E, N, K], which has the strides ``at``: the sums of g^T x over each expert's rows."""
    from moefuse.kernels.triton.hopper.weight_grads import weight_grad_products

    n, k = g.shape[1], x.shape[1]
    blocks_n, blocks_k = -(-n // cut.BM), -(-k // cut.BN)
    total = it.experts * blocks_n * blocks_k
    width = cut.BN // cut.PARTS
    grads = Described(target, (it.experts, n, k), (at.stride_e, at.stride_n, 1), (1, cut.rows, width), rows_layout(width, 3))
    launch(
        weight_grad_products,
        (min(device_of(x.device).sms, total),),
        {
            "g_rows": clipped(g, n, cut.BK, cut.piece, g.stride(0)),
            "x_rows": clipped(x, k, cut.BK, cut.BN, x.stride(0)),
            "d_w": grads,
            "offsets": it.offsets,
        },
        total=total,
        blocks_n=blocks_n,
        blocks_k=blocks_k,
        cut=cut,
    )
