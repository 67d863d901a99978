"""Encodings of weights: what they print is what is parsed, and the definition says the numbers that a loop over single weights says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from moefuse.ops.meaning.encoding import (
    DTYPES,
    EXPONENTS,
    KINDS,
    LDEXP,
    MADE,
    NAMED,
    POWERS,
    Encoding,
    Packing,
    Rounding,
    dequantise,
    exponents,
    parse,
)
from moefuse.ops.meaning.token_codes import CODES
from moefuse.passes.encodings.table import equal

WORDS = {"gptq": (0, 4, 8, 12, 16, 20, 24, 28), "awq": (0, 16, 4, 20, 8, 24, 12, 28)}
SHIFTS = st.sampled_from([(0, 4), (4, 0), *WORDS.values(), (8, 0, 12, 4)])
PACKINGS = st.builds(Packing, st.integers(0, 1), SHIFTS, st.booleans())
TABLES = st.one_of(
    st.sampled_from(list(MADE.values())), st.tuples(*[st.floats(-9, 9, width=16)] * 16).map(lambda t: tuple(float(x) for x in t))
)
BLOCKS = st.tuples(st.sampled_from([0, 1, 2, 3]), st.sampled_from([0, 1, 4, 5]))
ZEROS = st.one_of(st.just({"zero": False}), st.just({"zero": True}), PACKINGS.map(lambda p: {"zero": True, "zeros": p}))
ROUNDINGS = st.builds(
    Rounding, st.sampled_from([*CODES]), st.sampled_from([0, 1, 32, 128]), st.booleans(), st.sampled_from([0.0, 1e-12, 0.5])
)
OTHERS = {"block": BLOCKS, "arithmetic": st.sampled_from([*DTYPES]), "scale": st.sampled_from(KINDS)}
ENCODINGS = st.one_of(
    st.builds(lambda zero, **others: Encoding(**others, **zero), ZEROS, table=TABLES, packing=PACKINGS, **OTHERS),
    st.builds(lambda zero, **others: Encoding(**others, **zero), ZEROS, table=st.sampled_from([*NAMED]), **OTHERS),
    st.builds(Encoding, TABLES, BLOCKS, OTHERS["arithmetic"], zero=st.just(True), packing=PACKINGS, behind=st.just(True)),
)


@given(ENCODINGS, st.none() | ROUNDINGS)
def test_parse_reads_what_str_writes(encoding: Encoding, activation: Rounding | None) -> None:
    """An encoding is in an op's arguments as text: nothing of it may be lost on the way."""
    if encoding.arithmetic == "f32":
        encoding = replace(encoding, activation=activation)
    again = parse(str(encoding))
    assert again == encoding
    assert str(again) == str(encoding), "the sign of a zero in a table too"


NONE = "e4m3 x;1x0;f32;number;; e4m3;1;f32;number;; e4m3;1x0;f9;number;; u4;1x8;f32;number;; e4m3;1x0;f32;number;;k:0,4 e4m3;1x0;f32;2^m;;"


ROUNDED = "e5m2/0/number/0.0 e4m3/-1/number/0.0 e4m3/0/n/0.0 e4m3/0/number/-1.0 e4m3/0/number/nan e4m3/0/number e4m3/0/number/0.0;".split()


@pytest.mark.parametrize("text", [f"e4m3;1x0;f32;number;;;{text}" for text in ROUNDED] + ["e4m3;1x0;bf16;number;;;e4m3/0/number/0.0"])
def test_what_is_no_rounding_of_activations(text: str) -> None:
    """Of another element, by a negative group, with another field; and weights that are rounded before they meet the codes."""
    with pytest.raises(ValueError, match="no encoding"):
        parse(text)


@pytest.mark.parametrize("text", ["", *NONE.split(), "s8;1x0;f32;e8m0;behind;", "e4m3;-1x0;f32;number;;", "u4;1x8;f32;number;;z:0,4"])
def test_what_is_no_encoding(text: str) -> None:
    """Text that nothing wrote is told as such."""
    with pytest.raises(ValueError, match="no encoding"):
        parse(text)


