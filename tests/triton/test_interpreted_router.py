"""The router's Triton kernel at tiny sizes in Triton's interpreter: bit for bit what the op's definition gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from moefuse.ops.meaning.recipe import SCORES, Recipe, route_reference
from moefuse.ops.meaning.reference import topk_reference
from tests.triton.interpreted_case import interpreted

pytestmark = pytest.mark.usefixtures("ran")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-41, -1e-41, 3e-8, 65504.0, -65504.0, float("inf"), -float("inf"), float("nan"), -float("nan")]
"""Both zeros, numbers that are not normal in some dtype, the ends of each, and NaN of either sign."""


@pytest.fixture
def ran() -> Iterator[list[str]]:
    from moefuse.kernels.triton.provide import router as router_plan

    with interpreted(router_plan, ("topk", "route")) as names:
        yield names


def assert_equal(scores: Tensor, k: int) -> None:
    """Ids are equal, values to the bit."""
    values, ids = torch.ops.moefuse.topk(scores, k)
    want_values, want_ids = topk_reference(scores, k)
    assert torch.equal(ids, want_ids)
    assert values.dtype == scores.dtype
    assert values.is_contiguous()
    kind = INTEGERS[scores.dtype]
    assert torch.equal(values.view(kind), want_values.view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(1, 5), experts=st.integers(1, 20), k=st.integers(1, 20), few=st.booleans(), seed=st.integers(0, 1 << 30))
def test_any_scores(dtype: torch.dtype, tokens: int, experts: int, k: int, few: bool, seed: int) -> None:
    """Any bits at all; or few values, so that most are equal to others."""
    source = torch.Generator().manual_seed(seed)
    if few:
        scores = torch.tensor(SPECIAL).to(dtype)[torch.randint(len(SPECIAL), (tokens, experts), generator=source)]
    else:
        bits = torch.iinfo(INTEGERS[dtype])
        scores = torch.randint(bits.min, bits.max, (tokens, experts), generator=source).to(INTEGERS[dtype]).view(dtype)
    assert_equal(scores, min(k, experts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [
        pytest.param(0, 8, 2, id="no-tokens"),
        pytest.param(3, 8, 0, id="none-chosen"),
        pytest.param(3, 1, 1, id="one-expert"),
        pytest.param(2, 32, 32, id="all-chosen"),
        pytest.param(9, 5, 2, id="rows-left-over"),
        pytest.param(2, 1024, 3, id="most-experts"),
        pytest.param(1, 257, 8, id="not-a-power-of-two"),
    ],
)
def test_sizes(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    assert_equal(torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)).to(dtype), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_equal(dtype: torch.dtype) -> None:
    """The lowest ids, whatever the sign of zero; each value with the sign it had."""
    zeros = torch.zeros(2, 9, dtype=dtype)
    zeros[1, ::2] = -0.0
    values, ids = torch.ops.moefuse.topk(zeros, 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.signbit(values).tolist() == [[False] * 4, [True, False, True, False]]


def test_strides_and_dimensions() -> None:
    """Rows that stand in columns, every other element, one dimension and three."""
    generator = torch.Generator().manual_seed(1)
    assert_equal(torch.randn(12, 7, generator=generator).t(), 3)
    assert_equal(torch.randn(6, 40, generator=generator)[::2, ::3], 3)
    assert_equal(torch.randn(11, generator=generator), 2)
    assert_equal(torch.randn(2, 3, 10, generator=generator), 2)
    assert_equal(torch.randn(2, 10, 3, generator=generator).transpose(1, 2), 2)
    assert_equal(torch.randn(1, 10, generator=generator).expand(4, 10), 2)


def test_gradient(ran: list[str]) -> None:
    """The gradient of each value goes to the score that it was."""
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(2), requires_grad=True)
    values, ids = torch.ops.moefuse.topk(scores, 3)
    assert ran == ["topk"]
    (got,) = torch.autograd.grad((values * torch.arange(12).view(4, 3)).sum(), scores)
    (want,) = torch.autograd.grad((scores.gather(1, ids) * torch.arange(12).view(4, 3)).sum(), scores)
    assert torch.equal(got, want)


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, int]:
    """Any recipe, with a number of experts for it."""
    groups = draw(st.sampled_from([0, 0, 1, 2, 3, 4]))
    of_each = draw(st.integers(2, 5))
    experts = max(groups, 1) * of_each
    kept = draw(st.integers(1, groups)) if groups else 0
    recipe = Recipe(
        draw(st.integers(1, of_each * max(kept, 1))),
        draw(st.sampled_from(SCORES)),
        groups,
        kept,
        draw(st.integers(1, of_each)) if groups else 0,
        lowest=draw(st.booleans()),
        by_choice=draw(st.booleans()),
        weight=draw(st.sampled_from(SCORES)),
        renormalise=draw(st.booleans()),
        eps=draw(st.sampled_from([0.0, 1e-20, 0.125])),
        least=draw(st.sampled_from([0.0, 0.5])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return recipe, experts


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recipe=recipes(), tokens=st.integers(0, 5), biased=st.booleans(), half=st.booleans(), seed=st.integers(0, 1 << 30))
def test_any_recipe(ran: list[str], recipe: tuple[Recipe, int], tokens: int, biased: bool, half: bool, seed: int) -> None:
    """Ids and weights as the op is defined. Where a sum may be near zero it is divided by, any rounding shows: positive logits there."""
    how, experts = recipe
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=source)
    bias = torch.rand(experts, generator=source) * 0.2 if biased else None
    if how.renormalise and how.score == how.weight == "identity":
        logits = logits.abs()
    dtype = torch.float16 if half else torch.float32
    weights, ids = torch.ops.moefuse.route(logits, bias, *how.arguments, dtype)
    want_weights, want_ids = route_reference(logits, bias, how, dtype)
    assert ran[-1] == "route"
    assert torch.equal(ids, want_ids)
    assert weights.dtype == dtype
    torch.testing.assert_close(weights, want_weights, rtol=max(2e-6, torch.finfo(dtype).eps), atol=1e-7)


def test_what_the_kernel_leaves_to_torch() -> None:
    from moefuse.kernels.triton.provide import router as router_plan

    meta = {"device": "meta"}
    assert router_plan.supports(torch.empty(2, 1024, **meta), 32) is None
    assert router_plan.supports(torch.empty(2, 1025, **meta), 8) == "1025 experts, the kernel takes 1024"
    assert router_plan.supports(torch.empty(2, 64, **meta), 33) == "33 experts per token, the kernel takes 32"
    assert router_plan.supports(torch.empty(2, 64, dtype=torch.float64, **meta), 8) == "no kernel for torch.float64"
