"""Products with weights in few bits, in Triton's interpreter: the kernel's weights have the bits of the definition, and the op is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import Encoding, Packing, Rounding
from tests.cpu.coded_case import ENCODINGS as EVERY, Held, coded, hold
from tests.cpu.ops_case import Case, assert_as_exact, reference, to
from tests.triton.interpreted_case import interpreted

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]

# The interpreter cuts where it should round to bfloat16; steps in that are for the device (tests/gpu).
ENCODINGS = {name: replace(e, arithmetic="f16" if e.arithmetic == "bf16" else e.arithmetic) for name, e in EVERY.items()}
OPS = ("experts_extended", "experts_extended_forward", "experts_extended_backward")
SMALL = Case(tokens=9, hidden=32, inter=48, hidden_out=40, experts=5, top_k=2, dtype=torch.float32, low_id=-1)


def product(held: Held, x: Tensor, rows: int, columns: int, back: bool, separate: bool) -> Tensor:
    """Rows of x [E * rows, .] times each expert's weights, or their transposes."""
    from moefuse.kernels.triton.host import coded as host, sorted_rows
    from moefuse.kernels.triton.host.sorted_rows import Sorted

    experts = held.storage.shape[0]
    storage, more = held.lists(separate)
    count = len(storage)
    as_bytes = [t.view(torch.uint8) if t.dtype not in host.ELEMENTS else t for t in storage]
    codes = Codes(held.encoding, more[:count], more[count:])
    it = Sorted(torch.arange(experts * rows), torch.arange(experts + 1) * rows, experts * rows, experts, 1)
    out = torch.full((experts * rows, columns), float("nan"), dtype=x.dtype)
    host.product(out, x, host.held(as_bytes, codes), sorted_rows.tiled(it, x.dtype), back=back)
    return out.view(experts, rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("storage", ["stacked", "separate", "in-out"])
@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.sampled(3)
def test_weights_have_the_bits_of_the_definition(name: str, storage: str, dtype: torch.dtype) -> None:
    """Rows of a unit matrix give the weights themselves, and their transposes where the product is with these: all bits."""
    g = torch.Generator().manual_seed(0)
    out, inp = {"nf4": (16, 48), "halves": (32, 32)}.get(name, (24, 32))
    held = hold(ENCODINGS[name], 3, out, inp, g, in_out=storage == "in-out")
    dense = held.dense(dtype)
    for back, width, columns in ((False, inp, out), (True, out, inp)):
        x = torch.eye(width, dtype=dtype).repeat(3, 1)
        found = product(held, x, width, columns, back, storage == "separate")
        assert torch.equal(found if back else found.transpose(1, 2), dense), (name, back)


def test_what_stands_for_nothing() -> None:
    """NaN of float8 and of a scale, zeros with a sign, the largest and the smallest numbers: as the definition has them."""
    g = torch.Generator().manual_seed(0)
    for name in ("fp8 channels", "mxfp4", "mxfp4 by ldexp", "powers", "fp8 tensor"):
        held = hold(ENCODINGS[name], 1, 16, 32, g)
        held.storage.view(torch.uint8)[:] = torch.arange(held.storage.numel()).view(held.storage.shape) % 256
        if held.encoding.scale:
            held.scale[0, 0, 0], held.scale[0, 1, 0] = 255, 0
        dense = held.dense(torch.float32)
        found = product(held, torch.eye(32), 32, 16, False, False)[0].t()
        spoiled = ~dense[0].isfinite().all(1)  # 0 * inf
        assert torch.equal(found.isfinite(), ~spoiled[:, None].expand(-1, 32))
        assert torch.equal(found[~spoiled], dense[0, ~spoiled] + 0.0)


@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
@pytest.mark.parametrize("name", ["fp8 blocks", "words of inputs", "halves"])
@pytest.mark.sampled(2)
def test_the_op(name: str, gating: str) -> None:
    """Values and gradients, with one projection in floating point, rows of nobody and poisoned memory."""
    case = SMALL.with_(gating=gating, activation="relu2" if gating == "plain" else "silu", weight_on_input=gating == "separate")
    case = case.with_(hidden=32, inter=32, hidden_out=32)
    args, dense, options = coded(case, ENCODINGS[name], ENCODINGS[name] if gating == "separate" else None, ENCODINGS[name])
    with interpreted(provide(), OPS) as ran:
        out, grads = run(args, options)
    assert set(ran) == {*OPS[1:]}
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    _, theirs = run(args, options)
    for ours, portable in zip(grads, theirs, strict=True):
        torch.testing.assert_close(ours, portable, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["storage", "scales"])
def test_experts_of_unequal_strides(which: str) -> None:
    """What kernels cannot read as it lies is stacked, and then so is what belongs to it."""
    case = SMALL.with_(hidden=32, inter=32, hidden_out=32, separate=True)
    args, dense, options = coded(case, ENCODINGS["fp8 blocks"], None, ENCODINGS["nibbles, zeros"])
    for at in (0, case.experts) if which == "scales" else ():
        args[15][at] = args[15][at].t().contiguous().t()
    for w in (args[3], args[5]) if which == "storage" else ():
        w[1] = w[1].view(torch.uint8).t().contiguous().t().view(w[1].dtype)
    with interpreted(provide(), OPS):
        out = torch.ops.moefuse.experts_extended(*args, **options)
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))


