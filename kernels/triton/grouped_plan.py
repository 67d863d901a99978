"""Block sizes and launches of the kernels of the grouped tier and of training: one function per kernel, tensors in, nothing returned.

Grids and buffers follow from shapes alone, as in ``plan.py``. What is kept are launches: one is looked up by everything that Triton
specialises on, and one that was seen before goes straight to its compiled kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse._torch_private import current_device
from moefuse.kernels.triton import backward, grouped, routing, rows
from moefuse.kernels.triton.config import within
from moefuse.kernels.triton.launch import Address, Descriptor, Launch, stream_of
from moefuse.kernels.triton.layout import CHUNK, SORT_AT_ONCE, UNROLLED, Device, device_of, precision_of, rows_descriptor
from moefuse.kernels.triton.operands import Operand, address_table, describe, is_apart, steps_table
from moefuse.kernels.triton.problem import Tiles, power_of_two
from moefuse.ops.call import Body

Lists = Sequence[Tensor]

LAUNCHES: dict[Any, Launch] = {}
_MAX_LAUNCHES = 1 << 14
"""Launches kept; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""
_ONE_TILE = 1 << 30
"""Rows of a tile where the tiles of the sort are not used."""


def launch(
    kernel: Any,
    grid: Sequence[int],
    pointers: Sequence[Tensor],
    rest: tuple[Any, ...],
    *,
    warps: int = 4,
    stages: int = 2,
    descs: tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (),
) -> None:
    """Launch on the current stream. ``descs``: (position, shape, strides, block) of each pointer that is passed as a descriptor."""
    addresses: list[Any] = [t.data_ptr() for t in pointers]
    kinds = tuple([(t.dtype, a & 15) for t, a in zip(pointers, addresses, strict=True)])
    key = (id(kernel), *grid, rest, warps, stages, descs, kinds, pointers[0].device)
    known = LAUNCHES.get(key)
    if known is not None and known.compiled is not None:
        for position, shape, strides, _ in descs:
            addresses[position] = Descriptor(Address(addresses[position]), shape, strides)
        known.again(stream_of(pointers[0].device), addresses)
        return
    if len(LAUNCHES) >= _MAX_LAUNCHES:
        LAUNCHES.clear()
    made = LAUNCHES[key] = Launch(kernel, grid, rest, num_warps=warps, num_stages=stages)
    given: list[Any] = list(pointers)
    for position, shape, strides, block in descs:
        given[position] = TensorDescriptor(pointers[position], list(shape), list(strides), list(block))
    made.first(given)


def launch_traced(kernel: Any, grid: Sequence[Any], pointers: Sequence[Any], rest: tuple[Any, ...], *, warps: int) -> None:
    """Put a launch into the graph that is being traced, where Inductor makes it."""
    named = dict(zip(kernel.arg_names, (*pointers, *rest), strict=True))
    torch.library.wrap_triton(kernel)[tuple(grid)](**named, num_warps=warps)


def launch_step(step: Any, tensors: Sequence[Tensor]) -> None:
    """Launch a step of a plan of ``plan.py``."""
    given: list[Any] = list(tensors)
    if step.launch.compiled is not None:
        given = [t.data_ptr() for t in tensors]
        for position, _, shape, strides, _ in step.descs:
            given[position] = Descriptor(Address(given[position]), shape, strides)
        step.launch.again(stream_of(tensors[0].device), given)
        return
    for position, _, shape, strides, block in step.descs:
        given[position] = TensorDescriptor(tensors[position], list(shape), list(strides), list(block))
    step.launch.first(given)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run with the device of the first argument, a tensor, a list of them or a call, as the current one."""

    @functools.wraps(function)
    def wrapper(first: Any, *rest: Any) -> Any:
        device = (first if hasattr(first, "device") else first[0]).device
        if device.type != "cuda" or device.index == current_device():
            return function(first, *rest)
        with torch.cuda.device(device):
            return function(first, *rest)

    return wrapper


# Sizes --------------------------------------------------------------------------------------------------------------------------------


def tile_rows(slots: int, experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: somewhat more than an expert gets on average, so that most experts need one tile fewer."""
    if dtype == torch.float64:
        return 16
    hit = max(experts * (1.0 - (1.0 - 1.0 / experts) ** slots), 1.0)
    return min(max(power_of_two(1.3 * slots / hit), 16), 32 if dtype == torch.float32 else 128)


