"""The launches of a plan for many slots: the sort (``routing.py``), tiles (``gemm.py``) and the weighted sum (``combine.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moefuse.kernels.triton import combine, gemm, routing
from moefuse.kernels.triton.launch import INTERPRETED
from moefuse.kernels.triton.layout import CHUNK, SORT_AT_ONCE, UNROLLED, precision_of, rows_descriptor
from moefuse.kernels.triton.operands import is_apart
from moefuse.kernels.triton.problem import Tiles, power_of_two

APART_ROWS = 128
"""Rows of a tile from which on descriptors show experts that are apart."""

if TYPE_CHECKING:
    from moefuse.kernels.triton.plan import Plan


def up_desc(plan: Plan) -> str:
    """The form of the descriptors of ``up_tiles``."""
    a, b = (w.form(plan.dtype.itemsize) for w in (plan.w_in, plan.w_up))
    return _possible(plan, plan.config.up, a, plan.hidden) if a == b else ""


def down_desc(plan: Plan) -> str:
    """The form of the descriptor of ``down_tiles``."""
    return _possible(plan, plan.config.down, plan.w_out.form(plan.dtype.itemsize), plan.inter)


def _possible(plan: Plan, part: Tiles, form: str, inputs: int) -> str:
    """An in-out tile must not reach into the next expert's inputs. Experts that are apart cost the host more with descriptors than without
    (``native.py`` launches only without), which few rows do not repay."""
    if not part.desc or not inputs or (is_apart(form) and plan.config.bm < APART_ROWS):
        return ""
    return "" if form == "in-out" and inputs % part.bk else form


def joined(plan: Plan, form: str) -> bool:
    """Whether ``up_tiles`` takes gate and up as one block: both halves of every expert in one tensor, which is not an expanded view."""
    e, n, _ = plan.w_in.strides
    return plan.config.up.join and form == "out-in" and plan.body.gating == "merged" and not plan.config.up.swap and e >= 2 * plan.inter * n


def build_routing(plan: Plan, bm: int, max_tiles: int, inverse: bool) -> None:
    ws, s, e, pdl = plan.workspace, plan.slots, plan.experts, plan.config.pdl and not INTERPRETED
    bins = max(power_of_two(e + 1), 32)
    for name, count in (("order", s), ("position", s), ("offsets", e + 1), ("tiles", 2 * max_tiles), ("num_tiles", 1)):
        if name != "position" or inverse:
            ws.add(name, (count,), torch.int32)
    position = "position" if inverse else "order"
    by = (*plan.strides_ids, s, e, plan.top_k)
    flat = plan.strides_ids == (plan.top_k, 1)
    if s <= SORT_AT_ONCE:
        rest = (*by, max_tiles, flat, inverse, max(power_of_two(s), 128), bins, bm, pdl)
        names = f"ids order {position} offsets tiles num_tiles"
        plan.launch(routing.sort_once, (e + 1,), rest, names, None, warps=4 if s <= 1024 else 8)
        return
    chunks, cols = -(-s // CHUNK), 8
    ws.add("counts", (chunks, bins), torch.int32)
    ws.add("totals", (bins,), torch.int32)
    plan.launch(routing.count_chunks, (chunks,), (*by, flat, CHUNK, bins, pdl), "ids counts", None)
    plan.launch(routing.scan_chunks, (bins // cols,), (chunks, 128, bins, cols, pdl), "counts totals", None)
    rest = (*by, max_tiles, flat, inverse, CHUNK, bins, bm, pdl)
    names = f"ids counts totals order {position} offsets tiles num_tiles"
    plan.launch(routing.place_chunks, (chunks,), rest, names, None)


def store(plan: Plan, parts: int, features: int, bn: int) -> int:
    """In how many blocks of columns rows of ``features`` can be stored through a descriptor; 0 if they cannot."""
    item = plan.dtype.itemsize
    return parts if parts and features * item % 16 == 0 and bn // parts * item >= 16 else 0


def build_sorted_rows(plan: Plan) -> None:
    s, h, pdl = plan.slots, plan.hidden, plan.config.pdl and not INTERPRETED
    plan.workspace.add("xs", (s, h), plan.dtype)
    rows, block = 8, min(power_of_two(h), 256)
    wide = plan.wide()
    plan.launch(
        routing.sort_rows,
        (-(-s // rows), -(-h // block)),
        (
            *(plan.experts, h, plan.top_k, *plan.strides_x, *plan.strides_weights),
            *(plan.body.on_input, wide, h % block == 0, rows, block, pdl),
        ),
        "x weights order offsets xs",
        None,
    )


def grid(plan: Plan, part: Tiles, tiles: int) -> tuple[int]:
    return (min(plan.device.sms * part.per_sm, max(tiles, 1)),) if part.persistent else (max(tiles, 1),)


def build_tiles(plan: Plan) -> None:
    up, down, body, bm, pdl = plan.config.up, plan.config.down, plan.body, plan.config.bm, plan.config.pdl and not INTERPRETED
    i, n, h, s = plan.inter, plan.out, plan.hidden, plan.slots
    max_tiles = min(s, s // bm + min(plan.experts, s))
    item = plan.dtype.itemsize
    stored = (store(plan, up.store, i, up.bn), store(plan, down.store, n, down.bn))
    build_routing(plan, bm, max_tiles, stored[1] > 0)
    no_bias = (0, 0)
    width = 2 * up.bn if plan.gating == "interleaved" else up.bn
    features = {"merged": 2 * i, "interleaved": 2 * i}.get(body.gating, i)
    descs: list[Any] = []
    form = up_desc(plan)
    join = joined(plan, form)
    if plan.gating == "halves" and not join:
        up = replace(up, flatten=False)  # two products in a step: the flattened loop takes 1.1 to 1.2 times as long
    tail = [part.tail and bm > 16 and not part.flatten for part in (up, down)]
    if join:
        strides = plan.w_in.strides
        descs.append((2, "w_in", (plan.experts, 2, i, h), (strides[0], i * strides[1], strides[1], 1), (1, 2, up.bn, up.bk)))
    elif form:
        a, b = ("w_in", plan.w_in), ("w_up", plan.w_up)
        for position, (name, w) in enumerate((a, b if body.gating == "separate" else a), 2):
            descs.append((position, name, *w.matrix(form, plan.experts, features, h, width, up.bk, item)))
    rows_a, rows_b = plan.w_in.rows(form), plan.w_up.rows(form)
    if stored[0]:
        descs.append((7, "h", *rows_descriptor(i, bm, up.bn // stored[0])))
    up_rows = up.rows_desc and h > 0 and h * item % 16 == 0
    if up_rows:
        tail[0] = False
        build_sorted_rows(plan)
        descs.insert(0, (0, "xs", (s, h), (h, 1), (bm, up.bk)))
    plan.workspace.add("y", (s, n), plan.dtype, over="xs" if up_rows else None)  # the down projection begins when the first one is over
    precision = precision_of(plan.dtype)
    plan.launch(
        gemm.up_tiles,
        grid(plan, up, max_tiles * -(-i // up.bn)),
        (
            *(max_tiles, plan.top_k, h, i, *body.pair, *plan.strides_x, *plan.strides_weights),
            *(*plan.w_in.strides, *plan.w_up.strides),
            *(*(plan.b_in.strides if plan.b_in else no_bias), *(plan.b_up.strides if plan.b_up else no_bias), *plan.firsts),
            *(rows_a, rows_b, plan.gating, body.up_first and (join or plan.gating == "interleaved"), body.activation),
            *(*plan.up_flags(), body.on_input and not up_rows, plan.wide(plan.w_in, plan.w_up)),
            *(i % up.bn == 0, h % up.bk == 0, bm, up.bn, up.bk, up.group, up.swap, form, up_rows),
            *(join, tail[0], up.persistent, up.flatten, stored[0], precision, pdl),
        ),
        f"{'xs' if up_rows else 'x'} weights w_in w_up b_in b_up h h order offsets tiles num_tiles {plan.steps_of(form, 'w_in', 'w_up')}",
        up,
        descs=tuple(descs),
    )
    descs = []
    rows_desc = down.rows_desc and i > 0 and i * item % 16 == 0
    if rows_desc:
        descs.append((1, "h", (s, i), (i, 1), (bm, down.bk)))
    form = down_desc(plan)
    if form:
        descs.append((2, "w_out", *plan.w_out.matrix(form, plan.experts, n, i, down.bn, down.bk, item)))
    if stored[1]:
        descs.append((5, "y", *rows_descriptor(n, bm, down.bn // stored[1])))
    plan.launch(
        gemm.down_tiles,
        grid(plan, down, max_tiles * -(-n // down.bn)),
        (
            *(max_tiles, i, n, plan.w_out.rows(form), *plan.w_out.strides, *(plan.b_out.strides if plan.b_out else no_bias)),
            *(*plan.down_flags(), plan.wide(plan.w_out)),
            *(n % down.bn == 0, i % down.bk == 0, bm, down.bn, down.bk, down.group, down.swap, form),
            *(rows_desc, tail[1], down.persistent, down.flatten, stored[1], precision, pdl),
        ),
        "h h w_out b_out y y order offsets tiles num_tiles " + plan.steps_of(form, "w_out"),
        down,
        descs=tuple(descs),
    )
    block = min(power_of_two(n), 1024)
    plan.launch(
        combine.combine_slots,
        (plan.tokens, -(-n // block)),
        (
            *(plan.top_k, plan.experts, n, *plan.strides_ids, *plan.strides_weights),
            *(not body.on_input, stored[1] > 0, n % block == 0, block, plan.top_k if plan.top_k <= UNROLLED else 0, pdl),
        ),
        f"y ids weights {'position' if stored[1] else 'ids'} out",
        None,
    )
