"""``moefuse::experts_extended`` with low-rank terms beside weights in few bits, on the CPU: against its definition, with all gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.token_codes import Rounding
from tests.cpu.coded_case import ENCODINGS, coded
from tests.cpu.ops_case import Case

SCALES = [2.0, 0.5, -1.5]
SMALL = Case(tokens=9, hidden=32, inter=32, hidden_out=24, experts=5, top_k=2, dtype=torch.float64, low_id=-1)


def arguments(case: Case, *encodings: Any, rank: int = 3) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """(arguments of the op, the same with the unpacked weights, its options): terms beside each projection."""
    args, dense, options = coded(case, *encodings)
    g = torch.Generator().manual_seed(3)
    factors: list[list[Tensor]] = []
    for w in dense[3:6]:
        shapes = ((rank, w[0].shape[-1]), (w[0].shape[-2], rank)) if w else ()
        drawn = [torch.randn(case.experts, *shape, generator=g, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]
        factors += [[*t.unbind()] if case.separate else [t] for t in drawn] if drawn else [[], []]
    options = {**options, "scales": SCALES}
    return [*args[:9], *factors, args[-1]], [*dense[:9], *factors, []], options


def leaves(args: list[Any]) -> list[Tensor]:
    """Tokens, routing weights, biases and factors."""
    return [t.requires_grad_() for t in (args[0], args[2], *(t for some in args[6:15] for t in some))]


@pytest.mark.parametrize("which", range(3))
def test_weights_beside_codes_have_gradients(which: int) -> None:
    """One projection is in floating point, and trained."""
    encodings = [None if i == which else ENCODINGS["int8 channels"] for i in range(3)]
    args, dense, options = arguments(SMALL.with_(gating="separate"), *encodings)
    given, wanted = ([*leaves(of), *(t.requires_grad_() for t in of[3 + which])] for of in (args, dense))
    out = torch.ops.moefuse.experts_extended(*args, **options)
    expected = ExpertsCall.of_extended(*dense, **{**options, "encodings": None}).reference()
    for mine, theirs in zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_rounded_rows_and_terms() -> None:
    """A projection rounds the rows that it multiplies; its term reads them as they are, and so do the gradients of its factors."""
    encoding = replace(ENCODINGS["fp8 blocks"], activation=Rounding("e4m3", 16))
    args, _, options = arguments(SMALL, encoding, None, encoding)
    call = ExpertsCall.of_extended(*args, **options)
    torch.testing.assert_close(torch.ops.moefuse.experts_extended(*args, **options), call.reference(), rtol=1e-11, atol=1e-11)
    b = args[14][0].requires_grad_()  # B of the last projection, in which the result is linear
    out = torch.ops.moefuse.experts_extended(*args, **options)
    pull = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    [found] = torch.autograd.grad(out, [b], pull)
    [wanted] = torch.autograd.grad(ExpertsCall.of_extended(*args, **options).reference(), [b], pull)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_routing_weights_of_rounded_rows_and_terms() -> None:
    """Their gradient is <gradient of the output, y>, with the y that forward had: the result is linear in them."""
    encoding = replace(ENCODINGS["fp8 blocks"], activation=Rounding("e4m3", 16))
    args, _, options = arguments(SMALL, encoding, None, encoding)
    weights = args[2].requires_grad_()
    out = torch.ops.moefuse.experts_extended(*args, **options)
    pull = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    [found] = torch.autograd.grad(out, [weights], pull)
    with torch.no_grad():
        for slot in range(SMALL.top_k):
            one = torch.zeros_like(weights)
            one[:, slot] = 1
            y = torch.ops.moefuse.experts_extended(*args[:2], one, *args[3:], **options)
            torch.testing.assert_close(found[:, slot], (pull * y).sum(1), rtol=1e-10, atol=1e-10)


def test_scales_have_to_be_there() -> None:
    args, _, options = arguments(SMALL, ENCODINGS["fp8 blocks"], None, ENCODINGS["fp8 blocks"])
    with pytest.raises(ValueError, match=r"experts_extended: argument `scales` has 0 numbers; legal: three, for w_in, w_up and w_out"):
        torch.ops.moefuse.experts_extended(*args, **{**options, "scales": []})