def linear_sizes(bm: int, aligned: bool, dtype: torch.dtype, device: Device) -> Tiles:
    """Tiles of ``grouped.linear_tiles``. Rows that are not whole 16 bytes (not ``aligned``) take registers for many addresses."""
    if dtype == torch.float64:
        return Tiles(16, 16, 8, 1)
    if dtype == torch.float32:
        return fit(Tiles(64, 32, 4, 3), bm, 4, device)
    if not aligned:
        return fit(Tiles(64, 32, 8, 3, 4), bm, 2, device)
    if bm < 128:
        return fit(Tiles(64 if bm < 64 else 128, 64, 4, 3, 4), bm, 2, device)
    if not device.hopper:
        return fit(Tiles(128, 64, 8, 3, 8), bm, 2, device)
    return fit(Tiles(256, 64, 8, 3, 8, desc=True, rows_desc=True, persistent=True, flatten=True, store=2), bm, 2, device)


def fit(t: Tiles, bm: int, item: int, device: Device) -> Tiles:
    """The tiles reduced until they are within the device's shared memory."""
    return within(t, bm, 1, item, device.shared)


def blocks(n: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a block of a kernel that only moves rows of n elements."""
    bn = min(max(power_of_two(n), 16), elements, 1024)
    return min(elements // bn, 32), bn


def whole(item: int, *sizes: int) -> bool:
    """Whether rows of these sizes are whole 16 bytes."""
    return all(n * item % 16 == 0 for n in sizes)


def aligned_rows(t: Tensor) -> bool:
    """Whether a descriptor can show the rows of t [S, N]."""
    return t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0


def bins(experts: int) -> int:
    return max(power_of_two(experts + 1), 16)


# Operands -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
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
        return replace(self, operand=replace(self.operand, strides=(e, k, n)))


def weight(tensors: Lists, dims: int = 2) -> Weight:
    """A list of weights (dims 2) or vectors (1). Tensors that differ in their strides are stacked first: no single form reads them."""
    operand = describe(tensors, dims)
    if not operand.uniform:
        tensors = [torch.stack(list(tensors))]
        operand = describe(tensors, dims)
    return Weight(address_table(tensors) if operand.table else tensors[0], operand, tensors)


# Routing ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sorted:
    """The sorted rows of one call, with the list of tiles that its products share.

    Attributes:
        order: [S] int64; a tensor that is not read where no row is gathered.
        offsets: [E + 1] int64.
        tiles: [2, max_tiles] int32, then their number.
    """

    order: Tensor
    offsets: Tensor
    slots: int
    experts: int
    top_k: int
    bm: int = 0
    tiles: Tensor | None = None
    max_tiles: int = 0

    @property
    def mean_rows(self) -> float:
        return self.slots / self.experts


def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order [S], offsets [E + 1]), int64."""
    slots, device = ids.numel(), ids.device
    order = torch.empty(slots, dtype=torch.int64, device=device)
    if not slots:
        return order, torch.zeros(experts + 1, dtype=torch.int64, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=device)
    max_tiles, be, flat = min(slots, experts), max(power_of_two(experts + 1), 32), ids.stride() == (ids.shape[1], 1)
    unused = torch.empty(2 * max_tiles + 1, dtype=torch.int32, device=device)
    by = (*ids.stride(), slots, experts, ids.shape[1])
    arrays = (order, order, offsets, unused, unused[2 * max_tiles :])
    if slots <= SORT_AT_ONCE:
        rest = (*by, max_tiles, flat, False, max(power_of_two(slots), 128), be, _ONE_TILE, False)
        launch(routing.sort_once, (experts + 1,), (ids, *arrays), rest, warps=4 if slots <= 1024 else 8)
        return order, offsets
    chunks, cols = -(-slots // CHUNK), 8
    counts, totals = (torch.empty(n, dtype=torch.int32, device=device) for n in (chunks * be, be))
    launch(routing.count_chunks, (chunks,), (ids, counts), (*by, flat, CHUNK, be, False))
    launch(routing.scan_chunks, (be // cols,), (counts, totals), (chunks, 128, be, cols, False))
    launch(routing.place_chunks, (chunks,), (ids, counts, totals, *arrays), (*by, max_tiles, flat, False, CHUNK, be, _ONE_TILE, False))
    return order, offsets


def tiled(it: Sorted, dtype: torch.dtype) -> Sorted:
    """The same rows with their tiles for products in ``dtype``."""
    bm = tile_rows(it.slots, it.experts, dtype)
    max_tiles = min(it.slots, it.slots // bm + min(it.experts, it.slots))
    tiles = torch.empty(2 * max_tiles + 1, dtype=torch.int32, device=it.offsets.device)
    rest = (max_tiles, it.experts, bins(it.experts), bm)
    launch(rows.list_tiles, (it.experts,), (it.offsets, tiles, tiles[2 * max_tiles :]), rest)
    return replace(it, bm=bm, tiles=tiles, max_tiles=max_tiles)


def inverse(it: Sorted) -> Tensor:
    """position [S] int32: the row of each slot."""
    position = torch.empty(it.slots, dtype=torch.int32, device=it.order.device)
    launch(rows.invert, (-(-it.slots // 1024),), (it.order, position), (it.slots, 1024))
    return position


# Rows ---------------------------------------------------------------------------------------------------------------------------------


def gather(out: Tensor, x: Tensor, it: Sorted) -> None:
    """out [S, N] = the token of each row."""
    br, bn = blocks(out.shape[1])
    grid = (-(-it.slots // br), -(-out.shape[1] // bn))
    launch(rows.gather_rows, grid, (x, it.order, out), (it.slots, it.top_k, out.shape[1], *x.stride(), br, bn))


def clear_dead(out: Tensor, it: Sorted) -> None:
    """Zeros in the dead rows of out. Few programs: mostly there is nothing to do."""
    s, n = out.shape
    launch(rows.clear_dead, (-(-s // 64),), (out, it.offsets), (s, it.experts, n, out.stride(0), 64, min(max(power_of_two(n), 16), 64)))


def sum_slots(out: Tensor, y: Tensor, it: Sorted, weights: Tensor | None) -> None:
    """out [T, N] = the (weighted) sum over the slots of each token of its rows in y."""
    n = out.shape[1]
    bn = min(power_of_two(n), 1024)
    strides = (0, 0) if weights is None else weights.stride()
    rest = (it.top_k, it.experts, n, *y.stride(), *strides, weights is not None, bn, it.top_k if it.top_k <= UNROLLED else 0)
    pointers = (y, inverse(it), it.offsets, y if weights is None else weights, out)
    launch(rows.sum_rows, (out.shape[0], -(-n // bn)), pointers, rest)


# Products -----------------------------------------------------------------------------------------------------------------------------


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
) -> None:
    """out [S, N] = rows [S, K] times w[e]^T (+ bias[e]); out has contiguous rows. ``tokens``: x is [T, K], read through the order.

    ``scale`` [T, K]: each token times its routing weight. ``add``: to what out holds. Dead rows are not written.
    """
    assert it.tiles is not None
    (_, n), k, item = out.shape, x.shape[1], x.element_size()
    device = device_of(x.device)
    part = linear_sizes(it.bm, whole(item, n, k), x.dtype, device)
    form = w.operand.form(item) if part.desc and k else ""
    if form == "in-out" and k % part.bk:
        form = ""  # a block would reach into the next expert
    by_desc = part.rows_desc and not tokens and k > 0 and aligned_rows(x)
    descs: list[Any] = [(1, (it.slots, k), (x.stride(0), 1), (it.bm, part.bk))] if by_desc else []
    if part.store and out.is_contiguous() and not add and whole(item, n) and out.data_ptr() % 16 == 0:
        store = part.store
        descs.append((7, *rows_descriptor(n, it.bm, part.bn // store)))
    else:
        store = 0
    if form:
        descs.append((2, *w.operand.matrix(form, it.experts, n, k, part.bn, part.bk, item)))
    pointer, steps = steps_table(w.tensors) if is_apart(form) else (w.pointer, w.pointer)
    rows_w = w.operand.rows(form)
    count = it.max_tiles * -(-n // part.bn)
    wide = w.operand.wide or abs(x.stride(1)) * k >= 1 << 31
    launch(
        grouped.linear_tiles,
        (min(device.sms * part.per_sm, count) if part.persistent else count,),
        (x, x, pointer, pointer if bias is None else bias.pointer, x if scale is None else scale, it.order, out, out, it.offsets,
         it.tiles, it.tiles[2 * it.max_tiles :], steps),
        (
            *(it.max_tiles, it.top_k, k, n, rows_w, *x.stride(), *((0, 0) if scale is None else scale.stride()), *w.strides),
            *(*((0, 0) if bias is None else bias.strides), out.stride(0), tokens, scale is not None, add),
            *(w.operand.table, w.operand.aligned, bias is not None, bias is not None and bias.operand.table, wide),
            *(n % part.bn == 0, k % part.bk == 0),
            *(it.bm, part.bn, part.bk, part.group, form, by_desc, part.persistent, part.flatten, store, precision_of(x.dtype)),
        ),
        warps=part.warps,
        stages=part.stages,
        descs=tuple(sorted(descs)),
    )  # fmt: skip


def pair(
    it: Sorted,
    tokens: Tensor,
    ys: Tensor,
    weights: Tensor | None,
    *,
    out: Tensor | None,
    d_weights: Tensor | None,
    from_rows: bool = False,
    scaled: bool = True,
) -> None:
    """``backward.pair_rows``: what is not None of out [S, N] and d_weights [T, K] is written."""
    n = ys.shape[1]
    br, bn = blocks(n, 1024)
    scale = weights if scaled else None
    strides = (0, 0) if scale is None else scale.stride()
    rest = (it.slots, it.top_k, it.experts, n, *tokens.stride(), *ys.stride(), *strides)
    flags = (from_rows, scale is not None, out is not None, d_weights is not None, br, bn)
    pointers = (tokens, ys, ys if scale is None else scale, it.order, it.offsets, ys if out is None else out)
    launch(backward.pair_rows, (-(-it.slots // br),), (*pointers, ys if d_weights is None else d_weights), (*rest, *flags))


# The activation -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """The activation of one kind of expert, and where gate and up are in a row of the pre-activation [S, width]."""

    body: Body
    inter: int

    @property
    def flags(self) -> tuple[Any, ...]:
        """GATE, UP, STEP, PLAIN, ACT, ARG0, ARG1 of ``backward.py``."""
        body = self.body
        second, step = (1, 2) if body.gating == "interleaved" else (self.inter, 1)
        gate, up = (second, 0) if body.up_first else (0, second)
        plain = body.gating == "plain"
        return gate, 0 if plain else up, step, plain, body.activation, *body.pair


def activate(a: Tensor, h: Tensor, it: Sorted, how: Activation) -> None:
    """a [S, I] from h [S, width]."""
    br, bn = blocks(how.inter)
    grid = (-(-it.slots // br), -(-how.inter // bn))
    launch(backward.activate, grid, (h, it.offsets, a), (it.slots, it.experts, how.inter, h.stride(0), *how.flags, br, bn))


def activate_grads(
    it: Sorted,
    h: Tensor,
    d_a: Tensor | None,
    how: Activation,
    *,
    scale: Tensor | None,
    d_h: Tensor | None,
    a: Tensor | None,
    d_weights: Tensor | None,
    grad: Tensor,
    bias: Weight | None,
) -> None:
    """``backward.activate_grads``: what is not None of d_h, a and d_weights is written. ``bias``: of the second projection."""
    br, bn = blocks(how.inter, 1024 if whole(h.element_size(), how.inter) else 512)
    wanted = tuple(t is not None for t in (d_h, a, d_weights))
    d_a, d_h, a, d_weights = (h if t is None else t for t in (d_a, d_h, a, d_weights))
    pointers = (h, d_a, grad, h if bias is None else bias.pointer, h if scale is None else scale, it.order, it.offsets, d_h, a, d_weights)
    strides = (h.stride(0), *grad.stride(), *((0, 0) if bias is None else bias.strides), *((0, 0) if scale is None else scale.stride()))
    flags = (*how.flags, scale is not None, *wanted, bias is not None, bias is not None and bias.operand.table, bins(it.experts), br, bn)
    rest = (it.slots, it.top_k, it.experts, how.inter, grad.shape[1], *strides, *flags)
    launch(backward.activate_grads, (-(-it.slots // br),), pointers, rest)
