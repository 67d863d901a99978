"""Products that round their rows on the device: codes and scales of the definition, few rows and many, gradients."""

from __future__ import annotations

import pytest
import torch

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.encoding import EXPONENTS, Encoding, Rounding
from moefuse.ops.meaning.token_codes import quantise
from tests.cpu.coded_case import coded, rounded_before
from tests.cpu.ops_case import Case
from tests.cpu.test_ops_rounded import of_scaling
from tests.gpu.test_coded import on_gpu, run

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
ENCODINGS = {
    "fp8 blocks": Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128)),
    "fp8 blocks, least 0": Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128, least=0.0)),
    "fp8 blocks, powers": Encoding("e4m3", (128, 128), scale=EXPONENTS, activation=Rounding("e4m3", 128, power=True)),
    "fp8 channels": Encoding("e4m3", (1, 0), activation=Rounding("e4m3", 0)),
    "fp8 tensor": Encoding("e4m3", (0, 0), activation=Rounding("e4m3", 0)),
    "int8 channels": Encoding("s8", (1, 0), activation=Rounding("s8", 0)),
    "fp8 groups of 32": Encoding("e4m3", (64, 64), activation=Rounding("e4m3", 32)),
}
LARGE = Case(tokens=600, hidden=256, inter=384, hidden_out=200, experts=9, top_k=3, dtype=BF16, low_id=-1)


@pytest.mark.parametrize("name", ENCODINGS)
def test_codes_of_rows(name: str) -> None:
    """All bits but the sign of zeros, of random numbers, ties, zeros, numbers at both ends, and what is not finite."""
    from moefuse.kernels.triton.host import token_codes
    from moefuse.kernels.triton.host.sorted_rows import Sorted

    encoding = ENCODINGS[name]
    assert encoding.activation is not None
    for dtype in (BF16, torch.float32):
        x = torch.randn(500, 384, dtype=dtype, device="cuda")
        x[0, :64] = torch.arange(64, device="cuda") * 7.0
        x[1], x[2, 3], x[3, 200] = 0.0, float("inf"), float("nan")
        x[4], x[5] = x[4] * 1e-37, x[5] * 1e37
        it = Sorted(torch.arange(500, device="cuda"), torch.tensor([0, 500], device="cuda"), 500, 1, 1)
        found = token_codes.round_rows(x, it, encoding, tokens=True)
        codes, scales = quantise(encoding.activation, x)
        fine = scales.isfinite() & (scales > 0)
        assert torch.equal(found.scales[fine], scales[fine])
        fine = fine.repeat_interleave(384 // scales.shape[1], 1)
        assert torch.equal(found.codes[fine].view(codes.dtype).float(), codes[fine].float())


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 20, 64, 600])
@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_values(name: str, gating: str, tokens: int) -> None:
    """As the portable op computes on the same device, but for the order of sums: few codes of the second projection are neighbours."""
    from moefuse.runtime.cpu import experts_extended as portable

    encoding = ENCODINGS[name]
    case = LARGE.with_(tokens=tokens, gating=gating, separate=gating == "separate")
    args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    args = on_gpu(args)
    out = run(args, options)
    theirs = portable(ExpertsCall.of_extended(*args, **options))
    assert out.shape == theirs.shape
    if tokens:
        error, size = (out.float() - theirs.float()).abs(), float(theirs.float().abs().max())
        assert float(error.max()) <= 0.03 * size
        assert float(error.mean()) <= 2e-3 * size
        assert torch.equal(run(args, options), out)


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 20, 64, 600])
@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_tokens_that_come_rounded(name: str, gating: str, tokens: int) -> None:
    """As of the tokens themselves: the same codes in the same products, by all kernels (of few in another order)."""
    encoding = ENCODINGS[name]
    case = LARGE.with_(tokens=tokens, gating=gating, separate=gating == "separate")
    args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    args = on_gpu(args)
    rows, named = rounded_before(args, options)
    found, wanted = run(rows, named).float(), run(args, options).float()
    if tokens > 8:
        assert torch.equal(found, wanted)
    elif tokens:
        error, size = (found - wanted).abs(), float(wanted.abs().max())
        assert float(error.max()) <= 0.03 * size
        assert float(error.mean()) <= 2e-3 * size
    assert torch.equal(run(rows, named).float(), found)


def test_a_token_is_what_it_is_alone() -> None:
    """Its codes depend on nothing else, and few rows are multiplied in the same order whatever else is there."""
    encoding = ENCODINGS["fp8 blocks"]
    args, _, options = coded(LARGE.with_(tokens=14), encoding, None, encoding)
    args = on_gpu(args)
    out = run(args, options)
    few = run([t[3:12].contiguous() if i < 3 else t for i, t in enumerate(args)], options)
    assert torch.equal(few, out[3:12])


@pytest.mark.parametrize("name", ENCODINGS)
def test_gradient_of_routing_weights(name: str) -> None:
    """Of the y that forward had, with rounded activations: half a step of a code would be a hundredth of it."""
    encoding = ENCODINGS[name]
    for separate in (False, True):
        args, _, options = coded(LARGE.with_(dtype=torch.float32, separate=separate), encoding, None, encoding)
        found, wanted = of_scaling(run, on_gpu(args), options)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))


def test_gradients() -> None:
    """Near those of the experts without rounding, of x and of routing weights."""
    encoding = ENCODINGS["fp8 blocks"]
    args, dense, options = coded(LARGE, encoding, None, encoding)
    args, dense = on_gpu(args), on_gpu(dense)
    grads = []
    for given, op in ((args, torch.ops.moefuse.experts_extended), (dense, torch.ops.moefuse.experts)):
        x, weights = (given[i].detach().clone().requires_grad_() for i in (0, 2))
        named = options if op is torch.ops.moefuse.experts_extended else LARGE.options
        result = op(x, given[1], weights, *given[3:], **named)
        grads.append(torch.autograd.grad(result, (x, weights), torch.ones_like(result)))
    for ours, theirs in zip(*grads, strict=True):
        assert float((ours.float() - theirs.float()).norm()) <= 0.05 * float(theirs.float().norm())