def _unpacked(packing: Packing, storage: Tensor, n: int, k: int, sizes: tuple[int, int]) -> int:
    """One code, in Python's numbers."""
    at = [n, k]
    per = len(packing.shifts)
    if packing.halves:
        part, at[packing.axis] = divmod(at[packing.axis], sizes[packing.axis] // per)
    else:
        at[packing.axis], part = divmod(at[packing.axis], per)
    return int(storage[at[0], at[1]]) >> packing.shifts[part] & 15


def _code(encoding: Encoding, storage: Tensor, n: int, k: int, sizes: tuple[int, int]) -> float:
    """The value of one weight's code."""
    if isinstance(encoding.table, str) or encoding.packing is None:
        return float(storage[n, k].view(NAMED[str(encoding.table)]))
    return encoding.table[_unpacked(encoding.packing, storage, n, k, sizes)]


def _zero(encoding: Encoding, zero: Tensor, at: tuple[int, ...], sizes: tuple[int, int]) -> float:
    if encoding.zeros is None:
        return float(zero[at])
    return _unpacked(encoding.zeros, zero, at[0], at[1], encoding.scales(*sizes))


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def _power(byte: int, kind: str) -> float:
    return math.nan if byte == 255 and kind == EXPONENTS else math.ldexp(1.0, byte - 127)


def _by_loops(encoding: Encoding, storage: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The definition, one weight after another."""
    sizes = encoding.logical(tuple(storage.shape))
    wide = DTYPES[encoding.arithmetic]
    found = torch.empty(sizes, dtype=dtype)
    for n in range(sizes[0]):
        for k in range(sizes[1]):
            at = tuple(i // b if b else 0 for i, b in zip((n, k), encoding.block, strict=True))
            value = _rounded(_code(encoding, storage, n, k, (sizes[0], sizes[1])), wide)
            if zero is not None and not encoding.behind:
                value = _rounded(value - _rounded(_zero(encoding, zero, at, (sizes[0], sizes[1])), wide), wide)
            if encoding.scale:
                factor = _power(int(scale[at]), encoding.scale)
                factor = factor if encoding.scale == LDEXP else _rounded(factor, wide)
            else:
                factor = _rounded(float(scale[at]), wide)
            value = _rounded(value * factor, wide)
            if zero is not None and encoding.behind:
                value = _rounded(value - _rounded(float(zero[at]), wide), wide)
            found[n, k] = _rounded(value, dtype)
    return found


@given(
    ENCODINGS.filter(lambda e: e.arithmetic != "f64"),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(0, 1 << 30),
)
def test_the_definition_is_a_loop_over_weights(encoding: Encoding, dtype: torch.dtype, seed: int) -> None:
    """Every packing, block, zero and exponent, the last block of an axis cut: bit by bit, in every dtype of the arithmetic."""
    dice = torch.Generator().manual_seed(seed)
    n, k = 8, 16
    packing = encoding.packing
    stored = [n // packing.per if packing and packing.axis == 0 else n, k // packing.per if packing and packing.axis == 1 else k]
    kind = torch.uint8 if packing is None or packing.per == 2 else torch.int32
    storage = torch.randint(256, (*stored, kind.itemsize), dtype=torch.uint8, generator=dice).view(kind)[..., 0]
    shape = encoding.scales(n, k)
    scale = torch.randint(256, shape, dtype=torch.uint8, generator=dice) if encoding.scale else torch.randn(shape, generator=dice)
    zero = torch.randn(shape, generator=dice) * 8 if encoding.zero else None
    if encoding.zeros is not None:
        per = encoding.zeros.per
        assume(shape[encoding.zeros.axis] % per == 0)
        fewer = [n // per if axis == encoding.zeros.axis else n for axis, n in enumerate(shape)]
        zero = torch.randint(-(2**31), 2**31, fewer, dtype=torch.int32, generator=dice)
    want = _by_loops(encoding, storage, scale, zero, dtype)
    assert equal(dequantise(encoding, storage, scale, zero, dtype), want)
    stack = dequantise(encoding, storage[None], scale[None], None if zero is None else zero[None], dtype)
    assert equal(stack[0], want)


def test_a_byte_of_an_exponent() -> None:
    """255 is what the kinds of powers of two differ in; all others are exact in float32 and bfloat16, the smallest one too."""
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        found = exponents(codes, dtype)
        assert found[:255].double().tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]
        assert found[255].isnan()
        assert exponents(codes, dtype, nan=False)[255].isinf()
    bits = codes[1:255].to(torch.int32) << 23
    assert torch.equal(exponents(codes, torch.float32)[1:255], bits.view(torch.float32))
    zero = torch.zeros(1, 256 // 2, dtype=torch.uint8)
    for kind, is_nan in ((EXPONENTS, True), (POWERS, True), (LDEXP, False)):
        encoding = Encoding(MADE["e2m1"], (0, 0), "f32", kind, packing=Packing(1, (0, 4)))
        found = dequantise(encoding, zero, codes[255:][None], None, torch.float32)
        assert bool(found.isnan().all()) is is_nan


def test_the_sign_of_zero() -> None:
    """Of a table that counts, too: a weight of no size has the sign that its table says."""
    storage = torch.tensor([[0x10, 0x32]], dtype=torch.uint8)
    for start in (0, 1, 8):
        table = tuple(-0.0 if i == start else float(i - start) for i in range(16))
        encoding = Encoding(table, (0, 0), packing=Packing(1, (0, 4)))
        found = dequantise(encoding, storage, torch.ones(1, 1), None, torch.float32)
        assert equal(found, torch.tensor([table[:4]])), start


def test_words() -> None:
    """A report says in words what the text says in letters."""
    assert Encoding("e4m3", (128, 128)).describe() == "e4m3, blocks of 128x128"
    assert Encoding("s8", (1, 0)).describe() == "s8, a scale for each channel"
    assert Encoding(MADE["u4"], (1, 64), zero=True, packing=Packing(1, (0, 4))).describe() == "u4, groups of 64 with zeros"
    assert Encoding(MADE["e2m1"], (1, 32), scale=EXPONENTS, packing=Packing(1, (0, 4))).describe() == "e2m1, groups of 32, scales 2^n"
    assert Encoding(MADE["nf4"], (1, 64), packing=Packing(1, (4, 0))).describe() == "nf4, groups of 64"
    assert Encoding("e5m2", (0, 0)).describe() == "e5m2, one scale"
    by_groups = Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128))
    assert by_groups.describe() == "e4m3, blocks of 128x128, activations e4m3 per token and 128 inputs"
    whole = Encoding("s8", (1, 0), activation=Rounding("s8", power=True))
    assert whole.describe() == "s8, a scale for each channel, activations s8 per token, their scales 2^n"
    assert Encoding(tuple(map(float, range(1, 17))), (0, 0), packing=Packing(0, (4, 0), halves=True)).name == "lut16"


def test_shapes() -> None:
    """What is stored of a weight, and how many scales there are."""
    packed = Encoding(MADE["u4"], (2, 5), packing=Packing(0, WORDS["awq"]))
    assert packed.logical((3, 2, 7)) == (3, 16, 7)
    assert packed.scales(5, 11) == (3, 3)
    assert Encoding("e4m3", (0, 0)).scales(5, 11) == (1, 1)