@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_inference(tokens: int) -> None:
    """Nothing is differentiated; no token, one, and tiles of several."""
    case = SMALL.with_(tokens=tokens, hidden=32, inter=32, hidden_out=32)
    args, dense, options = coded(case, ENCODINGS["nibbles"], None, ENCODINGS["int8 channels"])
    with interpreted(provide(), OPS) as ran:
        out = torch.ops.moefuse.experts_extended(*args, **options)
    assert ran == ["experts_extended"]
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))


@pytest.mark.every_value
@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("name", ["fp8 blocks", "words of inputs", "halves", "words of features"])
def test_some_experts_at_a_time(name: str, gating: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows: two experts are unpacked at once, and the last one alone; values and gradients."""
    from moefuse.kernels.triton.provide import coded_products, unpacked

    always = [k._replace(rows=(0, 1e9)) for k in coded_products.KERNELS if k.name == "some experts at a time, unpacked"]
    assert len(always) == 1
    monkeypatch.setattr(coded_products, "KERNELS", always)
    monkeypatch.setattr(unpacked, "DTYPES", (torch.float32,))  # the interpreter cuts where it should round to 16 bits
    monkeypatch.setattr(unpacked, "experts_at_once", lambda *_: 2)
    case = SMALL.with_(gating=gating, hidden=32, inter=32, hidden_out=32, weight_on_input=gating == "separate")
    args, dense, options = coded(case, ENCODINGS[name], ENCODINGS[name] if gating == "separate" else None, ENCODINGS[name])
    with interpreted(provide(), OPS):
        out, grads = run(args, options)
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    _, theirs = run(args, options)
    for ours, portable in zip(grads, theirs, strict=True):
        torch.testing.assert_close(ours, portable, rtol=1e-4, atol=1e-4)


def test_how_many_experts_at_once() -> None:
    """A sixteenth of a projection within bounds, and one expert at least."""
    from moefuse.kernels.triton.provide.unpacked import LEAST, MOST, experts_at_once

    held: Any = type("Held", (), {"features": 1536, "inputs": 2048})
    assert experts_at_once(held, 128, 2) == LEAST // (1536 * 2048 * 2) == 21
    assert experts_at_once(held, 512, 2) == 512 // 16
    held.features, held.inputs = 4096, 7168
    assert experts_at_once(held, 256, 2) == MOST // (4096 * 7168 * 2) == 4
    held.features, held.inputs = 28672, 8192
    assert experts_at_once(held, 8, 2) == 1


def test_a_table_with_a_negative_zero() -> None:
    """It counts on in steps of one but for a sign, which is one of the bits."""
    table = tuple(-0.0 if i == 8 else float(i - 8) for i in range(16))
    held = hold(Encoding(table, (1, 8), packing=Packing(1, (0, 4))), 2, 16, 32, torch.Generator().manual_seed(0))
    found = product(held, torch.eye(16).repeat(2, 1), 16, 32, True, False)
    dense = held.dense(torch.float32)
    assert torch.equal(found, dense)
    from moefuse.kernels.triton.host.coded import kind_of

    assert kind_of(held.encoding) == ("table", 0, table)  # sums of products lose the sign of zero


@pytest.mark.parametrize(
    ("packing", "dtype"),
    [(Packing(1, (0,)), torch.uint8), (Packing(1, (0, 4, 8, 12)), torch.int16), (Packing(1, (0, 2)), torch.uint8)],
    ids=["one code of a byte", "four codes", "codes that overlap"],
)
def test_packings_that_are_not_taken(packing: Packing, dtype: torch.dtype) -> None:
    """A byte of which half is read is no code as a whole; the kernel would have taken it for one. Found by reading."""
    from moefuse.kernels.triton.host.coded import refusal

    codes = Codes(Encoding(EVERY["nibbles"].table, (1, 8), packing=packing), [torch.ones(2, 16, 4)], ())
    assert refusal(codes, torch.zeros(2, 16, 32 // packing.per, dtype=dtype)) == f"codes are packed as {packing}"


def test_zeros_behind_the_scales_are_not_taken() -> None:
    """The kernel subtracts them in front of the product, so it would compute something else."""
    from moefuse.kernels.triton.host.coded import refusal

    encoding = replace(EVERY["nibbles, zeros"], behind=True)
    codes = Codes(encoding, [torch.ones(2, 16, 4)], [torch.ones(2, 16, 4)])
    assert refusal(codes, torch.zeros(2, 16, 16, dtype=torch.uint8)) == "zeros are subtracted behind the scales"


def test_what_is_not_taken() -> None:
    """float64, which tensor cores do not have for these, is left to the portable code, with the reason."""
    args, _, options = coded(SMALL.with_(dtype=torch.float64, inter=32), ENCODINGS["fp8 blocks"], None, ENCODINGS["fp8 blocks"])
    assert provide().supports(ExpertsCall.of_extended(*args, **options)) == "no kernel for torch.float64"


@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("rounding", [None, Rounding("e4m3", 16)], ids=["rows as they are", "rounded rows"])
def test_hidden_activations_once_more(rounding: Rounding | None, gating: str) -> None:
    """What a layer that keeps none computes in backward: the same bits, rows that are nobody's zero, in poisoned memory."""
    case = SMALL.with_(inter=32, gating=gating, weight_on_input=gating == "separate")
    encoding = replace(ENCODINGS["fp8 blocks"], activation=rounding)
    args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    call = ExpertsCall.of_extended(*args, **options)
    with interpreted(provide(), OPS):
        _, h, order, offsets, u = provide().experts_extended_forward(call)
        again = provide().experts_extended_hidden(call, order, offsets, u)
    assert torch.equal(again[: int(offsets[-1])], h[: int(offsets[-1])])
    assert not again[int(offsets[-1]) :].any()


def test_small_groups_of_activations_are_not_taken() -> None:
    """Tensor cores take more inputs at once than share a scale."""
    encoding = replace(ENCODINGS["fp8 blocks"], activation=Rounding("e4m3", 8))
    args, _, options = coded(SMALL.with_(inter=32), encoding, None, encoding)
    reason = provide().supports(ExpertsCall.of_extended(*args, **options))
    assert reason is not None
    assert reason.startswith("the program rounds activations e4m3 per token and 8 inputs")


def provide() -> Any:
    from moefuse.kernels.triton.provide import extended as module

    return module


def run(args: list[Any], options: dict[str, Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = [
        args[0].clone().requires_grad_(),
        args[2].clone().requires_grad_(),
        *(t.clone().requires_grad_() for b in args[6:9] for t in b),
    ]
    source = iter(inputs[2:])
    own = [inputs[0], args[1], inputs[1], *args[3:6], *([next(source) for _ in b] for b in args[6:9]), *args[9:]]
    out = torch.ops.moefuse.experts_extended(*own, **options)
    return out.detach(), torch.autograd.grad(out.square().sum(), inputs)
