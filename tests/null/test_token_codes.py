"""Quantised activations: the definition says the numbers that a loop over single inputs says, and NaN and zeros stay where they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from moefuse.ops.meaning.token_codes import CODES, OF_ROWS, Rounding, as_rounded, next_power, packed, quantise

E4M3 = sorted({float(c) for c in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() if c.isfinite()})


def f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())


def _nearest(value: float, element: str) -> float:
    """The code nearest to a number; of two, the one whose last bit is zero."""
    if element == "s8":
        return float(round(value))  # Python rounds halves to even, too
    near = sorted(E4M3, key=lambda code: (abs(code - value), torch.tensor(code).to(torch.float8_e4m3fn).view(torch.uint8).item() & 1))
    return near[0]


def _by_loops(how: Rounding, row: list[float]) -> list[float]:
    limit, group, out = CODES[how.element][1], how.group or len(row), []
    for at in range(0, len(row), group):
        part = row[at : at + group]
        scale = f32(max(map(abs, part)) / limit)
        divisor = max(scale, f32(how.least))
        if how.power:
            scale = divisor = 2.0 ** math.ceil(math.log2(divisor))
        out += [f32(_nearest(f32(value / divisor), how.element) * scale) for value in part]
    return out


@given(st.sampled_from([*CODES]), st.sampled_from([0, 4, 8]), st.booleans(), st.integers(0, 1 << 30), st.sampled_from([-40, -3, 0, 20]))
def test_the_definition_is_a_loop_over_inputs(element: str, group: int, power: bool, seed: int, exponent: int) -> None:
    """Every element, group and kind of scale, for tokens that are tiny (below the least divisor), and huge."""
    how = Rounding(element, group, power)
    x = (torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent).bfloat16()
    assert as_rounded(how, x).tolist() == [_by_loops(how, row) for row in x.tolist()]


@pytest.mark.parametrize("element", [*CODES])
@pytest.mark.parametrize("power", [False, True])
def test_largest_code_and_ties(element: str, power: bool) -> None:
    """Of both signs; the largest input has the largest code where scales are numbers. Halves go to the even code."""
    dtype, limit = CODES[element]
    x = torch.tensor([[limit, -limit, 2.5, -3.5, 0.0]])
    codes, scales = quantise(Rounding(element, power=power), x)
    assert codes.dtype == dtype
    assert scales.tolist() == [[1.0]]
    middle = [2.0, -4.0] if element == "s8" else [2.5, -3.5]
    assert codes.float().tolist() == [[limit, -limit, *middle, 0.0]]


def test_e4m3_ties_to_even() -> None:
    """Between 16 and 18 codes are two apart."""
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0]])
    assert as_rounded(Rounding(), x).tolist() == [[448.0, 16.0, 20.0, -16.0]]


@pytest.mark.parametrize("element", [*CODES])
@pytest.mark.parametrize("power", [False, True])
def test_a_token_of_zeros(element: str, power: bool) -> None:
    """Zeros, whatever the scale; NaN only where the program divides zero by zero (and a code that is no number can say so)."""
    x = torch.zeros(2, 8)
    x[1, :4] = 3
    for group in (0, 4):
        rounded = as_rounded(Rounding(element, group, power), x)
        assert rounded[0].tolist() == [0.0] * 8
        assert rounded[1, 4:].tolist() == [0.0] * 4
    if element == "e4m3":
        assert as_rounded(Rounding(element, 0, power, least=0.0), x)[0].isnan().all()


@pytest.mark.parametrize("element", [*CODES])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(element: str, power: bool, value: float) -> None:
    """What is no number makes none of its own group of its own token only, so that what a projection gives for that token is none."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    clean = as_rounded(Rounding(element, 4, power), x)
    x[1, 2] = value
    rounded = as_rounded(Rounding(element, 4, power), x)
    assert rounded[1, 2].isnan()
    others = torch.ones(3, 8, dtype=torch.bool)
    others[1, :4] = False
    assert torch.equal(rounded[others], clean[others])


def test_powers() -> None:
    """The next one that is not below: a power of two stays, and what is just above it does not."""
    x = torch.tensor([1.0, 1.0 + 2**-23, 1.5, 2.0, 2.0**-126, 3e38, 0.0])
    assert next_power(x).tolist() == [1.0, 2.0, 2.0, 2.0, 2.0**-126, math.inf, 0.0]


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 3, 8)])
def test_shapes(group: int, shape: tuple[int, ...]) -> None:
    """No token, no inputs, several dimensions."""
    codes, scales = quantise(Rounding(group=group), torch.ones(shape))
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], shape[-1] // group if group else 1)
    assert as_rounded(Rounding(group=group), torch.ones(shape)).shape == shape


def test_of_a_token_alone() -> None:
    """A token has the same codes in every batch: bit by bit, in every dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x: Tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        whole = as_rounded(Rounding(group=16), x)
        assert all(torch.equal(whole[i : i + 1], as_rounded(Rounding(group=16), x[i : i + 1])) for i in range(0, 64, 7))


@given(
    st.sampled_from([*CODES]), st.sampled_from([0, 16, 32, 128]), st.booleans(), st.sampled_from([*OF_ROWS]), st.integers(0, 3),
    st.integers(1, 3), st.sampled_from([1e-30, 1e-12, 1.0, 1e30, math.inf, math.nan]), st.integers(0, 1 << 30),
)  # fmt: skip
def test_rows_that_come_rounded(
    element: str, group: int, power: bool, dtype: str, rows: int, groups: int, size: float, seed: int
) -> None:  # fmt: skip
    """All bits of what is multiplied: also of rows of nobody's numbers, tiny ones, none, and where they are part of other memory."""
    how = Rounding(element, group, power)
    inputs = groups * (group or 48)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).double()
    x[:1] *= size
    x = x.to(OF_ROWS[dtype])
    came, sent = replace(how, came=dtype), packed(how, x)
    assert Rounding.parse(str(came)) == came
    assert sent.dtype == torch.uint8
    assert sent.shape == (rows, how.width(inputs))
    assert came.inputs(sent.shape[1]) == inputs
    wanted = as_rounded(how, x)
    for rows_given in (sent, torch.cat([sent[:, :3], sent], 1)[:, 3:], sent.t().contiguous().t()):
        torch.testing.assert_close(as_rounded(came, rows_given), wanted, rtol=0, atol=0, equal_nan=True)


def test_what_comes_rounded_is_said_in_words() -> None:
    """A dtype that rows cannot have had; and sizes at which rows of codes and scales would not begin at whole 16 bytes."""
    with pytest.raises(ValueError, match="no rounding of activations: 'e4m3/0/number/1e-12/int8'"):
        Rounding.parse("e4m3/0/number/1e-12/int8")
    assert [Rounding(group=group).packs(inputs) for group, inputs in ((0, 48), (0, 40), (16, 48), (16, 40), (8, 48), (32, 48))] == [
        True, False, True, False, False, False,
    ]  # fmt: skip
