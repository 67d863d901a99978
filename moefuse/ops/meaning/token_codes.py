"""Activations in few bits: how a projection rounds what it multiplies, and the one definition of the numbers that it then multiplies.

For each token, and each ``group`` of its inputs, with all steps in float32:

    s = max |x| / limit                       limit: the largest code, 448 of e4m3, 127 of s8
    code(k) = round(x[k] / max(s, least))     to the nearest code, of two as near to the even one; never past the largest
    x[k] becomes code(k) * s                  (``power``: s is max(s, least), then the next power of two that is not smaller)

Who has rounded the rows before says so (``came``): they are bytes then, each row's codes and behind them its scales (:func:`packed`), which
mean what they would have been rounded to. So rows that travel to their experts take half of the bytes.

So a token's codes depend on nothing but that token. A group of zeros has codes of zero if ``least`` is not, else NaN, as where a program
divides zero by zero. A group that has NaN or infinity makes NaN of all that its token gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CODES = {"e4m3": (torch.float8_e4m3fn, 448.0), "s8": (torch.int8, 127.0)}
"""Dtype and largest number of the codes."""
OF_ROWS = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""Of rows that come rounded."""
LEAST = 1e-12
ALIGN = 16
"""Codes, and codes with scales, of a row are so many bytes, or a multiple."""
POWER, NUMBER = "2^n", "number"


