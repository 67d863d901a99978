"""Rows times a matrix, in every spelling: what is multiplied, and which way round the matrix is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.equations import equation as equation_of


class Operands(NamedTuple):
    """Rows times a matrix [out, in] (``out_first``) or [in, out]."""

    x: Any
    weight: Any
    out_first: bool = False
    bias: Any = None


def operands(call: Call) -> Operands | None:
    """What a product of rows and a matrix reads; None for any other contraction."""
    if call.name not in READ:
        return None
    try:
        return READ[call.name](*call.args, **call.kwargs)
    except TypeError:  # a spelling of the arguments that is not known
        return None


def _of_linear(x: Any, weight: Any, bias: Any = None) -> Operands:
    return Operands(x, weight, True, bias)


def _of_matmul(x: Any, other: Any = None, *, mat2: Any = None) -> Operands:
    return Operands(x, mat2 if other is None else other)


def _of_addmm(bias: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Operands | None:
    value = tensor(bias)
    plain = beta == 1 and alpha == 1 and value is not None and value.dim() == 1
    return Operands(mat1, mat2, False, bias) if plain else None


def _of_einsum(equation: Any, *operands: Any) -> Operands | None:
    """``einsum("ti,oi->to", x, W)``, with any letters, in any order."""
    read = equation_of(equation, *operands)
    if read is None or len(read.operands) != 2:
        return None
    pairs, out = list(zip(read.labels, read.operands, strict=True)), read.out
    for (rows, x), (matrix, weight) in (pairs, pairs[::-1]):
        lead, inner, new = rows[:-1], rows[-1:], out[-1:]
        distinct = len(set(lead + inner + new)) == len(rows) + 1
        if lead and out == lead + new and distinct and matrix in (new + inner, inner + new):
            return Operands(x, weight, matrix == new + inner)
    return None


READ: dict[str, Callable[..., Operands | None]] = {
    "linear": _of_linear, "matmul": _of_matmul, "mm": _of_matmul, "addmm": _of_addmm, "einsum": _of_einsum,
}  # fmt: skip
