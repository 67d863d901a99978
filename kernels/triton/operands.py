"""Weight and bias lists as kernels take them: a stacked tensor and its strides, or a table of the addresses of separate Parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TABLES: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
_MAX_TABLES = 4096
"""Tables kept (8 bytes per expert each); beyond, all are dropped and made again when needed."""


@dataclass(frozen=True)
class Operand:
    """How to reach expert e of one list: ``strides`` are (expert, out, in) in elements; of a bias (expert, out).

    Attributes:
        table: the kernel gets int64 addresses [E] instead of the stacked tensor.
        aligned: every expert begins at a multiple of 16 bytes.
        wide: an offset within one expert needs 64 bits.
        uniform: False if the tensors of the list differ in their strides, so they have to be stacked first.
    """

    strides: tuple[int, ...]
    table: bool = False
    aligned: bool = True
    wide: bool = False
    uniform: bool = True

    def form(self, item: int) -> str:
        """How a descriptor can show the operand as one matrix: "out-in" (E * features rows), "in-out" (E * inputs rows), or "" (not)."""
        e, n, k = self.strides
        if self.table or not self.aligned:
            return ""
        if k == 1 and n > 1 and e % n == 0 and n * item % 16 == 0:
            return "out-in"
        return "in-out" if n == 1 and k > 1 and e % k == 0 and k * item % 16 == 0 else ""

    def rows(self, form: str) -> int:
        """Rows from one expert to the next in the matrix of a descriptor; 0 without one."""
        return self.strides[0] // self.strides[1 if form == "out-in" else 2] if form else 0

    def matrix(self, form: str, experts: int, features: int, inputs: int, bn: int, bk: int) -> tuple[Any, ...]:
        """(shape, strides, block) of the descriptor, in blocks of bn features and bk inputs."""
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
    return sum(abs(s) * max(n - 1, 0) for s, n in zip(strides, t.shape[-len(strides) :], strict=True)) >= 1 << 31


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Address of each expert."""
    if len(tensors) > 1:
        return tuple([t.data_ptr() for t in tensors])
    (t,) = tensors
    # An expert alone in its list may come without the leading dimension.
    step = t.stride(0) * t.element_size()
    return tuple(t.data_ptr() + e * step for e in range(t.shape[0]))


def address_table(tensors: Sequence[Tensor]) -> Tensor:
    """int64 addresses [E] on the device.

    A table depends on nothing but the addresses in it, so one that is kept cannot become wrong. It is written by fill kernels, which need
    neither a copy from the host nor a synchronisation. During capture of a CUDA graph it is written anew, inside the graph.
    """
    device = tensors[0].device
    key = (device, addresses(tensors))
    table = _TABLES.get(key)
    if table is not None:
        return table
    if device.type == "cpu":
        table = torch.tensor(key[1], dtype=torch.int64)
    else:
        table = torch.empty(len(key[1]), dtype=torch.int64, device=device)
        for e, address in enumerate(key[1]):
            table[e].fill_(address)
        if torch.cuda.is_current_stream_capturing():
            return table
    if len(_TABLES) >= _MAX_TABLES:
        _TABLES.clear()
    _TABLES[key] = table
    return table
