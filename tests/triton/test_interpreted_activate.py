"""The activation of an expert that every token takes, in the interpreter: every one, with strides of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning import activations
from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.call import Body
from moefuse.ops.meaning.reference import accumulation_dtype

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning")


def halves(h: Tensor) -> tuple[Tensor, Tensor]:
    return h.chunk(2, -1)  # type: ignore[return-value]


def interleaved(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[:, 0::2], h[:, 1::2]


@quiet
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("split", "dtype"), [(halves, torch.float32), (interleaved, torch.float16)])
def test_activations(activation: str, split: object, dtype: torch.dtype) -> None:
    """As close as one rounding (the interpreter truncates to bfloat16, so not there), at sizes that are no multiple of a block."""
    from moefuse.kernels.triton.provide.activate import activate

    known = ACTIVATIONS[activation]
    args = (1.702, 1.5)[: known.num_args]
    h = torch.randn(3, 2 * 517, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = split(h)  # type: ignore[operator]
    wide = accumulation_dtype(dtype)
    for other in (up, None) if activation not in ("swiglu_oai", "silu_clamp") else (up,):
        wanted = known.forward(gate.to(wide), None if other is None else other.to(wide), args)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2.0**-11, "atol": 1e-6}
        torch.testing.assert_close(activate(gate, other, Body(activation, args)).to(wide), wanted, **tolerance)  # type: ignore[arg-type]


def test_no_tokens() -> None:
    from moefuse.kernels.triton.provide.activate import activate

    assert activate(torch.zeros(0, 4), None, Body()).shape == (0, 4)


@quiet
@pytest.mark.parametrize("limits", [True, False], ids=["limits pass", "limits stop"])
@pytest.mark.parametrize("activation", ["swiglu_oai", "silu_clamp"])
def test_gradients_at_the_limits(activation: str, limits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a value is exactly a clamp's limit, one torch passes its gradient on and another does not; the kernel does as the formula."""
    from moefuse.kernels.triton.device.structs import Halves
    from tests.triton.gated_grads_case import gated_grads_of

    monkeypatch.setattr(activations, "limits_pass", lambda: limits)
    known, values = ACTIVATIONS[activation], torch.tensor([-2.0, -1.5, -1.0, 0.0, 1.0, 1.5, 2.0, 3.0])
    gate, up = values.repeat(8), values.repeat_interleave(8)
    args = (1.702, 1.5)[-known.num_args :]
    d = torch.linspace(-1, 1, 64)
    wanted = known.backward(d, gate, up, args)
    found = gated_grads_of(d, gate, up, Halves(0, 0, 1, False, activation, *(*args, 0.0)[:2], limits))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    at_limit = (up == 1.5) & (gate.abs() < 1.5)
    assert bool((found[1][at_limit] != 0).any()) == limits
