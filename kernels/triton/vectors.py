"""The launches of a plan for few slots: vectors (``gemv.py``), two kernels, or three where few tokens share out the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moefuse.kernels.triton import combine, gemv
from moefuse.kernels.triton.launch import INTERPRETED
from moefuse.kernels.triton.problem import Vectors, power_of_two

if TYPE_CHECKING:
    from moefuse.kernels.triton.plan import Plan


def build_vectors(plan: Plan) -> None:
    up, down, body, pdl = plan.config.up, plan.config.down, plan.body, plan.config.pdl and not INTERPRETED
    no_bias = (0, 0)
    i, n, h = plan.inter, plan.out, plan.hidden
    plan.launch(
        gemv.up_vectors,
        (plan.slots, max(-(-i // up.bn), 1)),
        (
            *(plan.slots, plan.top_k, plan.experts, h, i, *body.pair),
            *(*plan.strides_x, *plan.strides_ids, *plan.strides_weights, *plan.w_in.strides, *plan.w_up.strides),
            *(*(plan.b_in.strides if plan.b_in else no_bias), *(plan.b_up.strides if plan.b_up else no_bias), *plan.firsts),
            *(plan.gating, body.up_first and plan.gating == "interleaved", body.activation),
            *(*plan.up_flags(), body.on_input, plan.wide(plan.w_in, plan.w_up)),
            *(i % up.bn == 0, h % up.bk == 0, up.bn, up.bk, up.stages, pdl),
        ),
        "x ids weights w_in w_up b_in b_up h",
        up,
    )
    if down.parts:
        build_parts(plan, down)
        return
    plan.launch(
        gemv.down_vectors,
        (plan.tokens, -(-n // down.bn)),
        (
            *(plan.top_k, plan.experts, i, n, *plan.strides_ids, *plan.strides_weights, *plan.w_out.strides),
            *(plan.b_out.strides if plan.b_out else no_bias),
            *(
                plan.w_out.table,
                plan.w_out.aligned,
                plan.b_out is not None,
                plan.b_out is not None and plan.b_out.table,
                not body.on_input,
                plan.wide(plan.w_out),
            ),
            *(n % down.bn == 0, i % down.bk == 0, down.at, down.bn, down.bk, down.stages, pdl),
        ),
        "h ids weights w_out b_out out",
        down,
    )


def build_parts(plan: Plan, down: Vectors) -> None:
    pdl, i, n = plan.config.pdl and not INTERPRETED, plan.inter, plan.out
    span = -(-i // (down.parts * down.bk)) * down.bk
    wide = torch.float64 if plan.dtype == torch.float64 else torch.float32
    plan.workspace.add("parts", (plan.slots, down.parts, n), wide)
    plan.launch(
        gemv.down_parts,
        (plan.slots, -(-n // down.bn), down.parts),
        (
            *(plan.top_k, plan.experts, i, n, span, *plan.strides_ids, *plan.w_out.strides),
            *(plan.w_out.table, plan.w_out.aligned, plan.wide(plan.w_out), n % down.bn == 0, i % down.bk == 0),
            *(down.bn, down.bk, down.stages, pdl),
        ),
        "h ids w_out parts",
        down,
    )
    block = min(power_of_two(n), 256)
    bias = plan.b_out
    plan.launch(
        combine.combine_parts,
        (plan.tokens, -(-n // block)),
        (
            *(plan.top_k, plan.experts, n, *plan.strides_ids, *plan.strides_weights, *(bias.strides if bias else (0, 0))),
            *(down.parts, bias is not None, bias is not None and bias.table, not plan.body.on_input, block, pdl),
        ),
        "parts ids weights b_out out h",
        None,
    )
