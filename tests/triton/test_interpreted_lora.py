"""Low-rank terms by the Triton kernels, at tiny sizes in Triton's interpreter, against weights that have the terms added, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.lora_case import SCALES, SMALL, Sizes, arguments, check, moved, ours
from tests.triton.interpreted_case import interpreted

pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.usefixtures("ran"),
]
T, E, K, H, INNER = SMALL
ALL = ("experts_extended_forward", "experts_extended_backward")


@pytest.fixture
def ran() -> Iterator[list[str]]:
    from moefuse.kernels.triton.provide import extended

    with interpreted(extended, ("experts_extended", *ALL)) as names:
        yield names


@pytest.mark.parametrize("of", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_factors_in_a_dtype_of_their_own(dtype: torch.dtype, of: torch.dtype) -> None:
    """Their gradients have it too; rows of 16 bits are multiplied in 16 bits."""
    check(arguments("merged", dtype, of), 2e-5 if dtype == torch.float32 and of != torch.float16 else 3e-3)


def test_experts_as_the_fastest_dimension() -> None:
    """B of PEFT's stacked experts: [out, r, E] in memory. Its gradient has the same strides."""
    args = arguments("merged", torch.float32, torch.float32)
    for i in (10, 14):
        args[i] = [t.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_() for t in args[i]]
    check(args, 1e-5)
    grads = torch.autograd.grad(ours(args).sum(), args[10] + args[14])
    assert [g.stride() for g in grads] == [t.stride() for t in args[10] + args[14]]


@pytest.mark.parametrize("gating", ["merged", "separate"])
def test_inference(gating: str, ran: list[str]) -> None:
    """The same bits as where gradients are wanted; nothing is kept, and no dead row is read."""
    args = arguments(gating, torch.float32, torch.float32)
    expected = ours(args, gating=gating)
    with torch.no_grad():
        found = ours(args, gating=gating)
    assert torch.equal(found, expected)
    assert ran == ["experts_extended_forward", "experts_extended"]


@pytest.mark.parametrize("flags", [{"desc": True}, {"desc": True, "rows_desc": True, "persistent": True, "store": 1}], ids=str)
def test_through_descriptors(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's tiles as a GPU takes them; the term is added to what they hold."""
    from moefuse.kernels.triton.host import linear
    from moefuse.tuning.problem import Tiles

    monkeypatch.setattr(linear, "linear_sizes", lambda *a: Tiles(16, 16, 4, 1, 2, **flags))
    monkeypatch.setattr(linear, "NARROW", 8)
    check(arguments("merged", torch.float16, torch.float32, bias=False, sizes=Sizes(hidden=32, inner=16)), 3e-3)


def test_saved_for_backward() -> None:
    """u is rows times s * A, of all terms side by side, zeros for slots of nobody."""
    from moefuse.ops.meaning.call import ExpertsCall

    args = [a.detach() if isinstance(a, Tensor) else [t.detach() for t in a] for a in arguments("merged", torch.float64, torch.float64)]
    packed = ExpertsCall.of_extended(*args, scales=SCALES).pack_extended()
    _, h, order, offsets, u = torch.ops.moefuse.experts_extended_forward(*packed)
    assert (h.shape, u.shape) == ((T * K, 2 * INNER), (T * K, 6))
    assert not u[int(offsets[-1]) :].any()
    e = int(torch.bucketize(torch.tensor(0), offsets[1:], right=True))
    expected = SCALES[0] * args[0][order[0] // K] @ args[9][0][e].t()
    torch.testing.assert_close(u[0, :3], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gating", ["merged", "separate", "plain"])
@pytest.mark.parametrize("on_input", [False, True], ids=["output", "input"])
def test_hidden_activations_once_more(gating: str, on_input: bool) -> None:
    """What a layer that keeps none computes in backward, from u as it was kept: the same bits, rows that are nobody's zero."""
    from moefuse.kernels.triton.provide import extended
    from moefuse.ops.meaning.call import ExpertsCall

    args = moved(arguments(gating, torch.float32, torch.float32))
    call = ExpertsCall.of_extended(*args, scales=SCALES, gating=gating, weight_on_input=on_input)
    _, h, order, offsets, u = extended.experts_extended_forward(call)
    again = extended.experts_extended_hidden(call, order, offsets, u)
    assert torch.equal(again, h)
    assert not again[int(offsets[-1]) :].any()


def test_scales_of_float32_factors_are_not_rounded_beside_float64() -> None:
    """A factor in float32 times a scale that float32 does not have: in the dtype of the rows. Found beside vectors, which did so."""
    from moefuse.kernels.triton.provide import extended
    from moefuse.ops.meaning.call import ExpertsCall

    call = ExpertsCall.of_extended(*moved(arguments("merged", torch.float64, torch.float32)), scales=[0.3, 0.7, -1.1])
    torch.testing.assert_close(extended.experts_extended_forward(call)[0], call.reference(), rtol=1e-13, atol=1e-13)
