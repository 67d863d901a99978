"""``moefuse::experts_extended`` with activations in few bits, on the CPU: against what it means in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.encoding import EXPONENTS, Encoding, Rounding, dequantise, parse
from moefuse.ops.meaning.grad_calls import GradCall, Needs
from moefuse.ops.meaning.reference import split_gate
from moefuse.ops.meaning.token_codes import as_rounded
from moefuse.runtime import backward
from tests.cpu.coded_case import coded, rounded_before
from tests.cpu.ops_case import Case

BF16 = torch.bfloat16
SMALL = Case(tokens=9, hidden=32, inter=32, hidden_out=32, experts=5, top_k=2, dtype=BF16, low_id=-1)
ENCODINGS = {
    "blocks": Encoding("e4m3", (4, 8), activation=Rounding("e4m3", 8)),
    "powers": Encoding("e4m3", (4, 8), scale=EXPONENTS, activation=Rounding("e4m3", 16, power=True)),
    "tensor": Encoding("e4m3", (0, 0), activation=Rounding("e4m3")),
    "channels": Encoding("s8", (1, 0), activation=Rounding("s8")),
    "smaller groups": Encoding("e4m3", (4, 16), activation=Rounding("e4m3", 4)),
}


def run_coded(args: list[Any], options: dict[str, Any]) -> Tensor:
    out: Tensor = torch.ops.moefuse.experts_extended(*args, **options)
    return out


def truth(args: list[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(the result in float64, how far one may be from it): one token after another, with the roundings to the dtype of x in between.

    The second number is what it costs that a sum in float32 rounds to another number of that dtype, which may have another code.
    """
    x, ids, weights, w_in, _, w_out, b_in, _, b_out, *_, codes = args
    experts = w_in[0].shape[0]
    encodings = [parse(text) for text in options["encodings"] if text]
    first, last = (
        dequantise(encoding, w[0], scale, None, torch.float64) for encoding, w, scale in zip(encodings, (w_in, w_out), codes, strict=True)
    )
    out = torch.zeros(x.shape[0], last.shape[1], dtype=torch.float64)
    loose = torch.zeros_like(out)
    eps = torch.finfo(x.dtype).eps
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < experts:
                continue
            h = (as_rounded(encodings[0].activation, x[t]).double() @ first[e].t() + b_in[0][e].double()).to(x.dtype)
            gate, up = split_gate(h[None], options["gating"], options["up_first"])
            act = ACTIVATIONS[options["activation"]].forward(gate.float(), None if up is None else up.float(), options["activation_args"])
            a = as_rounded(encodings[1].activation, act.to(x.dtype)).double()[0]
            out[t] += weights[t, k].double() * (a @ last[e].t() + b_out[0][e].double())
            step = 2**-3 if encodings[1].activation.element == "e4m3" else 2**-6
            loose[t] += weights[t, k].double().abs() * ((step * a.abs()).max() * last[e].abs().amax(1) + eps * (a @ last[e].t()).abs())
    return out, loose


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ENCODINGS)
def test_what_it_means(name: str) -> None:
    """Nearly all numbers within roundings of the result; the few whose codes flip between two as near within one code's step."""
    encoding = ENCODINGS[name]
    args, _, options = coded(SMALL.with_(tokens=64), encoding, None, encoding)
    found, (exact, loose) = run_coded(args, options).double(), truth(args, options)
    error = (found - exact).abs()
    tight = 2**-7 * exact.abs() + 2**-8 * exact.abs().mean()
    assert (error <= tight).double().mean() > 0.97
    assert (error <= tight + 2 * loose).all()
    plain, _, more = coded(SMALL.with_(tokens=64), replace(encoding, activation=None), None, replace(encoding, activation=None))
    unrounded = (run_coded(plain, more).double() - exact).norm() / exact.norm()
    assert unrounded > 4 * error.norm() / exact.norm(), "the test would not see whether activations are rounded at all"


def exact_case(tokens: int) -> tuple[list[Any], dict[str, Any]]:
    """Tokens, weights and scales so coarse that every sum is exact in float32, whatever its order."""
    encoding = ENCODINGS["powers"]
    args, _, options = coded(SMALL.with_(tokens=tokens, bias=False, gating="plain", activation="relu2"), encoding, None, encoding)
    for i in (3, 5):
        args[i] = [args[i][0].float().sign().to(torch.float8_e4m3fn)]
    args[-1] = [torch.full_like(s, 125) for s in args[-1]]
    return args, options


def test_independent_of_the_batch() -> None:
    """A token's result is the same bits alone and among others: its scales are its own."""
    args, options = exact_case(40)
    whole = run_coded(args, options)
    for t in (0, 7, 39):
        assert torch.equal(whole[t : t + 1], run_coded([a[t : t + 1] if i < 3 else a for i, a in enumerate(args)], options))
    args[0][5] *= 1000
    other = run_coded(args, options)
    assert torch.equal(whole[torch.arange(40) != 5], other[torch.arange(40) != 5])


