"""The launches of a plan for few slots: vectors (``gemv.py``), two kernels, or three where few tokens share out the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moefuse.kernels.triton.device import combine, gemv
from moefuse.kernels.triton.device.structs import Blocks, Experts, Factor, Form, Rows
from moefuse.kernels.triton.host.planned import Planned
from moefuse.tuning.problem import Vectors, power_of_two

NO_TERM: tuple[Factor, Experts | None] = (Factor(), None)


def build_vectors(plan: Planned) -> None:
    up, down = plan.config.up, plan.config.down
    rows = {name: name for name in ("x", "ids", "weights", "h")}
    plan.launch(
        gemv.up_vectors,
        up_grid(plan, up),
        up,
        rows | {"w_a": "w_in", "w_b": "w_up", "b_a": "b_in", "b_b": "b_up"} | dict.fromkeys(("u", "f_a", "f_b"), "w_in"),
        **up_numbers(plan, up),
    )
    if down.parts:
        build_parts(plan, down)
        return
    plan.launch(
        gemv.down_vectors,
        down_grid(plan, down),
        down,
        {"h": "h", "ids": "ids", "weights": "weights", "w": "w_out", "b": "b_out", "u": "w_out", "f": "w_out", "out": "out"},
        **down_numbers(plan, down),
    )


def up_grid(plan: Planned, up: Vectors) -> tuple[int, int]:
    return plan.slots, max(-(-plan.inter // up.bn), 1)


def down_grid(plan: Planned, down: Vectors) -> tuple[int, int]:
    return plan.tokens, -(-plan.out // down.bn)


def up_numbers(plan: Planned, up: Vectors, terms: Sequence[tuple[Factor, Experts | None]] = (NO_TERM, NO_TERM)) -> dict[str, Any]:
    """All arguments of ``gemv.up_vectors`` but arrays; ``terms`` of gate and up, with where their factors are."""
    (term_a, at_fa), (term_b, at_fb) = terms
    first_a, first_b = plan.firsts
    return {
        "S": plan.slots,
        "top_k": plan.top_k,
        "E": plan.experts,
        "H": plan.hidden,
        "N": plan.inter,
        "args": plan.body.pair,
        "at_x": plan.strides_x,
        "at_ids": plan.strides_ids,
        "at_weights": plan.strides_weights,
        "at_a": plan.w_in.at(plan.b_in, first=first_a),
        "at_b": plan.w_up.at(plan.b_up, first=first_b),
        "at_fa": at_fa,
        "at_fb": at_fb,
        "form": Form(plan.body.activation, plan.gating, plan.body.up_first and plan.gating == "interleaved", plan.body.on_input),
        "term_a": term_a,
        "term_b": term_b,
        "stored": plan.up_stored(),
        "blocks": _blocks(plan, up, plan.inter, plan.hidden),
    }


def down_numbers(plan: Planned, down: Vectors, term: tuple[Factor, Experts | None] = NO_TERM) -> dict[str, Any]:
    """Numbers that ``gemv.down_vectors`` takes."""
    return {
        "top_k": plan.top_k,
        "E": plan.experts,
        "I": plan.inter,
        "N": plan.out,
        "at_ids": plan.strides_ids,
        "at_weights": plan.strides_weights,
        "at_w": plan.w_out.at(plan.b_out),
        "at_f": term[1],
        "SCALE": not plan.body.on_input,
        "term": term[0],
        "stored": plan.down_stored(),
        "blocks": _blocks(plan, down, plan.out, plan.inter),
    }


def _blocks(plan: Planned, part: Vectors, outputs: int, inputs: int) -> Blocks:
    return Blocks(part.bn, part.bk, part.stages, outputs % part.bn == 0, inputs % part.bk == 0, plan.pdl, part.at)


def build_parts(plan: Planned, down: Vectors) -> None:
    i, n = plan.inter, plan.out
    wide = torch.float64 if plan.dtype == torch.float64 else torch.float32
    plan.workspace.add("parts", (plan.slots, down.parts, n), wide)
    plan.launch(
        gemv.down_parts,
        (plan.slots, -(-n // down.bn), down.parts),
        down,
        {"h": "h", "ids": "ids", "w": "w_out", "parts": "parts"},
        top_k=plan.top_k,
        E=plan.experts,
        I=i,
        N=n,
        span=-(-i // (down.parts * down.bk)) * down.bk,
        at_ids=plan.strides_ids,
        at_w=Experts(*plan.w_out.strides),
        stored=plan.down_stored(),
        blocks=_blocks(plan, down, n, i),
    )
    block = min(power_of_two(n), 256)
    plan.launch(
        combine.combine_parts,
        (plan.tokens, -(-n // block)),
        4,
        {"parts": "parts", "ids": "ids", "weights": "weights", "b": "b_out", "out": "out", "h": "h"},
        top_k=plan.top_k,
        E=plan.experts,
        N=n,
        at_ids=plan.strides_ids,
        at_weights=plan.strides_weights,
        at_b=Rows(*(plan.b_out.strides if plan.b_out else (0, 0))),
        PARTS=down.parts,
        SCALE=not plan.body.on_input,
        stored=plan.down_stored(),
        BN=block,
        PDL=plan.pdl,
    )
