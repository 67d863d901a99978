"""``moefuse::experts`` on the device: what tests/contract cannot show without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.runtime import dense, providers
from tests.cpu.ops_case import Case, reference, to
from tests.gpu.gpu_case import assert_right, on_gpu, run

pytestmark = pytest.mark.gpu

FEW = {"tokens": 3, "hidden": 96, "inter": 64, "hidden_out": 80, "experts": 9, "top_k": 2}
SOME = {"tokens": 70, "hidden": 96, "inter": 64, "hidden_out": 96, "experts": 9, "top_k": 4}
MANY = {"tokens": 700, "hidden": 136, "inter": 200, "hidden_out": 264, "experts": 6, "top_k": 2}


def test_triton_runs_the_op() -> None:
    args = on_gpu(Case(**SOME, dtype=torch.bfloat16).args())
    options = Case(**SOME).options
    assert providers.select("experts", ExpertsCall.of(*args, **options)).name == "triton"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
def test_experts_anywhere_in_memory(gating: str, transposed: bool) -> None:
    """Many rows: descriptors that reach from one expert to another (16 GiB and more behind it in one case), and see nothing in between."""
    from moefuse.kernels.triton.host import plan as plans

    case = Case(**MANY, separate=True, gating=gating, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    room = torch.full(((17 if gating == "separate" else 1) << 29,), float("nan"), dtype=torch.bfloat16, device="cuda")
    ends = [0, room.numel()]
    for at in (3, 4, 5):
        for e, w in enumerate(args[at]):
            n = w.numel()
            own = room[ends[0] :][:n] if e % 2 else room[ends[1] - n : ends[1]]
            ends = [ends[0] + n + 8, ends[1]] if e % 2 else [ends[0], ends[1] - n - 8]
            shape = w.t().shape if transposed else w.shape
            args[at][e] = own.view(shape).t().copy_(w) if transposed else own.view(shape).copy_(w)
    assert_right(run(args, **case.options), args, case.options)
    assert plans.Plan(case.call(args)).apart == {"w_in", "w_up", "w_out"}
    del room, own, args
    torch.cuda.empty_cache()  # other processes test on this device


def test_long_sums_in_float32() -> None:
    """No further from float64 than the library's products: the proof of a rewrite asks for that, and refused layers of these sizes."""
    case = Case(tokens=512, hidden=2048, inter=768, hidden_out=2048, experts=16, top_k=4, dtype=torch.float32, bias=False)
    args = on_gpu(case.args())
    exact = reference(to(args, torch.float64), **{**case.options, "out_dtype": None})
    error, own = (
        float((out.double() - exact).norm() / exact.norm()) for out in (run(args, **case.options), reference(args, **case.options))
    )
    assert error <= 1.1 * own, f"{error:.2g}, the library {own:.2g}"


@pytest.mark.parametrize("setting", ["allow_tf32", "fp32_precision"])
def test_leave_to_round_float32(setting: str) -> None:
    """By either name, in every dtype; a call with leave is not served by what was made without."""
    cases = [Case(**SOME, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    args = [on_gpu(case.args()) for case in cases]
    before = [run(given, **case.options) for given, case in zip(args, cases, strict=True)]
    setattr(torch.backends.cuda.matmul, setting, True if setting == "allow_tf32" else "tf32")
    try:
        rounded = [run(given, **case.options) for given, case in zip(args, cases, strict=True)]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.equal(rounded[1], before[1])
    assert not torch.equal(rounded[0], before[0])
    # tf32 has 11 significant bits: 3e-4 of a factor on average, in two products one behind the other.
    assert 1e-5 < float((rounded[0] - before[0]).norm() / before[0].norm()) < 2e-3
    assert torch.equal(run(args[0], **cases[0].options), before[0])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-38, 1e-42])
@pytest.mark.parametrize("sizes", [SOME, MANY], ids=["some", "many"])
def test_values_that_parts_could_lose(sizes: dict[str, Any], value: float) -> None:
    """float32 is multiplied in parts (tf32x3): no infinity less ("inf - inf" of a part is NaN), no NaN more, no row but its own."""
    case = Case(**sizes, dtype=torch.float32, gating="plain", activation="relu", bias=False)
    args = on_gpu(case.args())
    before = run(args, **case.options)
    args[0][1] = 0.0
    args[0][1, 3] = value
    out, want = run(args, **case.options), reference(args, **case.options)
    assert torch.equal(out[2:], before[2:])
    assert torch.equal(out[1].isnan(), want[1].isnan())
    assert torch.equal(out[1].isinf(), want[1].isinf())
    finite = want[1].isfinite()
    # Where large terms cancel, what is left is as far off as they are: by a few roundings of the largest.
    large = float(want[1][finite].abs().max()) if finite.any() else 0.0
    torch.testing.assert_close(out[1][finite], want[1][finite], rtol=1e-5, atol=max(1e-37, 1e-6 * large))


def test_offsets_past_32_bits() -> None:
    """Experts, and the rows of one expert, further apart than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of device memory")
    case = Case(tokens=40, hidden=64, inter=32, hidden_out=64, experts=2, top_k=1, bias=False, dtype=torch.bfloat16)
    for tokens in (3, 40):
        c = case.with_(tokens=tokens)
        args = on_gpu(c.args())
        (w,) = args[3]
        space = torch.empty((1 << 32) + (1 << 24), dtype=w.dtype, device="cuda")
        args[3] = [space.as_strided(w.shape, (1 << 32, w.shape[2], 1)).copy_(w)]
        assert_right(run(args, **c.options), args, c.options)
        args[3] = [space.as_strided(w.shape, (w.shape[2], 1 << 26, 1)).copy_(w)]
        assert_right(run(args, **c.options), args, c.options)
        del space


def test_dense_fallback_on_the_device() -> None:
    """What runs where Triton is missing."""
    for c in (Case(**SOME, dtype=torch.bfloat16), Case(**FEW, dtype=torch.float32, weight_on_input=True)):
        args = on_gpu(c.args())
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = dense.experts(c.call(args))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_right(out, args, c.options)