@pytest.mark.parametrize("name", ["blocks", "channels"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_stays_in_its_token(name: str, value: float) -> None:
    """NaN in one token; all others are as without it, and a token of zeros is what the biases make of it."""
    encoding = ENCODINGS[name]
    args, _, options = coded(SMALL.with_(low_id=0, high_id=5), encoding, None, encoding)
    before = run_coded(args, options)
    args[0][3, 1] = value
    after = run_coded(args, options)
    rest = torch.arange(9) != 3
    assert after[3].isnan().all()
    torch.testing.assert_close(after[rest], before[rest], rtol=0.1, atol=0.02)
    args[0][3] = 0
    assert run_coded(args, options)[3].isfinite().all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_sizes_and_dtypes(tokens: int, dtype: torch.dtype) -> None:
    """No token, one, many; in float64 the result is the truth itself."""
    encoding = ENCODINGS["blocks"]
    args, _, options = coded(SMALL.with_(tokens=tokens, dtype=dtype), encoding, None, encoding)
    out = run_coded(args, options)
    assert (out.shape, out.dtype) == ((tokens, 32), dtype)
    if dtype == torch.float64 and tokens == 1:
        torch.testing.assert_close(out, truth(args, options)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
def test_one_projection_rounds(gating: str) -> None:
    """Projections differ in whether they round: what comes before the one that does has the same bits as without, and it has not."""
    case = SMALL.with_(gating=gating, activation="relu2" if gating == "plain" else "silu", dtype=torch.float32)
    encoding = ENCODINGS["blocks"]
    plain = replace(encoding, activation=None)
    kept = []
    for last in (encoding, plain):
        args, _, options = coded(case, plain, plain if gating == "separate" else None, last)
        call = ExpertsCall.of_extended(*args, **options)
        kept.append(torch.ops.moefuse.experts_extended_forward(*call.pack_extended()))
    assert torch.equal(kept[0][1], kept[1][1])
    assert not torch.equal(kept[0][0], kept[1][0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["blocks", "channels"])
@pytest.mark.parametrize("on_input", [False, True])
def test_gradients(name: str, on_input: bool) -> None:
    """Of tokens, and of routing weights on them: bit for bit those of experts that round nothing, at the h that forward has kept.

    Those of routing weights on the output are of the y that forward had, and so others.
    """
    case = SMALL.with_(weight_on_input=on_input, dtype=torch.float32)
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, None, encoding)
    leaves = [args[i].requires_grad_() for i in (0, 2)]
    pull = torch.randn(9, 32, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(run_coded(args, options), leaves, pull)
    with torch.no_grad():
        _, h, order, offsets, _ = torch.ops.moefuse.experts_extended_forward(*ExpertsCall.of_extended(*args, **options).pack_extended())
        base = ExpertsCall.of(*dense, **case.options)
        need = Needs.of([True, True, *[False] * 6], on_input)
        stacks = base.w_in, base.w_up, base.w_out
        expected = backward.experts_backward(GradCall(pull, base.x, base.weights, h, order, offsets, *stacks, need, base.body))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1]) is on_input


def of_scaling(run: Any, args: list[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """([T] sums over slots of a routing weight times its gradient, [T] the result times its gradient): equal, whatever experts compute.

    The result is a sum of routing weights times what does not depend on them.
    """
    weights = args[2].detach().requires_grad_()
    out = run([*args[:2], weights, *args[3:]], options)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    (grad,) = torch.autograd.grad(out, weights, pull)
    return (weights * grad).sum(-1).detach().double(), (out * pull).sum(-1).detach().double()


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("which", ["both", "first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
def test_gradient_of_routing_weights(name: str, which: str, dtype: torch.dtype) -> None:
    """Of the y that a program multiplies with them, whose second projection has rounded activations: no step of a code is in between."""
    encoding = ENCODINGS[name]
    first, last = (encoding if which in ("both", one) else replace(encoding, activation=None) for one in ("first", "last"))
    args, _, options = coded(SMALL.with_(dtype=dtype), first, None, last)
    found, wanted = of_scaling(run_coded, args, options)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-6, BF16: 2e-2}[dtype]
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("tokens", [0, 1])
def test_gradient_of_few_routing_weights(tokens: int) -> None:
    """No token, one; an activation that is not finite makes a gradient NaN, as y is."""
    encoding = ENCODINGS["blocks"]
    args, _, options = coded(SMALL.with_(tokens=tokens, dtype=torch.float32, low_id=0, high_id=5), encoding, None, encoding)
    found, wanted = of_scaling(run_coded, args, options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    args[0].fill_(float("inf"))
    assert all(part.isnan().all() for part in of_scaling(run_coded, args, options))


@pytest.mark.parametrize("group", [5, 64])
def test_groups_divide_the_inputs(group: int) -> None:
    """A group across two tokens has no meaning."""
    encoding = replace(ENCODINGS["blocks"], activation=Rounding("e4m3", group))
    args, _, options = coded(SMALL, encoding, None, encoding)
    with pytest.raises(ValueError, match=rf"`w_in` has 32 input features; legal: a multiple of {group}, the inputs that share"):
        run_coded(args, options)


def test_opcheck_and_compile() -> None:
    """Schema, fake and autograd agree, and Inductor takes the op as it is, with tokens whose number varies."""
    encoding = replace(ENCODINGS["channels"])
    args, _, options = coded(SMALL, encoding, None, encoding)
    torch.library.opcheck(torch.ops.moefuse.experts_extended.default, tuple(args), options)
    compiled = torch.compile(lambda x, ids, weights: run_coded([x, ids, weights, *args[3:]], options), dynamic=True, fullgraph=True)
    for tokens in (9, 4):
        x, ids, weights = (t[:tokens].clone() for t in args[:3])
        assert torch.equal(compiled(x, ids, weights), run_coded([x, ids, weights, *args[3:]], options))


def test_autocast_does_not_reach_the_sums() -> None:
    """The op computes in float32 where it says so, whatever is around a call."""
    encoding = ENCODINGS["blocks"]
    args, _, options = coded(SMALL, encoding, None, encoding)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run_coded(args, options)
    assert torch.equal(inside, run_coded(args, options))


PACKED = {
    "groups": Encoding("e4m3", (16, 16), activation=Rounding("e4m3", 16)),
    "powers": Encoding("e4m3", (16, 32), scale=EXPONENTS, activation=Rounding("e4m3", 16, power=True)),
    "tensor": Encoding("e4m3", (0, 0), activation=Rounding("e4m3")),
    "channels": Encoding("s8", (1, 0), activation=Rounding("s8")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("gating", ["merged", "separate", "plain"])
@pytest.mark.parametrize("name", PACKED)
def test_tokens_that_come_rounded(name: str, gating: str, dtype: torch.dtype, tokens: int) -> None:
    """All bits of what the experts make of the tokens themselves, by the op and by what it means; results in other dtypes too."""
    encoding = PACKED[name]
    case = SMALL.with_(tokens=tokens, dtype=dtype, gating=gating, activation="silu" if gating != "plain" else "relu")
    args, _, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    for out_dtype in (None, torch.float64):
        rows, named = rounded_before(args, options)
        named, options = ({**of, "out_dtype": out_dtype} for of in (named, options))
        with torch.no_grad():
            assert torch.equal(run_coded(rows, named), run_coded(args, options))
        assert torch.equal(ExpertsCall.of_extended(*rows, **named).reference(), ExpertsCall.of_extended(*args, **options).reference())


def test_what_does_not_take_rounded_tokens() -> None:
    """Each in its words: gradients, weights on tokens, other bytes, one of two projections, tokens as they were."""
    encoding = PACKED["groups"]
    args, _, options = coded(SMALL.with_(gating="separate"), encoding, encoding, encoding)
    rows, named = rounded_before(args, options)
    with pytest.raises(RuntimeError, match="has no gradients where tokens come rounded"):
        run_coded([*rows[:2], rows[2].requires_grad_(), *rows[3:]], named)
    rows[2].requires_grad_(False)
    with pytest.raises(ValueError, match="legal: tokens that are not, where weights or low-rank terms multiply them"):
        run_coded(rows, named | {"weight_on_input": True})
    with pytest.raises(ValueError, match=r"argument `x` .*legal: \[T, 48\], codes and scales of 32 inputs"):
        run_coded([rows[0][:, :40], *rows[1:]], named)
    with pytest.raises(ValueError, match="legal: that w_in and w_up do, rounded alike"):
        run_coded(rows, named | {"encodings": [named["encodings"][0], options["encodings"][1], named["encodings"][2]]})
    with pytest.raises(TypeError, match="argument `x` has dtype bfloat16; legal: uint8, for `encodings` say that tokens come rounded"):
        run_coded(args, named)
    with pytest.raises(ValueError, match="legal: numbers in floating point"):
        torch.ops.moefuse.row_codes(args[0][:, :20], "e4m3/16/number/1e-12")
    with pytest.raises(RuntimeError, match="moefuse::row_codes rounds, and has no gradient"):
        torch.ops.moefuse.row_codes(args[0].requires_grad_(), "e4m3/16/number/1e-12")
