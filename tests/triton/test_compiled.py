"""Every kernel compiles for every target without a GPU there, without spills, within the target's shared memory.

``HYPOTHESIS_PROFILE=deep`` compiles the whole shipped table too.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import THOROUGH

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, "gfx942": 64 << 10}
POINTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
}


def make_plan(problem: Any, config: Any, separate: bool = False, device: Any = None) -> Any:
    """A plan over meta tensors."""
    from moefuse.kernels.triton.host import plan as plans
    from moefuse.ops.meaning.call import Body, ExpertsCall, Stack

    dtype = getattr(torch, problem.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def weight(out: int, inp: int, transposed: bool) -> list[torch.Tensor]:
        if separate:
            return [draw(inp, out).t() if transposed else draw(out, inp) for _ in range(problem.experts)]
        return [draw(problem.experts, inp, out).transpose(1, 2) if transposed else draw(problem.experts, out, inp)]

    width = problem.inter if problem.gating == "plain" else 2 * problem.inter
    lists: Any = [
        weight(width, problem.hidden, problem.transposed_in),
        [],
        weight(problem.out, problem.inter, problem.transposed_out),
        [],
        [],
        [],
    ]
    activation = "silu"
    if problem.gating == "interleaved":
        activation, lists[3], lists[5] = "swiglu_oai", [draw(problem.experts, width)], [draw(problem.experts, problem.out)]
    ids = torch.empty(problem.tokens, problem.top_k, dtype=torch.int64, device="meta")
    w_in, w_up, w_out, b_in, b_up, b_out = lists
    body = Body(activation, (1.7, 7.0) if activation == "swiglu_oai" else (), problem.gating)
    inputs = draw(problem.tokens, problem.hidden), ids, draw(problem.tokens, problem.top_k)
    plan = plans.Plan(ExpertsCall(*inputs, Stack(w_in, b_in), Stack(w_up, b_up), Stack(w_out, b_out), body, dtype), config, device)
    tensors = plan.workspace.views(torch.empty(plan.workspace.size, dtype=torch.uint8, device="meta"))
    own = {"x": draw(1), "weights": draw(1), "out": draw(1), "ids": ids}
    table = torch.empty(1, dtype=torch.int64, device="meta")
    for name in ("w_in", "w_up", "w_out", "b_in", "b_up", "b_out"):
        operand = getattr(plan, name)
        own[name] = table if operand is not None and operand.table and name not in plan.apart else draw(1)
        own[f"steps_{name}"] = table
    return plan, {**tensors, **own}


def source(launch: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What Triton's launcher would compile for this launch."""
    from triton.compiler import ASTSource

    from moefuse.kernels.triton.launch.descriptors import Described

    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def number(value: Any, at: tuple[int, ...], specialised: bool = True) -> Any:
        if isinstance(value, tuple):
            parts = [number(part, (*at, i)) for i, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, float):
            return "fp32"
        if value is None or (value == 1 and specialised):
            constants[at] = value
            return "constexpr"
        if value % 16 == 0 and specialised:
            attributes[at] = [["tt.divisibility", 16]]
        return "i64" if value >= 1 << 31 else "i32"

    signature = {}
    for i, (param, value) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        if isinstance(value, Described):
            layout = "" if value.layout is None else f",{value.layout!r}"
            signature[param.name] = f"tensordesc<{POINTERS[tensors[value.array].dtype]}{list(value.block)}{layout}>"
        elif i in launch.begins:
            signature[param.name] = "i64"
        elif i < len(launch.names):
            signature[param.name] = f"*{POINTERS[tensors[value].dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", value
        else:
            signature[param.name] = number(value, (i,), not param.do_not_specialize)
    if launch.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(launch.kernel, signature, constants, attributes)
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(it: Any, tensors: dict[str, torch.Tensor], arch: int | str, options: dict[str, Any] | None = None) -> Any:
    """A launch compiled as Triton's launcher would, in a form that moefuse's own takes whatever this Triton is."""
    import triton
    from triton.backends.compiler import GPUTarget

    from moefuse.kernels.triton.launch import driver_launch

    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source(it, tensors), target=target, options=it.options if options is None else options)
    if not isinstance(arch, str):
        compiled.__dict__["function"] = 77
        it.compiled = compiled
        driver_launch.laid_out(it, range(len(it.names)))
    return compiled


