"""``moefuse::grouped_linear_coded`` in Triton's interpreter: values and gradients of the portable provider, with poisoned memory."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.coded_case import hold
from tests.triton.interpreted_case import interpreted
from tests.triton.test_interpreted_coded import ENCODINGS

OPS = ("grouped_linear_coded", "grouped_linear_coded_backward")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter, about NumPy


@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles, zeros", "words of inputs", "mxfp4"])
def test_values_and_gradients(name: str) -> None:
    """An expert without rows, and rows behind the last expert, which are zeros."""
    from moefuse.kernels.triton.provide import grouped_coded

    g = torch.Generator().manual_seed(0)
    held = hold(ENCODINGS[name], 3, 32, 32, g)
    storage, codes = held.lists(separate=False)
    xs, b = torch.randn(9, 32, generator=g).requires_grad_(), torch.randn(3, 32, generator=g).requires_grad_()
    grad = torch.randn(9, 32, generator=g)
    offsets = torch.tensor([0, 4, 4, 7])
    found = []
    for names in ((), OPS):
        with interpreted(grouped_coded, names) as ran:
            out = torch.ops.moefuse.grouped_linear_coded(xs, offsets, storage, codes, [b], str(held.encoding))
            found.append((out, *torch.autograd.grad(out, (xs, b), grad)))
        assert tuple(ran) == names
    for portable, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, portable, rtol=1e-4, atol=1e-4)