@dataclass(frozen=True)
class Rounding:
    """How a projection rounds its rows.

    Attributes:
        element: a key of :data:`CODES`.
        group: so many inputs of a token, neighbours, have a scale; 0: all of them.
        power: scales are powers of two.
        least: what is divided by is at least this.
        came: the dtype of the rows that have been rounded already, and come as :func:`packed` makes them; "": they have not been.
    """

    element: str = "e4m3"
    group: int = 0
    power: bool = False
    least: float = LEAST
    came: str = ""

    def __post_init__(self) -> None:
        if self.element not in CODES or self.group < 0 or not 0 <= self.least < float("inf"):
            raise ValueError(f"no rounding of activations: {self.element!r} by {self.group} inputs, at least {self.least}")

    def __str__(self) -> str:
        """For the op's schema; :meth:`parse` reads it."""
        text = f"{self.element}/{self.group}/{POWER if self.power else NUMBER}/{self.least!r}"
        return f"{text}/{self.came}" if self.came else text

    @staticmethod
    def parse(text: str) -> Rounding:
        """What :meth:`__str__` wrote.

        Raises:
            ValueError: it did not.
        """
        element, group, kind, least, *came = text.split("/")
        if kind not in (POWER, NUMBER) or came not in ([], *([name] for name in OF_ROWS)):
            raise ValueError(f"no rounding of activations: {text!r}")
        return Rounding(element, int(group), kind == POWER, float(least), *came)

    def groups(self, inputs: int) -> int:
        """Scales of a row of so many inputs."""
        return inputs // self.group if self.group else 1

    def width(self, inputs: int) -> int:
        """Bytes of a row of so many inputs as :func:`packed` makes it."""
        return -(-(inputs + 4 * self.groups(inputs)) // ALIGN) * ALIGN

    def inputs(self, width: int) -> int:
        """Inputs of a row of so many bytes; the inverse of :meth:`width` where :meth:`packs` holds."""
        return width // (self.group + 4) * self.group if self.group else width - ALIGN

    def packs(self, inputs: int) -> bool:
        """Whether rows of so many inputs may come packed."""
        return inputs % ALIGN == 0 and (self.group % ALIGN == 0 and inputs % self.group == 0 if self.group else True)

    def describe(self) -> str:
        """For a report."""
        inputs = f" and {self.group} inputs" if self.group else ""
        return f"activations {self.element} per token{inputs}{', their scales 2^n' if self.power else ''}"


def quantise(activation: Rounding, x: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: codes [..., K], float8 or int8, and scales [..., K / group], float32, of rows x [..., K].

    K is a multiple of ``group``; for a group of 0 there is one scale. Rows that came packed are taken apart.
    """
    if activation.came:
        return unpacked(activation, x)
    if not x.shape[-1]:
        empty = x.new_zeros((*x.shape[:-1], 0 if activation.group else 1), dtype=torch.float32)
        return x.to(CODES[activation.element][0]), empty
    ratios, scales = _ratios(activation, x)
    return _nearest(activation, ratios.flatten(-2)), scales


def packed(activation: Rounding, x: Tensor) -> Tensor:
    """Bytes [.., :meth:`Rounding.width`] of rows x [.., K]: codes, then scales as float32 in the machine's order, then zeros."""
    codes, scales = quantise(activation, x)
    out = x.new_zeros((*x.shape[:-1], activation.width(x.shape[-1])), dtype=torch.uint8)
    for to, what in zip(parts(activation, out), (codes.view(torch.uint8), scales), strict=True):
        to.copy_(what)
    return out


def parts(activation: Rounding, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what :func:`packed` made: codes [.., K], bytes, and scales [.., K / group], float32; each row begins at whole 4 bytes."""
    inputs = activation.inputs(rows.shape[-1])
    return rows[..., :inputs], rows[..., inputs : inputs + 4 * activation.groups(inputs)].view(torch.float32)


def unpacked(activation: Rounding, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [.., K] and scales [.., K / group]: of what :func:`packed` made, as views where rows are contiguous."""
    if rows.stride(-1) != 1 or rows.storage_offset() % 4 or any(step % 4 for step in rows.stride()[:-1]):
        rows = rows.clone(memory_format=torch.contiguous_format)
    codes, scales = parts(activation, rows)
    return codes.view(CODES[activation.element][0]), scales


def _ratios(activation: Rounding, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows by what they are divided by, [..., K / group, group], and scales [..., K / group]."""
    inputs, limit = x.shape[-1], CODES[activation.element][1]
    group = activation.group or inputs
    parts = x.float().unflatten(-1, (inputs // group, group))
    largest = parts.abs().amax(-1)
    scales = largest / largest.new_full((), limit)  # by a number, devices would multiply with its inverse
    divisor = scales.clamp(min=activation.least)
    if activation.power:
        scales = divisor = next_power(divisor)
    return parts / divisor.unsqueeze(-1), scales


def _nearest(activation: Rounding, ratios: Tensor) -> Tensor:
    """The codes nearest to ratios."""
    dtype, limit = CODES[activation.element]
    ratios = ratios.clamp(-limit, limit)
    return ratios.to(dtype) if dtype.is_floating_point else ratios.round().nan_to_num(nan=0.0).to(dtype)


def next_power(x: Tensor) -> Tensor:
    """The least power of two that is not below x (0, or positive and normal), float32; what is not finite stays."""
    return torch.where(x.isfinite(), ((x.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32), x)


def as_rounded(activation: Rounding, x: Tensor) -> Tensor:
    """What is multiplied in place of rows x [..., K]: each code times its scale, float32."""
    codes, scales = quantise(activation, x)
    if not codes.shape[-1]:
        return codes.float()
    rounded: Tensor = codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
    return rounded.flatten(-2)


def unsure(activation: Rounding, x: Tensor, by: float) -> Tensor:
    """How far another code of rows x [..., K] is away that one gets whose numbers, or divisions, are ``by`` of their size off, and of the
    size of what has a scale with them, as sums are; float32.

    Zero nearly everywhere: where that moves no number past the middle between two codes.
    """
    if not x.shape[-1]:
        return x.float()
    ratios, scales = _ratios(activation, x)
    off = by * (ratios.abs() + ratios.square().mean(-1, keepdim=True).sqrt())
    apart = _nearest(activation, ratios + off).float() - _nearest(activation, ratios - off).float()
    found: Tensor = apart.abs() * scales.unsqueeze(-1)
    return found.flatten(-2)


__all__ = ["CODES", "LEAST", "Rounding", "as_rounded", "next_power", "packed", "parts", "quantise", "unpacked", "unsure"]
