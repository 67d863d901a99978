"""Weight and bias lists as kernels take them: a stacked tensor and its strides, or a table of the addresses of separate Parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.device.structs import Experts
from moefuse.runtime.lasting import kept

_TABLES: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
_MAX_TABLES = 4096
"""Tables kept (8 bytes per expert each); beyond, all are dropped and made again when needed."""


STEP, STEPS, FAR = 16, 1 << 30, 1 << 13
"""Bytes, and two numbers of them, that a descriptor can go from its beginning; together the 2**47 bytes that a process can address."""


def is_apart(form: str) -> bool:
    """Whether the descriptor shows experts anywhere in memory, so that a kernel takes the table of :func:`steps_table` beside it."""
    return form.startswith("apart")


class Operand(NamedTuple):
    """How to reach expert e of one list: ``strides`` are (expert, out, in) in elements; of a bias (expert, out).

    Attributes:
        table: the kernel gets int64 addresses [E] instead of the stacked tensor.
        aligned: every expert begins at a multiple of 16 bytes.
        wide: an offset within one expert needs 64 bits.
        uniform: False if the tensors of the list differ in their strides, so they have to be stacked first.

    A named tuple, as all that is made in every call: a frozen dataclass costs the host three times as much.
    """

    strides: tuple[int, ...]
    table: bool = False
    aligned: bool = True
    wide: bool = False
    uniform: bool = True

    def form(self, item: int) -> str:
        """How a descriptor can show the operand: as one matrix, "out-in" (E * features rows) or "in-out" (E * inputs rows); as experts
        anywhere in memory, "apart out-in" or "apart in-out"; or "" (not)."""
        e, n, k = self.strides
        if not self.aligned:
            return ""
        if self.table:
            out_in, in_out = (inner == 1 < outer and outer * item % 16 == 0 for inner, outer in ((k, n), (n, k)))
            return "apart out-in" if out_in else "apart in-out" if in_out else ""
        if k == 1 and n > 1 and e % n == 0 and n * item % 16 == 0:
            return "out-in"
        return "in-out" if n == 1 and k > 1 and e % k == 0 and k * item % 16 == 0 else ""

    def rows(self, form: str) -> int:
        """Rows from one expert to the next in the matrix of a descriptor; 0 without one."""
        return self.strides[0] // self.strides[1 if form == "out-in" else 2] if form in ("out-in", "in-out") else 0

    def at(self, bias: Operand | None, form: str | None = None, first: int | None = None) -> Experts:
        """Where kernels find an expert's weights, from output ``first`` on, and its biases; ``form``: of their descriptor."""
        e, n, k = self.strides
        bias_e, bias_n = bias.strides if bias else (0, 0)
        return Experts(e, n, k, bias_e, bias_n, None if form is None else self.rows(form), first)

    def matrix(self, form: str, experts: int, features: int, inputs: int, bn: int, bk: int, item: int) -> tuple[Any, ...]:
        """(shape, strides, block) of the descriptor, in blocks of bn features and bk inputs.

        Experts that are apart are one tensor [FAR, STEPS, rows, columns] that begins with the first of them in memory, whose leading
        dimensions only add: a multiple of :data:`STEP` bytes, and one of STEPS times that.
        """
        if is_apart(form):
            far, near = STEPS * STEP // item, STEP // item
            if form == "apart out-in":
                return (FAR, STEPS, features, inputs), (far, near, self.strides[1], 1), (1, 1, bn, bk)
            return (FAR, STEPS, inputs, features), (far, near, self.strides[2], 1), (1, 1, bk, bn)
        before = self.rows(form) * (experts - 1)
        if form == "out-in":
            return (before + features, inputs), (self.strides[1], 1), (bn, bk)
        return (before + inputs, features), (self.strides[2], 1), (bk, bn)


def describe(tensors: Sequence[Tensor], dims: int, as_table: bool = False) -> Operand:
    """The operand for a list whose tensors have ``dims`` dimensions per expert (one stacked tensor has one more)."""
    first = tensors[0]
    if len(tensors) == 1:
        strides = first.stride() if first.dim() > dims else (0, *first.stride())
        step = strides[0] * first.element_size()
        aligned = (first.data_ptr() | step) % 16 == 0
        return Operand((0, *strides[1:]) if as_table else strides, as_table, aligned, _wide(first, strides[1:]))
    inner = first.stride()
    return Operand(
        (0, *inner),
        True,
        not any(t.data_ptr() % 16 for t in tensors),
        _wide(first, inner),
        all(t.stride() == inner for t in tensors),
    )


def _wide(t: Tensor, strides: Sequence[int]) -> bool:
    if t.is_contiguous():
        return math.prod(t.shape[-len(strides) :]) > 1 << 31
    return sum([abs(s) * max(n - 1, 0) for s, n in zip(strides, t.shape[-len(strides) :], strict=True)]) >= 1 << 31


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Address of each expert."""
    if len(tensors) > 1:
        return tuple(map(Tensor.data_ptr, tensors))
    (t,) = tensors
    # An expert alone in its list may come without the leading dimension.
    step = t.stride(0) * t.element_size()
    return tuple(t.data_ptr() + e * step for e in range(t.shape[0]))


def address_table(tensors: Sequence[Tensor]) -> Tensor:
    """int64 addresses [E] on the device.

    A table depends on nothing but the addresses in it, so one that is kept cannot become wrong.
    """
    return _table(tensors[0].device, addresses(tensors))


def steps_table(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(the tensor that is first in memory, int64 [E]: how many times :data:`STEP` bytes behind its beginning each expert begins)."""
    every = addresses(tensors)
    first = min(every)
    base = tensors[0] if len(tensors) == 1 else tensors[every.index(first)]
    return base, _table(base.device, tuple([(address - first) // STEP for address in every]))


def _table(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """The numbers on the device. They are written by fill kernels, which need neither a copy from the host nor a synchronisation.

    During capture of a CUDA graph they are written anew, inside the graph.
    """
    key = (device, numbers)
    table = kept(_TABLES, key, device, lambda: _written(device, numbers))
    if len(_TABLES) > _MAX_TABLES:
        _TABLES.clear()
        _TABLES[key] = table
    return table


def _written(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    table = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for e, number in enumerate(numbers):
        table[e].fill_(number)
    return table