@functools.cache
def cuobjdump() -> str | None:
    """NVIDIA's tool in Triton's package, which a build for another platform may lack."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.is_file() else None


LATER = 64
"""Bytes of stack that a Triton after those which the kernels were cut for may take: 3.9 takes 8 to 40 for three of them."""


def spills(compiled: Any, arch: int | str, folder: Path) -> int:
    """Bytes of stack (NVIDIA) or spilled vector registers (AMD) of one kernel."""
    import triton

    if isinstance(arch, str):
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])[1])  # type: ignore[index]
    tool = cuobjdump()
    if tool is None:
        return 0
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    found = int(re.search(r"STACK:(\d+)", text)[1])  # type: ignore[index]
    later = tuple(int(n) for n in triton.__version__.split(".")[:2]) > (3, 8)
    return 0 if later and found <= LATER else found


def compile_plan(problem: Any, config: Any, arch: int | str, folder: Path, separate: bool = False) -> None:
    from moefuse.kernels.triton.host import layout
    from moefuse.kernels.triton.host.plan_tiles import sent_sum

    device = layout.Device("", 132, SHARED[arch], arch == 90, not isinstance(arch, str))
    plan, tensors = make_plan(problem, config, separate, device)
    sent = [sent_sum(plan, 5000, 528)] if "spread" in plan.by_token else []
    for step in (*plan.steps, *sent):
        options = {k: v for k, v in step.options.items() if k != "launch_pdl" or not isinstance(arch, str)}
        compiled = compile_launch(step, tensors, arch, options)
        name = f"{step.kernel.__name__} for {arch}"
        assert compiled.metadata.shared <= SHARED[arch], f"{name}: {compiled.metadata.shared} bytes of shared memory"
        assert spills(compiled, arch, folder) == 0, f"{name} spills"


def problems() -> dict[str, Any]:
    from moefuse.tuning.problem import Problem

    def halves(tokens: int, **more: Any) -> Problem:
        return Problem(
            **{
                "tokens": tokens,
                "top_k": 8,
                "experts": 128,
                "hidden": 2048,
                "inter": 768,
                "out": 2048,
                "gating": "merged",
                "dtype": "bfloat16",
                **more,
            }
        )

    oai = {
        "top_k": 4,
        "experts": 32,
        "hidden": 2880,
        "inter": 2880,
        "out": 2880,
        "gating": "interleaved",
        "transposed_in": True,
        "transposed_out": True,
    }
    return {
        "decode": halves(1),
        "small": halves(64),
        "mid": halves(512),
        "prefill": halves(4096),
        "decode in-out": halves(1, **oai),
        "prefill in-out": halves(4096, **oai),
        "odd": halves(300, hidden=99, inter=77, out=55),
        "plain": halves(512, gating="plain"),
        "float32": halves(64, dtype="float32"),
        "float32, many rows": halves(4096, dtype="float32"),
        "float32, odd": halves(4096, hidden=99, inter=77, out=55, dtype="float32"),
        "float64": halves(64, dtype="float64"),
    }


NAMES = [
    "decode",
    "small",
    "mid",
    "prefill",
    "decode in-out",
    "prefill in-out",
    "odd",
    "plain",
    "float32",
    "float32, many rows",
    "float32, odd",
    "float64",
]
EVERYWHERE = ["decode", "small", "prefill"]


@pytest.mark.parametrize("arch", list(SHARED))
@pytest.mark.parametrize("name", NAMES)
def test_the_rules(arch: int | str, name: str, tmp_path: Path) -> None:
    """What a device without a table takes."""
    from moefuse.kernels.triton.config import fit, rules

    if arch != 90 and name not in EVERYWHERE and not THOROUGH:
        pytest.skip("HYPOTHESIS_PROFILE=deep compiles it for every target")
    problem = problems()[name]
    item = getattr(torch, problem.dtype).itemsize
    config = fit(problem, rules(problem, arch == 90), SHARED[arch], item)
    compile_plan(problem, config, arch, tmp_path)


@pytest.mark.parametrize(("name", "arch"), [("small", 80), ("small", 90), ("prefill", 80), ("prefill", 90), ("prefill in-out", 90)])
def test_separate_parameters(name: str, arch: int, tmp_path: Path) -> None:
    """Addresses from a table; many rows take descriptors that reach experts anywhere in memory."""
    from moefuse.kernels.triton.config import fit, rules

    problem = problems()[name]
    compile_plan(problem, fit(problem, rules(problem, arch == 90), SHARED[arch], 2), arch, tmp_path, separate=True)


def test_the_table_is_within_its_device() -> None:
    """Every shipped entry keeps its blocks on the device that it was measured on."""
    from moefuse.kernels.triton.config import choose, fit, table

    entries = table("NVIDIA H200")
    assert entries
    for problem, config in entries:
        assert fit(problem, config, SHARED[90], 2) == config
        assert choose(problem, "NVIDIA H200", True, SHARED[90], 2) == config
        assert choose(problem, "another Hopper", True, SHARED[90], 2) == config


@pytest.mark.skipif(not THOROUGH, reason="HYPOTHESIS_PROFILE=deep compiles the whole table")
@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize("index", range(36))
def test_the_table_compiles(index: int, specialised: bool, tmp_path: Path) -> None:
    from moefuse.kernels.triton.config import table

    problem, config = table("NVIDIA H200", specialised)[index]
    compile_plan(problem, config, 90, tmp_path)


@pytest.mark.parametrize("arch", [80, 90])
def test_float32_is_multiplied_by_tensor_cores(arch: int) -> None:
    """Split into parts: as exact as without tensor cores, and several times as fast."""
    from moefuse.kernels.triton.config import fit, rules
    from moefuse.kernels.triton.host import layout

    problem = problems()["float32, many rows"]
    config = fit(problem, rules(problem, arch == 90), SHARED[arch], 4)
    plan, tensors = make_plan(problem, config, device=layout.Device("", 132, SHARED[arch], arch == 90))
    for name in ("up_tiles", "down_tiles"):
        step = next(s for s in plan.steps if s.kernel.__name__ == name)
        ptx = compile_launch(step, tensors, arch).asm["ptx"]
        assert "fma.rn.f32" not in ptx
        assert re.search(r"(wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k8[\w.]*\.f32\.tf32\.tf32", ptx)


def test_join_is_one_product(tmp_path: Path) -> None:
    """The halves of a merged weight make one wgmma of 256 columns, by TMA, without a copy through registers."""
    from moefuse.tuning.problem import Config, Tiles

    problem = problems()["prefill"]
    up = Tiles(128, 64, 8, 4, 8, desc=True, join=True, tail=True)
    plan, tensors = make_plan(problem, Config(128, up, Tiles(256, 64, 8, 4, 8, desc=True)))
    step = next(s for s in plan.steps if s.kernel.__name__ == "up_tiles")
    compiled = compile_launch(step, tensors, 90)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
    assert "cp.async.bulk.tensor.4d" in ptx
    assert compiled.metadata.shared <= SHARED[90]
    assert spills(compiled, 90, tmp_path) == 0


def test_rules_and_table_never_exceed_a_small_device() -> None:
    """Whatever is chosen, fitted to 64 KiB it stays there, with at least two stages."""
    from moefuse.kernels.triton.config import choose, shared_bytes

    tiled = 0
    for problem in problems().values():
        item = getattr(torch, problem.dtype).itemsize
        config = choose(problem, "NVIDIA H200", False, 64 << 10, item)
        if config.bm:
            tiled += 1
            assert shared_bytes(problem, config.bm, config.up, item) <= 64 << 10
            assert shared_bytes(problem, config.bm, config.down, item, second=True) <= 64 << 10
    assert tiled


def compiled_up(desc: bool) -> tuple[Any, Any]:
    """(a step of a plan, its kernel compiled for sm_90), with PDL."""
    from moefuse.tuning.problem import Config, Tiles, Vectors

    part = Tiles(128, 64, 8, 3, 8, desc=True, join=True, rows_desc=True) if desc else Vectors(4, 512)
    plan, tensors = make_plan(problems()["prefill" if desc else "decode"], Config(128 if desc else 0, part, part, pdl=True))
    step = next(s for s in plan.steps if s.kernel.__name__.startswith("up"))
    return step, compile_launch(step, tensors, 90)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ptx": lambda text: text.replace(".param .u32", ".param .u64", 1)}, "in another form"),
        ({"ptx": lambda text: text.replace(".entry", ".func", 1)}, "in another form"),
        ({"global_scratch_size": 64}, "scratch"),
        ({"num_ctas": 2}, "clusters"),
        ({"num_ctas": None}, "does not say"),
    ],
    ids=["a wider number", "no entry", "scratch", "clusters", "a field that is gone"],
)
def test_what_is_not_known_is_launched_by_triton(change: dict[str, Any], reason: str) -> None:
    """A Triton that passes arguments otherwise, or no longer says what is asked, is not guessed at."""
    import types

    from moefuse.kernels.triton.launch import driver_launch

    step, compiled = compiled_up(desc=False)
    ptx = change.pop("ptx", lambda text: text)(compiled.asm["ptx"])
    said = {**compiled.metadata._asdict(), **change}
    metadata = types.SimpleNamespace(**{name: value for name, value in said.items() if value is not None or name not in change})
    step.compiled = types.SimpleNamespace(src=compiled.src, asm={"ptx": ptx}, metadata=metadata, function=77)
    with pytest.raises(NotImplementedError, match=reason):
        driver_launch.laid_out(step, range(len(step.names)))


def test_an_array_that_is_given_as_a_number() -> None:
    """A table is written from where tensors begin, which is new in every call."""
    from moefuse.kernels.triton.device import wgrad
    from moefuse.kernels.triton.launch import driver_launch
    from moefuse.kernels.triton.launch.launch import Begin, Launch

    names = wgrad.write_addresses.arg_names[:-1]
    it = Launch(wgrad.write_addresses, (1,), {"table": "table", **{name: Begin(name) for name in names[1:]}}, {"first": 8}, num_warps=1)
    table = torch.empty(16, dtype=torch.int64)
    some = [torch.empty(4) for _ in names[1:]]
    assert it.arguments([table, *some]) == [table, *[t.data_ptr() for t in some], 8]
    compile_launch(it, {"table": table}, 90)
    *_, count, maps = (numbers := driver_launch.laid_out(it, range(5, 5 + len(names))).numbers)[:4]
    assert (count, maps) == (len(names) + 3, 0)
    params = numbers[4:]
    assert params[: 2 * len(names)] == [n for slot in range(5, 5 + len(names)) for n in (driver_launch.SLOT, slot)]
    assert params[2 * len(names)] == driver_launch.MEMORY


def test_arguments_are_bound_by_name() -> None:
    """A keyword that is missing, unknown or given twice is an error when the launch is made, with the kernel's name."""
    from moefuse.kernels.triton.device import routing
    from moefuse.kernels.triton.launch.launch import Launch

    arrays, numbers = {"totals": "b", "counts": "a"}, {"C": 3, "BC": 128, "BE": 32, "COLS": 8, "PDL": False}
    launch = Launch(routing.scan_chunks, (1,), arrays, numbers)
    assert launch.args == ("a", "b", 3, 128, 32, 8, False)
    assert launch.names == ("a", "b")
    for wrong in (numbers | {"BD": 1}, {"C": 3}, numbers | {"counts": 1}):
        with pytest.raises(TypeError, match="scan_chunks"):
            Launch(routing.scan_chunks, (1,), arrays, wrong)
