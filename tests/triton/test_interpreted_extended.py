"""Low-rank terms beside weights in few bits by the Triton kernels, interpreted: values and all gradients are the portable provider's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.token_codes import Rounding
from tests.cpu.test_ops_extended import SMALL, arguments, leaves
from tests.triton.interpreted_case import interpreted
from tests.triton.test_interpreted_coded import ENCODINGS, OPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]
CASE = SMALL.with_(dtype=torch.float32)


@pytest.fixture
def kernels() -> Any:
    from moefuse.kernels.triton.provide import extended

    return lambda: interpreted(extended, OPS)


def drawn(*given: Any, **named: Any) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """As of ``arguments``, with factors in float32."""
    args, dense, options = arguments(*given, **named)
    return [[t.float() if t.dtype == torch.float64 else t for t in a] if isinstance(a, list) else a for a in args], dense, options


def results(args: list[Any], options: dict[str, Any], **more: Any) -> list[Tensor]:
    """The output and the gradients of all that may have one."""
    given = leaves(args)
    out = torch.ops.moefuse.experts_extended(*args, **options, **more)
    pull = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, given, pull)]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("on_input", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
def test_values_and_gradients(gating: str, on_input: bool, recompute: bool, kernels: Any) -> None:
    """Projections in other encodings, and of "plain" one in floating point: each has its term, and slots of nobody have none."""
    case = CASE.with_(gating=gating, activation="relu2" if gating == "plain" else "silu", weight_on_input=on_input, separate=recompute)
    first, up = ENCODINGS["fp8 blocks"], ENCODINGS["nibbles, zeros"] if gating == "separate" else None
    args, _, options = drawn(case, first, up, None if gating == "plain" else ENCODINGS["int8 channels"], rank=5)
    with kernels() as ran:
        found = results(args, options, recompute=recompute)
        with torch.no_grad():
            torch.testing.assert_close(torch.ops.moefuse.experts_extended(*args, **options), found[0], rtol=1e-5, atol=1e-5)
    assert {"experts_extended", *OPS[1:]} <= set(ran)
    same(found, results(args, options, recompute=recompute))


@pytest.mark.parametrize("where", [(0, 2), (0,), (2,)], ids=str)
def test_rounded_rows(where: tuple[int, ...], kernels: Any) -> None:
    """Some projections round the rows that they multiply. Terms read them as they are; routing weights have the gradient of both."""
    encodings = [replace(ENCODINGS["fp8 blocks"], block=(4, 16), activation=Rounding("e4m3", 16) if i in where else None) for i in range(3)]
    args, _, options = drawn(CASE, encodings[0], None, encodings[2])
    with kernels():
        found = results(args, options)
    same(found, results(args, options))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_of_zero(scale: float, kernels: Any) -> None:
    """Of the last term, by which the share of routing weights is divided."""
    encoding = replace(ENCODINGS["fp8 blocks"], block=(4, 16), activation=Rounding("e4m3", 16))
    args, _, options = drawn(CASE, encoding, None, encoding)
    options["scales"] = [1.0, 0.0, scale]
    with kernels():
        found = results(args, options)
    same(found, results(args, options))


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_sizes(tokens: int, kernels: Any) -> None:
    """No token, one, and tiles of several."""
    args, _, options = drawn(CASE.with_(tokens=tokens), ENCODINGS["nibbles"], None, ENCODINGS["int8 channels"])
    with kernels():
        found = results(args, options)
    same(found, results(args, options))


def test_doctor_prints_the_tables() -> None:
    """In the order in which kernels are asked; the last takes every call, so that there is always one."""
    from moefuse.cli import doctor
    from moefuse.kernels.triton.provide import choice, coded_products, extended

    found = [*doctor._kernels()]
    assert [f.text for f in found] == [*choice.lines(extended.KERNELS), *choice.lines(coded_products.KERNELS)]
    assert found[3].text == "words, rows rounded: up to 5 rows of an expert"
    for module in (extended, coded_products):
        *_, last = module.KERNELS
        assert (last.rows, last.refusal(None)) == ((0, choice.REST), None)


def test_choice_says_why_not(kernels: Any) -> None:
    """Each kernel's answer for a call: its reason, or the rows for which it is the best."""
    from moefuse.kernels.triton.provide import choice, extended
    from moefuse.ops.meaning.call import ExpertsCall

    args, _, options = drawn(CASE, ENCODINGS["nibbles"], None, ENCODINGS["int8 channels"])
    answers = choice.answers(extended.KERNELS, 3.6, ExpertsCall.of_extended(*args, **options))
    assert answers["vectors and low-rank terms"] == "weights are held in few bits"
    assert answers["rows rounded, specialised warps"] == "for 8 to inf rows of an expert"
    assert answers["a product for each projection"] is None
    assert "low-rank term" in str(answers["words, other codes"])
