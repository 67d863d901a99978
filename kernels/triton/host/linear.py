"""The product of sorted rows with their experts' weights: how a list of weights is handed over, block sizes, and the launch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.device import grouped
from moefuse.kernels.triton.device.structs import Experts, Rows, Stored, Tiling
from moefuse.kernels.triton.host import specialised
from moefuse.kernels.triton.host.layout import Device, device_of, precision_of, rows_descriptor
from moefuse.kernels.triton.host.operands import Operand, address_table, describe, is_apart, steps_table
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted, aligned_rows, fit, rows_of, whole
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.record import as_value
from moefuse.tuning.problem import Tiles, power_of_two

NARROW = 64
"""Features up to which a product has tiles of its own."""


@functools.cache
def held_sizes(bm: int, aligned: bool, device: Device) -> Tiles:
    """Tiles of ``grouped.linear_tiles`` for weights in float32 and rows of 16 bits: a block is rounded in registers, beside the sums."""
    if not aligned or bm < 128:
        return fit(Tiles(64, 32, 4, 3, 4), bm, 2, device, 4)
    if not device.hopper:
        return fit(Tiles(64, 64, 8, 3, 8), bm, 2, device, 4)
    return fit(Tiles(128, 64, 8, 3, 8, desc=True, rows_desc=True, persistent=True, flatten=True, store=2), bm, 2, device, 4)


@functools.cache
def linear_sizes(bm: int, aligned: bool, dtype: torch.dtype, device: Device) -> Tiles:
    """Tiles of ``grouped.linear_tiles``. Rows that are not whole 16 bytes (not ``aligned``) take registers for many addresses."""
    if dtype == torch.float64:
        return Tiles(16, 16, 8, 1)
    if dtype == torch.float32:
        return fit(Tiles(64, 32, 4 if aligned else 8, 3, 8), bm, 4, device)
    if not aligned:
        return fit(Tiles(64, 32, 8, 3, 4), bm, 2, device)
    if bm < 128:
        return fit(Tiles(64 if bm < 64 else 128, 64, 4, 3, 4), bm, 2, device)
    if not device.hopper:
        return fit(Tiles(128, 64, 8, 3, 8), bm, 2, device)
    return fit(Tiles(256, 64, 8, 3, 8, desc=True, rows_desc=True, persistent=True, flatten=True, store=2), bm, 2, device)


@functools.cache
def narrow_sizes(bm: int, rank: int, aligned: bool, dtype: torch.dtype, device: Device) -> Tiles:
    """Tiles of ``grouped.linear_tiles`` for products into a few features: reading the rows is all, so many programs share a processor."""
    if dtype == torch.float64:
        return Tiles(16, 16, 4, 1)
    bn = min(max(power_of_two(rank), 16), 128 if device.hopper else 64)
    if dtype == torch.float32:
        return fit(Tiles(min(bn, 32), 32, 4, 3), bm, 4, device)
    return fit(Tiles(bn, 64 if aligned else 32, 4 if bn <= (64 if device.hopper else 32) else 8, 3), bm, 2, device)


class Term(NamedTuple):
    """What is added to a product for its low-rank term: rows u [S, r] times a factor [E, features, r] of any strides."""

    u: Tensor
    factor: Tensor

    @property
    def rank(self) -> int:
        """r."""
        return self.u.shape[1]

    @property
    def block(self) -> int:
        """Inputs of one step."""
        return min(max(power_of_two(self.rank), 16), 64)

    def bytes(self, bm: int, bn: int) -> int:
        """Shared memory of one step."""
        return (bm + bn) * self.block * self.factor.element_size()


class Weight(NamedTuple):
    """One list as a kernel takes it: the stacked tensor or the table of addresses, and the strides (expert, out, in) or (expert, out).

    ``tensors``: the list itself, if the kernel only reads it.
    """

    pointer: Tensor
    operand: Operand
    tensors: Lists = ()

    @property
    def strides(self) -> tuple[int, ...]:
        return self.operand.strides

    def transposed(self) -> Weight:
        """The weight of the product with its transpose: (expert, in, out)."""
        e, n, k = self.operand.strides
        return Weight(self.pointer, self.operand._replace(strides=(e, k, n)), self.tensors)


def weight(tensors: Lists, dims: int = 2) -> Weight:
    """A list of weights (dims 2) or vectors (1). Tensors that differ in their strides are stacked first: no single form reads them."""
    operand = describe(tensors, dims)
    if not operand.uniform:
        tensors = [torch.stack(list(tensors))]
        operand = describe(tensors, dims)
    return Weight(as_value(address_table, tensors) if operand.table else tensors[0], operand, tensors)


def linear(
    out: Tensor,
    x: Tensor,
    w: Weight,
    it: Sorted,
    *,
    bias: Weight | None = None,
    tokens: bool = False,
    scale: Tensor | None = None,
    add: bool = False,
    term: Term | None = None,
) -> None:
    """out [S, N] = rows [S, K] times w[e]^T (+ bias[e]); out has contiguous rows. ``tokens``: x is [T, K], read through the order.

    ``scale`` [T, K]: each token times its routing weight. ``add``: to what out holds. ``term`` of E x N features: added before the product
    is rounded. out may be in float32 where x has 16 bits. Dead rows are not written.
    """
    assert it.tiles is not None
    assert it.num_tiles is not None
    (_, n), k, item = out.shape, x.shape[1], x.element_size()
    cut = None if tokens or add or term is not None else specialised.linear_cut(x, w.operand, w.tensors[0].element_size(), it, n, k)
    if cut is not None and specialised.takes_rows(x, out):
        specialised.linear(out, x, w, it, bias, cut)
        return
    device, each = device_of(x.device), w.tensors[0].element_size()
    sizes = it.bm, whole(item, n, k)
    part = _part(sizes, n, x.dtype, out.dtype, each != item, term, device)
    form = w.operand.form(each) if part.desc and k else ""
    if form == "in-out" and k % part.bk:
        form = ""  # a block would reach into the next expert
    by_desc = part.rows_desc and not tokens and k > 0 and aligned_rows(x)
    store = part.store if out.is_contiguous() and out.dtype == x.dtype and not add and whole(item, n) and out.data_ptr() % 16 == 0 else 0
    pointer, steps = as_value(steps_table, w.tensors) if is_apart(form) else (w.pointer, w.pointer)
    count = it.max_tiles * -(-n // part.bn)
    wide = w.operand.wide or abs(x.stride(1)) * k >= 1 << 31
    table = bias is not None and bias.operand.table
    even, walk = (n % part.bn == 0, k % part.bk == 0), (part.persistent, part.flatten)
    launch(
        grouped.linear_tiles,
        (min(device.sms * part.per_sm, count) if part.persistent else count,),
        {
            "x": x,
            "x_desc": Described(x, (it.slots, k), (x.stride(0), 1), (it.bm, part.bk)) if by_desc else x,
            "w": Described(pointer, *w.operand.matrix(form, it.experts, n, k, part.bn, part.bk, each)) if form else pointer,
            "b": pointer if bias is None else bias.pointer,
            "weights": x if scale is None else scale,
            "order": it.order,
            "u": x if term is None else term.u,
            "f": x if term is None else term.factor,
            "out": out,
            "out_desc": Described(out, *rows_descriptor(n, it.bm, part.bn // store)) if store else out,
            "offsets": it.offsets,
            "tiles": it.tiles,
            "num_tiles": it.num_tiles,
            "steps": steps,
        },
        warps=part.warps,
        stages=part.stages,
        max_tiles=it.max_tiles,
        top_k=it.top_k,
        K=k,
        N=n,
        at_x=Rows(*x.stride()),
        at_weights=rows_of(scale),
        at_w=w.operand.at(None if bias is None else bias.operand, form),
        at_u=None if term is None else Rows(*term.u.stride()),
        at_f=None if term is None else Experts(*term.factor.stride()),
        stride_or=out.stride(0),
        GATHER=tokens,
        SCALE=scale is not None,
        ADD=add,
        RANK=0 if term is None else term.rank,
        stored=Stored(w.operand.table, w.operand.aligned, wide, bias is not None, BIAS_TABLE=table, DESC=form, HELD=each != item),
        tiling=Tiling(
            it.bm, part.bn, part.bk, part.group, *even, precision_of(x.dtype, device), False, by_desc, False, *walk, store,
            BR=16 if term is None else term.block,
        ),
    )  # fmt: skip


def _part(sizes: tuple[int, bool], n: int, dtype: torch.dtype, out: torch.dtype, held: bool, term: Term | None, device: Device) -> Tiles:
    """The tiles of a product into n features."""
    if (n <= NARROW or out != dtype) and not held:
        return narrow_sizes(sizes[0], n, sizes[1], dtype, device)
    if term is None:
        return held_sizes(*sizes, device) if held else linear_sizes(*sizes, dtype, device)
    # A step of the term waits for shared memory beside those of the product. Its loop is a second one, which the flattened form has not.
    device = replace(device, shared=device.shared - term.bytes(sizes[0], 256))
    part = held_sizes(*sizes, device) if held else linear_sizes(*sizes, dtype, device)
    # Where tensor cores read registers, the operands of a second loop take what a wide tile has not.
    return replace(part, flatten=False, bn=part.bn if device.hopper else min(part.bn, 64))
