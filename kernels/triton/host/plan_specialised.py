"""The products of a plan by warp-specialised kernels (``hopper/products.py``), and which calls they take."""

from __future__ import annotations

from typing import Any

from moefuse.kernels.triton.hopper.forms import Cut, Form, cut_of
from moefuse.kernels.triton.host.available import available
from moefuse.kernels.triton.host.planned import Planned
from moefuse.kernels.triton.host.specialised import DTYPES, reaches_over, rows_in, rows_out, weights
from moefuse.tuning.problem import Tiles


def refusal(plan: Planned) -> str | None:
    """Why they cannot make the products of a plan; None if they can."""
    if not available(plan.device):
        return "warp-specialised kernels need Hopper and a Triton that they are written for"
    if plan.empty or not (plan.hidden and plan.inter):
        return "there is nothing to multiply"
    if plan.dtype not in DTYPES:
        return f"they multiply 16 bits, not {plan.dtype}"
    if any(n * plan.dtype.itemsize % 16 for n in (plan.hidden, plan.inter, plan.out)):
        return "rows are not whole 16 bytes"
    forms = [w.form(plan.dtype.itemsize) for w in (plan.w_in, plan.w_up, plan.w_out)]
    if not all(forms) or forms[0] != forms[1]:
        return "no descriptor can show the weights"
    inputs = (plan.hidden, plan.hidden, plan.inter)
    if any(reaches_over(form, n) for form, n in zip(forms, inputs, strict=True)):
        return "a block of weights would reach into the next expert"
    return None


def build_up(plan: Planned, up: Tiles, max_tiles: int) -> None:
    """The first projection with its activation, from rows in sorted order."""
    body, i, h = plan.body, plan.inter, plan.hidden
    gating = plan.gating
    form = plan.w_in.form(plan.dtype.itemsize)
    cut = cut_of(up, plan.config.bm, 1 if gating == "plain" else 2, plan.pdl, plan.b_in is not None)
    halves = 2 if gating == "halves" else 1
    features = {"merged": 2 * i, "interleaved": 2 * i}.get(body.gating, i)
    width = cut.BN // halves
    a = weights("w_in", plan.w_in, form, plan.experts, features, h, width, cut)
    b = weights("w_up", plan.w_up, form, plan.experts, features, h, width, cut) if body.gating == "separate" else a
    first_a, first_b = plan.firsts
    biased = plan.b_in is not None, halves == 2 and plan.b_up is not None
    tables = any(bias is not None and bias.table for bias in (plan.b_in, plan.b_up))
    _launch(
        plan,
        cut,
        {
            "x_rows": rows_in("xs", plan.slots, h, cut), "w_a": a, "w_b": b, "b_a": "b_in", "b_b": "b_up",
            "out_rows": rows_out("h", i, up.bn, cut), "steps_a": plan.steps_of(form, "w_in"), "steps_b": plan.steps_of(form, "w_up"),
        },
        max_tiles,
        blocks=-(-i // up.bn),
        K=h,
        features=features,
        at_a=plan.w_in.at(plan.b_in, form, first_a),
        at_b=plan.w_up.at(plan.b_up, form, first_b),
        args=body.pair,
        form=Form(halves, form, *biased, tables, body.activation, gating, body.up_first and gating == "interleaved"),
    )  # fmt: skip


def build_down(plan: Planned, down: Tiles, max_tiles: int) -> None:
    """The second projection; rows stay in sorted order."""
    i, n = plan.inter, plan.out
    form = plan.w_out.form(plan.dtype.itemsize)
    cut = cut_of(down, plan.config.bm, 1, plan.pdl, plan.b_out is not None)
    w = weights("w_out", plan.w_out, form, plan.experts, n, i, down.bn, cut)
    at = plan.w_out.at(plan.b_out, form, 0)
    steps = plan.steps_of(form, "w_out")
    _launch(
        plan,
        cut,
        {
            "x_rows": rows_in("h", plan.slots, i, cut), "w_a": w, "w_b": w, "b_a": "b_out", "b_b": "b_out",
            "out_rows": rows_out("y", n, down.bn, cut), "steps_a": steps, "steps_b": steps,
        },
        max_tiles,
        blocks=-(-n // down.bn),
        K=i,
        features=n,
        at_a=at,
        at_b=at,
        args=(0.0, 0.0),
        form=Form(1, form, plan.b_out is not None, BIAS_TABLE=plan.b_out is not None and plan.b_out.table),
    )  # fmt: skip


def _launch(plan: Planned, cut: Cut, arrays: dict[str, Any], max_tiles: int, *, blocks: int, **numbers: Any) -> None:
    from moefuse.kernels.triton.hopper.products import product_tiles

    lists = {"tiles": "tiles", "num_tiles": "num_tiles"}
    grid = (min(plan.device.sms, max_tiles * blocks),)
    plan.launch(product_tiles, grid, 4, arrays | lists, max_tiles=max_tiles, blocks=blocks, cut=cut, **numbers)
