"""Products that round their rows, in Triton's interpreter: codes and scales have the bits of the definition, and the op is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefuse.ops.meaning.encoding import EXPONENTS, Encoding, Rounding
from moefuse.ops.meaning.token_codes import packed, quantise, unpacked
from tests.cpu.coded_case import coded, rounded_before
from tests.cpu.ops_case import Case
from tests.cpu.test_ops_rounded import of_scaling
from tests.triton.interpreted_case import interpreted
from tests.triton.test_interpreted_coded import OPS, provide, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]

ROUNDINGS = {
    "e4m3 groups": Rounding("e4m3", 32),
    "e4m3 groups, powers": Rounding("e4m3", 32, power=True),
    "e4m3 tokens": Rounding("e4m3", 0, least=0.0),
    "s8 tokens": Rounding("s8", 0),
    "s8 groups": Rounding("s8", 64),
}
SMALL = Case(tokens=9, hidden=64, inter=64, hidden_out=40, experts=5, top_k=2, dtype=torch.float32, low_id=-1)


def encoding_of(rounding: Rounding) -> Encoding:
    if rounding.group:
        return Encoding(rounding.element, (32, 64), scale=EXPONENTS if rounding.power else "", activation=rounding)
    return Encoding(rounding.element, (1, 0), activation=rounding)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_codes_and_scales_of_rows(name: str) -> None:
    """All bits: ties, zeros, what is not finite, numbers at the ends of float32; tokens of sorted rows, and of nobody."""
    from moefuse.kernels.triton.host import token_codes
    from moefuse.kernels.triton.host.sorted_rows import Sorted

    rounding = ROUNDINGS[name]
    x = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    x[0, :64] = torch.arange(64) * 7.0  # the largest is 441, and many are halfway
    x[1], x[2, 3], x[3, 100] = 0.0, float("inf"), float("nan")
    x[4], x[5] = x[4] * 1e-37, x[5] * 1e37
    order = torch.tensor([5, 3, 1, 0, 2, 4, 0])
    it = Sorted(order, torch.tensor([0, 4, 6]), 7, 2, 1)
    found = token_codes.round_rows(x, it, encoding_of(rounding), tokens=True)
    codes, scales = quantise(rounding, x[order[:6]])
    assert torch.equal(found.scales[:6].view(torch.int32)[scales.isfinite()], scales.view(torch.int32)[scales.isfinite()])
    assert torch.equal(found.scales[:6].isnan(), scales.isnan())
    finite = scales.isfinite().repeat_interleave(192 // scales.shape[1], 1)
    wanted = codes.view(torch.uint8)
    nan = codes.float().isnan()  # of which there are two, with either sign
    assert torch.equal(found.codes[:6][finite & ~nan], wanted[finite & ~nan])
    assert torch.equal(found.codes[:6].view(codes.dtype).float().isnan()[finite], nan[finite])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_the_op(name: str, gating: str) -> None:
    """Values as of the portable op but for the order of sums, and gradients; rows of nobody and poisoned memory."""
    case = SMALL.with_(gating=gating, weight_on_input=gating == "separate")
    encoding = encoding_of(ROUNDINGS[name])
    args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    with interpreted(provide(), OPS) as ran:
        out, grads = run(args, options)
    assert set(ran) == {*OPS[1:]}
    theirs, their_grads = run(args, options)
    # h differs in its last bits by the order of sums, so a code of the second projection may be its neighbour.
    scale = float(theirs.abs().max())
    assert float((out - theirs).abs().median()) <= 1e-6 * scale
    assert float((out - theirs).abs().max()) <= 0.02 * scale
    for ours, portable in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(ours, portable, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_gradient_of_routing_weights(name: str, bias: bool) -> None:
    """Of the y that forward had, with rounded activations; zeros for slots of nobody, in poisoned memory; biases together or apart."""
    encoding = encoding_of(ROUNDINGS[name])
    for separate in (False, True) if bias else (False,):
        args, _, options = coded(SMALL.with_(tokens=5, experts=3, bias=bias, separate=separate), encoding, None, encoding)
        with interpreted(provide(), OPS) as ran:
            found, wanted = of_scaling(lambda args, options: torch.ops.moefuse.experts_extended(*args, **options), args, options)
        assert set(ran) == {*OPS[1:]}
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_inference(tokens: int) -> None:
    """No token, one, and tiles of several."""
    encoding = encoding_of(ROUNDINGS["e4m3 groups"])
    args, _, options = coded(SMALL.with_(tokens=tokens), encoding, None, encoding)
    with interpreted(provide(), OPS) as ran:
        out = torch.ops.moefuse.experts_extended(*args, **options)
    assert ran == ["experts_extended"]
    theirs = torch.ops.moefuse.experts_extended(*args, **options)
    assert out.shape == theirs.shape
    assert not tokens or float((out - theirs).abs().max()) <= 0.02 * float(theirs.abs().max())


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rows_that_travel(name: str) -> None:
    """Codes and scales of ``token_codes.packed``, and all bits of what the experts make of the tokens themselves; rows of nobody too."""
    from moefuse.kernels.triton.host import token_codes

    rounding = ROUNDINGS[name]
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    x[1], x[2] = 0.0, x[2] * 1e-20
    came = replace(rounding, came="float32")
    for ours, wanted in zip(unpacked(came, token_codes.packed_rows(x, rounding)), unpacked(came, packed(rounding, x)), strict=True):
        number = ~wanted.float().isnan()
        assert torch.equal(ours.float().isnan(), ~number)
        assert torch.equal(ours.float()[number], wanted.float()[number])
    for tokens, gating in ((9, "merged"), (1, "separate"), (0, "merged")):
        encoding = encoding_of(rounding)
        case = SMALL.with_(tokens=tokens, gating=gating, separate=gating == "separate")
        args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
        rows, named = rounded_before(args, options)
        with torch.no_grad(), interpreted(provide(), OPS) as ran:
            found = torch.ops.moefuse.experts_extended(*rows, **named)
            wanted = torch.ops.moefuse.experts_extended(*args, **options)
        assert set(ran) == {"experts_extended"}
        assert torch.equal(found, wanted)
