"""The launches of a plan for many slots: the sort (``routing.py``), tiles (``gemm.py``) and the weighted sum (``combine.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moefuse.kernels.triton.device import combine, gemm, routing
from moefuse.kernels.triton.device.structs import Form, Tiling
from moefuse.kernels.triton.host import plan_specialised
from moefuse.kernels.triton.host.layout import CHUNK, SORT_AT_ONCE, TILE_FIELDS, UNROLLED, precision_of, rows_descriptor
from moefuse.kernels.triton.host.operands import is_apart
from moefuse.kernels.triton.host.planned import Planned
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.launch import Launch
from moefuse.tuning.problem import Tiles, power_of_two

APART_ROWS = 128
"""Rows of a tile from which on descriptors show experts that are apart."""


def up_desc(plan: Planned) -> str:
    """The form of the descriptors of ``up_tiles``."""
    a, b = (w.form(plan.dtype.itemsize) for w in (plan.w_in, plan.w_up))
    return _possible(plan, plan.config.up, a, plan.hidden) if a == b else ""


def down_desc(plan: Planned) -> str:
    """The form of the descriptor of ``down_tiles``."""
    return _possible(plan, plan.config.down, plan.w_out.form(plan.dtype.itemsize), plan.inter)


def _possible(plan: Planned, part: Tiles, form: str, inputs: int) -> str:
    """An in-out tile must not reach into the next expert's inputs. Experts that are apart cost more with descriptors than without, which
    few rows do not repay."""
    if not part.desc or not inputs or (is_apart(form) and plan.config.bm < APART_ROWS):
        return ""
    return "" if form == "in-out" and inputs % part.bk else form


def joined(plan: Planned, form: str) -> bool:
    """Whether ``up_tiles`` takes gate and up as one block: both halves of every expert in one tensor, which is not an expanded view."""
    e, n, _ = plan.w_in.strides
    return plan.config.up.join and form == "out-in" and plan.body.gating == "merged" and not plan.config.up.swap and e >= 2 * plan.inter * n


def build_routing(plan: Planned, bm: int, max_tiles: int, inverse: bool) -> None:
    ws, s, e = plan.workspace, plan.slots, plan.experts
    bins = max(power_of_two(e + 1), 32)
    for name, count in (("order", s), ("position", s), ("offsets", e + 1), ("tiles", TILE_FIELDS * max_tiles), ("num_tiles", 3)):
        if name != "position" or inverse:
            ws.add(name, (count,), torch.int32)
    slots = {"at_ids": plan.strides_ids, "S": s, "E": e, "top_k": plan.top_k, "FLAT": plan.strides_ids == (plan.top_k, 1)}
    arrays = {"ids": "ids", "order": "order", "position": "position" if inverse else "order"}
    arrays |= {"offsets": "offsets", "tiles": "tiles", "num_tiles": "num_tiles"}
    lists = {"max_tiles": max_tiles, "INVERSE": inverse, "BM": bm}
    if s <= SORT_AT_ONCE:
        warps, bs = 4 if s <= 1024 else 8, max(power_of_two(s), 128)
        plan.launch(routing.sort_once, (e + 1,), warps, arrays, **slots, **lists, BS=bs, BE=bins, PDL=plan.pdl)
        return
    chunks, cols = -(-s // CHUNK), 8
    ws.add("counts", (chunks, bins), torch.int32)
    ws.add("totals", (bins,), torch.int32)
    sizes = {"BE": bins, "PDL": plan.pdl}
    plan.launch(routing.count_chunks, (chunks,), 4, {"ids": "ids", "counts": "counts"}, **slots, BS=CHUNK, **sizes)
    plan.launch(routing.scan_chunks, (bins // cols,), 4, {"counts": "counts", "totals": "totals"}, C=chunks, BC=128, COLS=cols, **sizes)
    arrays |= {"counts": "counts", "totals": "totals"}
    plan.launch(routing.place_chunks, (chunks,), 4, arrays, **slots, **lists, BS=CHUNK, **sizes)


def store(plan: Planned, parts: int, features: int, bn: int) -> int:
    """In how many blocks of columns rows of ``features`` can be stored through a descriptor; 0 if they cannot."""
    item = plan.dtype.itemsize
    return parts if parts and features * item % 16 == 0 and bn // parts * item >= 16 else 0


def build_sorted_rows(plan: Planned, inverse: bool) -> None:
    """The tokens in sorted order. ``inverse``: the positions of slots are known, so a token is read once."""
    s, h = plan.slots, plan.hidden
    plan.workspace.add("xs", (s, h), plan.dtype)
    block = min(power_of_two(h), 1024 if inverse else 256)
    rows = 1 if inverse else 8
    arrays = {"x": "x", "weights": "weights", "offsets": "offsets", "xs": "xs"}
    made = plan.launch(
        routing.spread_rows if inverse else routing.sort_rows,
        (plan.tokens if inverse else -(-s // rows), -(-h // block)),
        4,
        arrays | ({"position": "position"} if inverse else {"order": "order"}),
        E=plan.experts,
        H=h,
        top_k=plan.top_k,
        at_x=plan.strides_x,
        at_weights=plan.strides_weights,
        SCALE=plan.body.on_input,
        WIDE=plan.wide(),
        EVEN=h % block == 0,
        BLOCK=block,
        PDL=plan.pdl,
        **({} if inverse else {"ROWS": rows}),
    )
    if inverse:
        plan.by_token["spread"] = made


def grid(plan: Planned, part: Tiles, tiles: int) -> tuple[int]:
    return (min(plan.device.sms * part.per_sm, max(tiles, 1)),) if part.persistent else (max(tiles, 1),)


def build_tiles(plan: Planned) -> None:
    up, down, bm, s = plan.config.up, plan.config.down, plan.config.bm, plan.slots
    max_tiles = min(s, s // bm + min(plan.experts, s))
    in_order = bool(down.specialised) or store(plan, down.store, plan.out, down.bn) > 0
    build_routing(plan, bm, max_tiles, in_order)
    sorted_rows = up.rows_desc and plan.hidden > 0 and plan.hidden * plan.dtype.itemsize % 16 == 0
    if sorted_rows:
        build_sorted_rows(plan, in_order)
    # The down projection begins when the first one is over.
    plan.workspace.add("y", (s, plan.out), plan.dtype, over="xs" if sorted_rows else None)
    if up.specialised:
        plan_specialised.build_up(plan, up, max_tiles)
    else:
        build_up(plan, up, max_tiles, sorted_rows)
    if down.specialised:
        plan_specialised.build_down(plan, down, max_tiles)
    else:
        build_down(plan, down, max_tiles)
    build_sum(plan, in_order)


def tiling(plan: Planned, part: Tiles, n: int, k: int, rows_desc: bool) -> Tiling:
    """How a product of n outputs and k inputs is cut."""
    bm = plan.config.bm
    return Tiling(
        bm,
        part.bn,
        part.bk,
        part.group,
        EVEN_N=n % part.bn == 0,
        EVEN_K=k % part.bk == 0,
        PRECISION=precision_of(plan.dtype, plan.device),
        SWAP=part.swap,
        ROWS_DESC=rows_desc,
        TAIL=part.tail and bm > 16 and not part.flatten,
        PERSISTENT=part.persistent,
        FLATTEN=part.flatten,
        STORE=store(plan, part.store, n, part.bn),
        PDL=plan.pdl,
    )


def stored_rows(name: str, features: int, cut: Tiling) -> str | Described:
    """The array that tiles are stored to, by a descriptor or by pointers."""
    return Described(name, *rows_descriptor(features, cut.BM, cut.BN // cut.STORE)) if cut.STORE else name


def build_up(plan: Planned, up: Tiles, max_tiles: int, sorted_rows: bool) -> None:
    body, i, h, experts, item = plan.body, plan.inter, plan.hidden, plan.experts, plan.dtype.itemsize
    form = up_desc(plan)
    join = joined(plan, form)
    if plan.gating == "halves" and not join:
        up = replace(up, flatten=False)  # two products in a step: the flattened loop takes 1.1 to 1.2 times as long
    cut = tiling(plan, up, i, h, sorted_rows)
    if sorted_rows:
        cut = cut._replace(TAIL=False)
    features = {"merged": 2 * i, "interleaved": 2 * i}.get(body.gating, i)
    width = 2 * up.bn if plan.gating == "interleaved" else up.bn
    a: str | Described = "w_in"
    b: str | Described = "w_up"
    if join:
        e, n, _ = plan.w_in.strides
        a = Described("w_in", (experts, 2, i, h), (e, i * n, n, 1), (1, 2, up.bn, up.bk))
    elif form:
        a = Described("w_in", *plan.w_in.matrix(form, experts, features, h, width, up.bk, item))
        b = Described("w_up", *plan.w_up.matrix(form, experts, features, h, width, up.bk, item)) if body.gating == "separate" else a
    arrays: dict[str, str | Described] = {
        "x": Described("xs", (plan.slots, h), (h, 1), (cut.BM, up.bk)) if sorted_rows else "x",
        "weights": "weights", "w_a": a, "w_b": b, "b_a": "b_in", "b_b": "b_up", "h": "h", "h_desc": stored_rows("h", i, cut),
        "order": "order", "offsets": "offsets", "tiles": "tiles", "num_tiles": "num_tiles",
        "steps_a": plan.steps_of(form, "w_in"), "steps_b": plan.steps_of(form, "w_up"),
    }  # fmt: skip
    first_a, first_b = plan.firsts
    plan.launch(
        gemm.up_tiles,
        grid(plan, up, max_tiles * -(-i // up.bn)),
        up,
        arrays,
        max_tiles=max_tiles,
        top_k=plan.top_k,
        H=h,
        N=i,
        args=body.pair,
        at_x=plan.strides_x,
        at_weights=plan.strides_weights,
        at_a=plan.w_in.at(plan.b_in, form, first_a),
        at_b=plan.w_up.at(plan.b_up, form, first_b),
        form=Form(
            body.activation, plan.gating, body.up_first and (join or plan.gating == "interleaved"), body.on_input and not sorted_rows, join
        ),
        stored=plan.up_stored(form),
        tiling=cut,
    )


def build_down(plan: Planned, down: Tiles, max_tiles: int) -> None:
    i, n, item = plan.inter, plan.out, plan.dtype.itemsize
    form = down_desc(plan)
    cut = tiling(plan, down, n, i, down.rows_desc and i > 0 and i * item % 16 == 0)
    matrix = plan.w_out.matrix(form, plan.experts, n, i, down.bn, down.bk, item) if form else ()
    arrays: dict[str, str | Described] = {
        "h": "h", "h_desc": Described("h", (plan.slots, i), (i, 1), (cut.BM, down.bk)) if cut.ROWS_DESC else "h",
        "w": Described("w_out", *matrix) if form else "w_out", "b": "b_out", "y": "y", "y_desc": stored_rows("y", n, cut),
        "order": "order", "offsets": "offsets", "tiles": "tiles", "num_tiles": "num_tiles", "steps": plan.steps_of(form, "w_out"),
    }  # fmt: skip
    plan.launch(
        gemm.down_tiles,
        grid(plan, down, max_tiles * -(-n // down.bn)),
        down,
        arrays,
        max_tiles=max_tiles,
        I=i,
        N=n,
        at_w=plan.w_out.at(plan.b_out, form),
        stored=plan.down_stored(form),
        tiling=cut,
    )


def build_sum(plan: Planned, in_order: bool) -> None:
    made = plan.launch(combine.combine_slots, *_sum(plan, plan.tokens, in_order), **_of_sum(plan), SORTED=in_order, BESIDE=False)
    plan.by_token["sum"] = made


def sent_sum(plan: Planned, tokens: int, programs: int) -> Launch:
    """The sum of some tokens of rows in order, by so many programs or twice as many, to a place that is far."""
    return plan.made(combine.send_sums, *_sum(plan, min(tokens, programs), True), **_of_sum(plan), T=tokens)


def _sum(plan: Planned, rows: int, in_order: bool) -> tuple[Any, ...]:
    """Grid, warps and arrays of a sum."""
    arrays = {"y": "y", "ids": "ids", "weights": "weights", "position": "position" if in_order else "ids", "out": "out"}
    return (rows, -(-plan.out // _columns(plan))), 4, arrays


def _of_sum(plan: Planned) -> dict[str, Any]:
    n, block = plan.out, _columns(plan)
    at = {"at_ids": plan.strides_ids, "at_weights": plan.strides_weights}
    known = plan.top_k if plan.top_k <= UNROLLED else 0
    numbers = {"top_k": plan.top_k, "E": plan.experts, "N": n, "BN": block, "EVEN_N": n % block == 0, "KNOWN": known}
    return {**numbers, **at, "SCALE": not plan.body.on_input, "PDL": plan.pdl}


def _columns(plan: Planned) -> int:
    return min(power_of_two(plan.out), 1024)
