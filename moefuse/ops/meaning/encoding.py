"""Weights in few bits: what an encoding says, and the one definition of the numbers that it stands for.

A weight [N, K] of one expert (N features, K inputs) is held as codes in a *storage* tensor, with a *scale* for each block of bn features by
bk inputs, and perhaps a *zero* for each block:

    W[n, k] = (table[code(n, k)] - zero[n // bn, k // bk]) * scale[n // bn, k // bk]

or, where zeros are ``behind`` the scales, table[code] * scale - zero.

Each step is rounded to the dtype that the program computes it in (``arithmetic``), and what comes out to the dtype of the tokens, so a
weight has the bits that it has in the program. Where several codes are in one number of the storage, ``packing`` says where.

A projection may round its rows as well (``activation``, ``token_codes.py``). Then both are multiplied as float32 numbers, the weight is not
rounded to the dtype of the tokens, and the sum of products, in float32, is rounded to that once.

All tensors here are views: [N', K'] or [E, N', K'] with the features first, whatever the order in memory. N' and K' are N and K, the packed
one of them divided by the number of codes in a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse.ops.meaning.token_codes import Rounding

NAMED = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8}
"""Tables of 256 that are a dtype's: codes are numbers of the storage as they are."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
EXPONENTS = "e8m0"
"""Scales that are powers of two: a byte b stands for 2^(b - 127), 255 for NaN."""
POWERS = "2^n"
"""As :data:`EXPONENTS`, but 255 stands for 2^128, which is infinity but in float64."""
LDEXP = "ldexp"
"""As :data:`POWERS`, but no power is a number of its own: each weight is the exact product, rounded once."""
KINDS = ("", EXPONENTS, POWERS, LDEXP)
BITS = 4
"""Of a code where several are in one number."""
MADE = {
    "u4": tuple(float(i) for i in range(16)),
    "s4": (*map(float, range(8)), *map(float, range(-8, 0))),
    "u4-8": tuple(float(i - 8) for i in range(16)),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip
"""Tables of 16 that have names; nf4 are quantiles of a normal distribution in float32 (QLoRA, appendix E)."""


@dataclass(frozen=True)
class Packing:
    """Several codes of four bits in one number of the storage.

    Attributes:
        axis: 0 if neighbours along the features share a number, 1 along the inputs.
        shifts: by how many bits each code is shifted, in the order of the axis.
        halves: code j of a number is of part j of the axis (all high nibbles are the first half); otherwise they are neighbours.
    """

    axis: int
    shifts: tuple[int, ...]
    halves: bool = False

    @property
    def per(self) -> int:
        """Codes in a number."""
        return len(self.shifts)

    def words(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of numbers that hold codes of a shape [..., N, K]."""
        at = len(shape) - 2 + self.axis
        return tuple(-(-n // self.per) if i == at else n for i, n in enumerate(shape))

    def __str__(self) -> str:
        return f"{'nk'[self.axis]}{'/' if self.halves else ':'}{','.join(map(str, self.shifts))}"

    @staticmethod
    def parse(text: str) -> Packing:
        """What :meth:`__str__` wrote."""
        return Packing("nk".index(text[0]), tuple(int(shift) for shift in text[2:].split(",")), text[1] == "/")


@dataclass(frozen=True)
class Encoding:
    """How the weights of one projection are held.

    Attributes:
        table: a key of :data:`NAMED`, or sixteen numbers.
        block: (bn, bk), of one scale; 0: all of that axis.
        arithmetic: the dtype, a key of :data:`DTYPES`, of each step.
        scale: "" for scales that are numbers, or :data:`EXPONENTS`, :data:`POWERS`, :data:`LDEXP`.
        zero: whether each block has a zero.
        packing: see :class:`Packing`; None with a table of :data:`NAMED`.
        zeros: the packing of zeros that are whole numbers from 0 to 15 themselves; None where each is a number of its own.
        behind: zeros are subtracted from products with scales.
        activation: how the rows are rounded that the weight is multiplied with; None: they are not. With it, ``arithmetic`` is float32.
    """

    table: str | tuple[float, ...]
    block: tuple[int, int]
    arithmetic: str = "f32"
    scale: str = ""
    zero: bool = False
    packing: Packing | None = None
    zeros: Packing | None = None
    activation: Rounding | None = None
    behind: bool = False

    def __post_init__(self) -> None:
        named = isinstance(self.table, str)
        if named != (self.packing is None) or (named and self.table not in NAMED) or not (named or len(self.table) == 1 << BITS):
            raise ValueError(f"no encoding: table {self.table} with packing {self.packing}")
        if self.arithmetic not in DTYPES or self.scale not in KINDS or min(self.block) < 0 or bool(self.zeros) > self.zero:
            raise ValueError(f"no encoding: {self.arithmetic!r}, {self.scale!r}, blocks {self.block}")
        if self.behind and (not self.zero or self.zeros is not None or self.scale):
            raise ValueError("no encoding: zeros behind scales that are no numbers, or zeros that are packed")
        if self.activation is not None and self.arithmetic != "f32":
            raise ValueError(f"no encoding: {self.activation.describe()} times weights in {self.arithmetic!r}")

    @property
    def name(self) -> str:
        """Of the table."""
        return self.table if isinstance(self.table, str) else next((n for n, t in MADE.items() if _same(t, self.table)), "lut16")

    @property
    def parts(self) -> tuple[str, ...]:
        """What there is beside the storage, in the order of the op's lists."""
        return ("scale", "zero") if self.zero else ("scale",)

    def __str__(self) -> str:
        """For the op's schema; :func:`parse` reads it."""
        table = self.name if self.name != "lut16" else "lut16=" + ",".join(map(repr, self.table))
        zero = f"zero={self.zeros}" if self.zeros else "behind" if self.behind else "zero" if self.zero else ""
        scale = self.scale or "number"
        text = f"{table};{self.block[0]}x{self.block[1]};{self.arithmetic};{scale};{zero};{self.packing or ''}"
        return text if self.activation is None else f"{text};{self.activation}"

    def describe(self) -> str:
        """For a report."""
        bn, bk = self.block
        blocks = {(0, 0): "one scale", (1, 0): "a scale for each channel", (0, 1): "a scale for each input"}.get(self.block)
        blocks = blocks or (f"groups of {bk}" if bn == 1 else f"blocks of {bn or 'all'}x{bk or 'all'}")
        text = f"{self.name}, {blocks}{' with zeros' if self.zero else ''}{', scales 2^n' if self.scale else ''}"
        return text if self.activation is None else f"{text}, {self.activation.describe()}"

    def logical(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [..., N, K] of a weight with storage [..., N', K']."""
        if self.packing is None:
            return shape
        at = len(shape) - 2 + self.packing.axis
        return tuple(n * self.packing.per if i == at else n for i, n in enumerate(shape))

    def scales(self, n: int, k: int) -> tuple[int, int]:
        """The shape of scales and zeros of a weight [N, K]; the last block of an axis may be smaller."""
        bn, bk = self.block
        return (1 if not bn else -(-n // bn)), (1 if not bk else -(-k // bk))


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return list(map(str, one)) == list(map(str, other))


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Encoding:
    """What ``str(encoding)`` wrote.

    Raises:
        ValueError: it did not.
    """
    try:
        name, block, arithmetic, scale, zero, packing, *more = text.split(";")
        (activation,) = map(Rounding.parse, more) if more else (None,)
        bn, bk = map(int, block.split("x"))
        name, _, entries = name.partition("=")
        table = tuple(map(float, entries.split(","))) if entries else MADE.get(name, name)
        kind = "" if scale == "number" else scale
        zero, _, zeros = zero.partition("=")
        packed, packed_zeros = (Packing.parse(text) if text else None for text in (packing, zeros))
        behind = zero == "behind"
        if zero not in ("", "zero", "behind") or (zeros and behind):
            raise ValueError(zero)
        return Encoding(table, (bn, bk), arithmetic, kind, behind or zero == "zero", packed, packed_zeros, activation, behind)
    except (ValueError, IndexError) as error:
        raise ValueError(f"no encoding: {text!r}") from error


def codes_of(storage: Tensor, packing: Packing) -> Tensor:
    """The codes [..., N, K], uint8, of storage [..., N', K'] of integers."""
    axis = storage.dim() - 2 + packing.axis
    parts = [(storage >> shift & (1 << BITS) - 1).to(torch.uint8) for shift in packing.shifts]
    return torch.cat(parts, axis) if packing.halves else torch.stack(parts, axis + 1).flatten(axis, axis + 1)


def dequantise(encoding: Encoding, storage: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight [..., N, K] in ``dtype``: the definition.

    Args:
        storage: [..., N', K'].
        scale, zero: [..., N / bn, K / bk], rounded up, of packed zeros fewer; any dtype, or bytes where scales are powers of two.
    """
    wide = DTYPES[encoding.arithmetic]
    if encoding.packing is None:
        assert isinstance(encoding.table, str)
        kind = NAMED[encoding.table]
        value = (storage if storage.dtype == kind else storage.view(kind)).to(wide)
    else:
        value = _looked_up(codes_of(storage, encoding.packing), encoding.table, wide)
    if zero is not None and not encoding.behind:
        zeros = zero if encoding.zeros is None else codes_of(zero, encoding.zeros)
        value = _by_blocks(torch.sub, value, zeros.to(wide), encoding.block)
    if encoding.scale == LDEXP:
        return _by_blocks(torch.mul, value.double(), exponents(scale, torch.float64, nan=False), encoding.block).to(wide).to(dtype)
    factors = exponents(scale, wide, nan=encoding.scale == EXPONENTS) if encoding.scale else scale.to(wide)
    value = _by_blocks(torch.mul, value, factors, encoding.block)
    if zero is not None and encoding.behind:
        value = _by_blocks(torch.sub, value, zero.to(wide), encoding.block)
    return value.to(dtype)


def counts_from(table: str | tuple[float, ...]) -> float | None:
    """The first entry of a table of whole numbers in a row, so that an entry is that plus the code; None for any other, with -0.0 too."""
    if isinstance(table, str) or not float(table[0]).is_integer():
        return None
    return table[0] if _same(table, tuple(float(table[0]) + i for i in range(len(table)))) else None


def _looked_up(codes: Tensor, table: str | tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """table[codes]; without a table where its entries are numbers in a row."""
    assert not isinstance(table, str)
    first = counts_from(table)
    if first is not None:
        return codes.to(dtype) if not first else codes.to(dtype).add_(first)
    entries = torch.tensor(table, dtype=dtype, device=codes.device)
    return entries.index_select(0, codes.flatten().int()).view(codes.shape)


def exponents(scale: Tensor, dtype: torch.dtype, *, nan: bool = True) -> Tensor:
    """2^(b - 127) of bytes b; with ``nan`` NaN for 255."""
    byte = scale.view(torch.uint8).to(torch.float64)
    powers = torch.exp2(byte - 127)
    return (torch.where(byte == 255, float("nan"), powers) if nan else powers).to(dtype)


def _by_blocks(op: Callable[[Tensor, Tensor], Tensor], value: Tensor, blocks: Tensor, block: tuple[int, int]) -> Tensor:
    """op(value, the number of its block) for each element of a weight [..., N, K], given numbers [..., N / bn, K / bk]."""
    (n, k), (bn, bk) = value.shape[-2:], ((size or whole) for size, whole in zip(block, value.shape[-2:], strict=True))
    if n % bn or k % bk:
        for axis, size in ((-2, bn), (-1, bk)):
            blocks = blocks.repeat_interleave(size, axis).narrow(axis, 0, value.shape[axis])
        return op(value, blocks)
    cut = value.unflatten(-1, (k // bk, bk)).unflatten(-3, (n // bn, bn))
    return op(cut, blocks[..., :, None, :, None]).view(value.shape)


__all__ = [
    "BITS", "DTYPES", "EXPONENTS", "KINDS", "LDEXP", "MADE", "NAMED", "POWERS", "Encoding", "Packing", "Rounding", "codes_of",
    "counts_from", "dequantise", "exponents", "parse",
]  # fmt: skip
