"""The kernel of a router's logits in Triton's interpreter: sizes, strides and dtypes of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from tests.triton.interpreted_case import interpreted

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.usefixtures("ran"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning"),
]
DTYPES = [torch.float32, torch.float16]
"""The interpreter truncates to bfloat16."""


@pytest.fixture
def ran() -> Iterator[list[str]]:
    from moefuse.kernels.triton.provide import logits

    with interpreted(logits, ("router_logits",)) as names:
        yield names


def check(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    """Within the rounding of a float32 sum and of the result."""
    got = torch.ops.moefuse.router_logits(x, w, bias, out_dtype)
    wide = x.double() @ w.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ w.double().abs().t() + (0 if bias is None else bias.double().abs())
    assert got.dtype == out_dtype
    assert got.shape == wide.shape
    bound = 2.0**-22 * size + (torch.finfo(out_dtype).eps / 2 * wide.abs() + torch.finfo(out_dtype).smallest_normal)
    assert bool(((got.double() - wide).abs() <= bound).all())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 16), experts=st.integers(1, 9), hidden=st.integers(0, 70), bias=st.booleans(), transposed=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 4), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_any_sizes(
    tokens: int, experts: int, hidden: int, bias: bool, transposed: bool, dtypes: tuple[torch.dtype, ...], seed: int
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(hidden, experts, generator=g).t() if transposed else torch.randn(experts, hidden, generator=g)
    b = torch.randn(experts, generator=g).to(dtypes[2]) if bias else None
    check(torch.randn(tokens, hidden, generator=g).to(dtypes[0]), w.to(dtypes[1]), b, dtypes[3])


def test_inputs_in_several_blocks(ran: list[str]) -> None:
    check(torch.randn(5, 2100), torch.randn(5, 2100), None, torch.float32)
    assert ran == ["router_logits"]


def test_views() -> None:
    """Tokens of three dimensions, every second input, a bias with a stride."""
    x = torch.randn(2, 3, 80)[:, :, ::2]
    check(x, torch.randn(10, 80)[::2, ::2], torch.randn(10)[::2], torch.float32)
