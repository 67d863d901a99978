"""The kernels with specialised warps compile for sm_90a without a GPU there: no spills, within shared memory, registers as they are cut.

``HYPOTHESIS_PROFILE=deep`` compiles every activation in every form.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.activations import ACTIVATIONS
from tests.strategies import THOROUGH
from tests.triton.test_compiled import SHARED, compile_launch, make_plan, problems, source
from tests.triton.test_compiled_grouped import (
    SIZES,
    launches as launches,  # a fixture
)

FORMS = [("pingpong", 128), ("pingpong", 64), ("shared", 128)]
WARPS = 12
"""Two groups of four, and four of which one loads: registers are shared out by fours."""


@pytest.fixture(autouse=True)
def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these kernels there is nothing to see, whatever the environment says."""
    from moefuse.kernels.triton.host.available import SWITCH

    monkeypatch.delenv(SWITCH, raising=False)


def hopper() -> Any:
    from moefuse.kernels.triton.host.layout import Device

    return Device("", 132, SHARED[90], True, True)


def compiled(src: Any, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(src, target=GPUTarget("cuda", 90, 32), options=options)


def assembled(kernel: Any, folder: Path) -> str:
    """What ptxas says about a kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = folder / "kernel.ptx"
    path.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(folder / "kernel.o")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check(kernel: Any, cut: Any, stated: int, folder: Path) -> None:
    """Of one kernel; ``stated``: bytes of shared memory that the configuration counts with."""
    ptx, said = kernel.asm["ptx"], assembled(kernel, folder)
    assert kernel.metadata.num_warps == WARPS
    assert kernel.metadata.shared <= min(stated, SHARED[90]), f"{kernel.metadata.shared} bytes of shared memory, not {stated}"
    registers = {int(n) for n in re.findall(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert {cut.REGISTERS, cut.SPARE} <= registers
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert not re.search(r"\b(ld|st)\.local", ptx)
    # C75xx: ptxas waits for each product at once, because it cannot show that the sums are left alone until then.
    assert "C75" not in said, said
    assert "serialized" not in said, said
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said) == [("0", "0", "0")], said


def a_problem(name: str) -> tuple[Any, bool]:
    """(problem, whether experts are apart)."""
    from dataclasses import replace

    prefill = problems()["prefill"]
    known = {
        "merged": prefill,
        "interleaved in-out": problems()["prefill in-out"],
        "plain fp16": replace(prefill, gating="plain", dtype="float16"),
        "apart": replace(prefill, experts=16),
    }
    return known[name], name == "apart"


FEW = [("merged", *FORMS[0]), ("merged", *FORMS[2]), ("interleaved in-out", *FORMS[1]), ("plain fp16", *FORMS[0]), ("apart", *FORMS[0])]
ALL = [(name, *form) for name in ("merged", "interleaved in-out", "plain fp16", "apart") for form in FORMS]


@pytest.mark.parametrize(("name", "form", "bm"), ALL if THOROUGH else FEW)
def test_both_projections(name: str, form: str, bm: int, tmp_path: Path) -> None:
    """With the usual tiles; their configuration says what shared memory they take."""
    from moefuse.kernels.triton.config import fit, shared_bytes, specialised_tiles

    problem, apart = a_problem(name)
    config = specialised_tiles(problem, bm, form)
    assert fit(problem, config, SHARED[90], 2) == config
    plan, tensors = make_plan(problem, config, apart, hopper())
    steps = [s for s in plan.steps if s.kernel.__name__ == "product_tiles"]
    assert len(steps) == 2
    for step, part, second in zip(steps, (config.up, config.down), (False, True), strict=True):
        cut = step.args[-1]
        assert (form, bm) == (cut.FORM, cut.BM)
        check(compile_launch(step, tensors, 90), cut, shared_bytes(problem, bm, part, 2, second), tmp_path)


def product_source(form: Any, cut: Any) -> Any:
    """A product of bf16 as any launch has it: sizes are whole 16s, no number is 1."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from moefuse.kernels.triton.device.structs import Experts
    from moefuse.kernels.triton.hopper.forms import rows_layout
    from moefuse.kernels.triton.hopper.products import product_tiles
    from moefuse.kernels.triton.host.operands import Operand

    def descriptor(*block: int) -> str:
        return f"tensordesc<bf16{list(block)},{rows_layout(block[-1], len(block))!r}>"

    width = cut.BN if form.GATING == "plain" else cut.BN // 2
    weights = descriptor(*Operand((1 << 20, 1 << 10, 1)).matrix(form.DESC, 8, 64, 64, cut.BN // form.HALVES, cut.BK, 2)[2])
    bias, at = "*i64" if form.BIAS_TABLE else "*bf16", Experts(*["i32"] * len(Experts._fields))
    signature = {
        "x_rows": descriptor(cut.piece, cut.BK), "w_a": weights, "w_b": weights, "b_a": bias, "b_b": bias,
        "out_rows": descriptor(1, 1, cut.rows, width // cut.PARTS), "tiles": "*i32", "num_tiles": "*i32", "steps_a": "*i64",
        "steps_b": "*i64", "max_tiles": "i32", "blocks": "i32", "K": "i32", "features": "i32", "at_a": at, "at_b": at,
        "args": ("fp32", "fp32"), "form": "constexpr", "cut": "constexpr",
    }  # fmt: skip
    names = list(signature)
    assert names == product_tiles.arg_names
    whole = [i for i, name in enumerate(names) if str(signature[name]).startswith("*") or name in ("K", "features")]
    constants = {(names.index("form"),): form, (names.index("cut"),): cut}
    return GluonASTSource(product_tiles, signature, constants, {(i,): [["tt.divisibility", 16]] for i in whole})


def activations() -> list[tuple[str, str, str, int]]:
    """(activation, gating, form, bm); a few without THOROUGH: the ones with the most registers, and each form once at least."""
    if not THOROUGH:
        return [
            ("swiglu_oai", "halves", "pingpong", 128),
            ("gelu", "plain", "pingpong", 128),
            ("tanh", "interleaved", "pingpong", 128),
            ("gelu", "halves", "pingpong", 64),
            ("gelu_tanh", "plain", "pingpong", 64),
            ("gelu", "halves", "shared", 128),
            ("silu_clamp", "interleaved", "shared", 128),
        ]
    return [
        (name, gating, *form)
        for name, activation in ACTIVATIONS.items()
        for gating in ("plain", "halves", "interleaved")
        for form in FORMS
        if not (activation.needs_gate and gating == "plain")
    ]


@pytest.mark.parametrize(("activation", "gating", "form", "bm"), activations())
def test_every_activation(activation: str, gating: str, form: str, bm: int, tmp_path: Path) -> None:
    """The first projection with biases, which takes the most registers; of halves, from a table of addresses."""
    from moefuse.kernels.triton.config import specialised_tiles, tile_bytes
    from moefuse.kernels.triton.hopper.forms import Form, cut_of
    from moefuse.tuning.problem import Problem

    problem = Problem(4096, 8, 128, 2048, 768, 2048, "merged" if gating == "halves" else gating, "bfloat16")
    up, products = specialised_tiles(problem, bm, form).up, 1 if gating == "plain" else 2
    halves = gating == "halves"
    it = Form(1 + halves, "out-in", True, halves, halves, activation, gating)
    cut = cut_of(up, bm, products, False, biased=True)
    check(compiled(product_source(it, cut), {"num_warps": 4}), cut, tile_bytes(up, bm, products, 2), tmp_path)


@pytest.mark.parametrize("grads", ["shared", "pingpong"])
@pytest.mark.parametrize("name", ["many rows", "in-out"])
def test_the_grouped_tier(name: str, grads: str, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with weights and gradients of weights, in either form."""
    from moefuse.kernels.triton.config import ring_bytes
    from moefuse.kernels.triton.host import factors, linear, sorted_rows, specialised, wgrad
    from moefuse.kernels.triton.provide import grouped as tier

    if (name, grads) == ("in-out", "pingpong") and not THOROUGH:
        pytest.skip("HYPOTHESIS_PROFILE=deep compiles it")
    for module in (factors, linear, sorted_rows, specialised, wgrad):
        monkeypatch.setattr(module, "device_of", lambda d: hopper())
    monkeypatch.setattr(specialised, "LINEAR", grads)
    monkeypatch.setattr(specialised, "GRADS", grads)
    s = SIZES[name]
    ids = torch.empty(s.tokens, s.top_k, dtype=torch.int64, device="meta")
    xs, _, offsets = tier.permute(s.draw(s.tokens, s.hidden), ids, s.experts)
    w, b = s.weight(s.inter, s.hidden), s.bias(s.inter)
    h = tier.grouped_linear(xs, offsets, w, b)
    tier.grouped_linear_backward(h, xs, offsets, w, b, [True, True, bool(b)])
    mine = {(it.kernel.__name__, str(it.args)): (it, t) for it, t in launches if it.kernel.is_gluon()}
    assert {name for name, _ in mine} == {"product_tiles", "weight_grad_products"}
    for it, tensors in mine.values():
        cut = it.args[-1]
        assert grads == cut.FORM
        stated = ring_bytes(cut.FORM, cut.BM, cut.BN, cut.BK, cut.STAGES, cut.BN // cut.PARTS)
        check(compiled(source(it, tensors), it.options), cut, stated, tmp_path)


def test_canary() -> None:
    """What keeps a rule of ``hopper/ring.py``: the front end takes a value carried into a loop under another name for a constant of it."""
    import triton
    import triton.language as tl
    from triton.compiler import ASTSource

    @triton.jit
    def trail(out, first, n):  # type: ignore[no-untyped-def]
        stage = first
        before = stage
        for k in range(n):
            tl.store(out + k, before)
            before = stage
            stage += 1

    trail.__globals__["tl"] = tl
    ttir = compiled(ASTSource(trail, {"out": "*i32", "first": "i32", "n": "i32"}), {}).asm["ttir"]
    stored = re.search(r"tt\.store %\w+, (%\w+)", ttir)
    assert stored is not None
    assert stored[1] == "%first", "Triton carries such values right now: the rule at the head of hopper/ring.py can go"
