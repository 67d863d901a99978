"""One product of sorted rows with weights in few bits: by which kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, packed_specialised, rounded_specialised, token_codes
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.sorted_rows import aligned_rows
from moefuse.kernels.triton.host.token_codes import Rounded
from moefuse.kernels.triton.provide import library, packed, unpacked
from moefuse.kernels.triton.provide.choice import REST, Kernel, choose
from moefuse.kernels.triton.provide.products import Own
from moefuse.ops.meaning.encoding import Encoding


class Rows:
    """The rows that products of a call multiply, as they are or rounded; the last that were rounded are kept for the next product."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.last: tuple[Tensor, Rounded] | None = None

    def rounded(self, x: Tensor, encoding: Encoding, tokens: bool = False, scale: Tensor | None = None) -> Rounded:
        """The rows as codes."""
        if self.last is None or self.last[0] is not x or self.last[1].rounding != encoding.activation:
            rows = library.gathered(x, self.own.it, scale) if scale is not None else x
            self.last = x, token_codes.round_rows(rows, self.own.it, encoding, tokens=tokens and scale is None)
        return self.last[1]


class Product(NamedTuple):
    """out [S, N] = rows of x [S, K] times w[e]^T (+ bias[e]), or with ``back`` times w[e]; the rest as of ``linear.linear``."""

    out: Tensor
    x: Tensor
    held: Held
    rows: Rows
    bias: Sequence[Tensor] = ()
    back: bool = False
    add: bool = False
    tokens: bool = False
    scale: Tensor | None = None

    @property
    def own(self) -> Own:
        return self.rows.own

    @property
    def biases(self) -> linear.Weight | None:
        return linear.weight(self.bias, 1) if self.bias else None


def _rounds(it: Product) -> str | None:
    return None if it.held.codes.encoding.activation is not None and not it.back else "rows are not rounded"


def _rounded_specialised(it: Product) -> str | None:
    tiled = it.own.tiled
    if (reason := _rounds(it)) is not None or tiled.bm != rounded_specialised.ROWS:
        return reason or "tiles have other rows"
    if not aligned_rows(it.out):
        return "rows are not whole 16 bytes"
    return rounded_specialised.refusal(it.held, it.out.dtype, it.out.shape[1], 1, device_of(it.out.device))


def _packed_e2m1(it: Product) -> str | None:
    return _packed(it) if packed.is_e2m1(it.held) else "codes are no e2m1"


def _packed_others(it: Product) -> str | None:
    return "codes are e2m1" if packed.is_e2m1(it.held) else _packed(it)


def _packed(it: Product) -> str | None:
    if it.back or it.add or it.scale is not None or it.x.stride(1) != 1:
        return "the product is transposed, added or weighted"
    if not aligned_rows(it.out) or it.out.dtype != it.x.dtype:
        return "rows are not whole 16 bytes, or of other dtypes"
    return packed_specialised.refusal(it.held, it.x.dtype, it.out.shape[1], device_of(it.out.device))


def _unpacked(it: Product) -> str | None:
    return None if it.x.dtype in unpacked.DTYPES else "rows are not in 16 bits"


def _run_rounded(it: Product) -> None:
    rows = it.rows.rounded(it.x, it.held.codes.encoding, it.tokens, it.scale)
    token_codes.product(it.out, rows, it.held, it.own.tiled, it.biases)


def _run_rounded_specialised(it: Product) -> None:
    rows = it.rows.rounded(it.x, it.held.codes.encoding, it.tokens, it.scale)
    rounded_specialised.product(it.out, rows, (it.held, it.held), it.own.tiled, (it.biases, None))


def _run_packed(it: Product) -> None:
    packed.product(it.out, it.x, it.held, it.own.it, it.bias, tokens=it.tokens)


def _run_unpacked(it: Product) -> None:
    in_order = it.own.rows(it.x, it.tokens, it.scale)
    unpacked.product(it.out, in_order, it.held, it.own.it, it.bias, back=it.back, add=it.add)


def _run_tiles(it: Product) -> None:
    how = {"back": it.back, "add": it.add, "tokens": it.tokens}
    coded.product(it.out, it.x, it.held, it.own.tiled, bias=it.biases, scale=it.scale, **how)


KERNELS = (
    Kernel("rows rounded, specialised warps", _rounded_specialised, (8, REST), _run_rounded_specialised),
    Kernel("rows rounded, tiles", _rounds, (0, REST), _run_rounded),
    Kernel("packed weights, e2m1, specialised warps", _packed_e2m1, (7, REST), _run_packed),
    Kernel("packed weights, specialised warps", _packed_others, (4, REST), _run_packed),
    Kernel("some experts at a time, unpacked", _unpacked, (192, REST), _run_unpacked),
    Kernel("tiles", lambda _: None, (0, REST), _run_tiles),
)
"""Rows were measured on an H200 (benchmarks/results/coded-h200.json)."""


def product(it: Product) -> Tensor:
    """Make it, if there is anything to make; dead rows are not written."""
    if it.out.numel():
        choose(KERNELS, it.own.it.mean_rows, it).run(it)
    return it.out
