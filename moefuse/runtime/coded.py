"""``moefuse::experts_coded`` in PyTorch alone: the experts of ``cpu.py``, each unpacked while it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moefuse.ops.call import Stack
from moefuse.ops.reference import expert_vector
from moefuse.ops.token_codes import Rounding, as_rounded
from moefuse.runtime import backward, cpu
from moefuse.runtime.cpu import SortedRows, cut_groups
from moefuse.runtime.routing import Group

if TYPE_CHECKING:
    from moefuse.ops.coded import CodedCall, CodedGrads


def experts_coded(call: CodedCall) -> Tensor:
    """``moefuse::experts_coded``."""
    with torch.autocast(call.x.device.type, enabled=False):
        return cpu.experts(call.decoded, RoundedRows)


def experts_coded_forward(call: CodedCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets) for backward."""
    with torch.autocast(call.x.device.type, enabled=False):
        return cpu.experts_forward(call.decoded, RoundedRows)


def experts_coded_backward(call: CodedGrads) -> list[Tensor]:
    """The gradients that are wanted, flattened; of experts that do not round activations."""
    return backward.experts_backward(call.decoded)


class RoundedRows(SortedRows):
    """Experts whose projections may round their rows."""

    def project(self, out: Tensor, rows: Tensor, stack: Stack, chunk: list[Group]) -> None:
        """out [n, F] = one projection of rows [n, I] of the chunk."""
        activation = rounding(stack)
        if activation is None:
            super().project(out, rows, stack, chunk)
            return
        wide = as_rounded(activation, rows).to(self.wide)
        for (e, _, _), into, part in cut_groups(chunk, out, wide):
            weight, bias = stack.weight[e].to(self.wide).t(), expert_vector(stack.bias, e)
            into.copy_(part @ weight if bias is None else torch.addmm(bias.to(out.dtype).to(self.wide), part, weight))


def rounding(stack: Stack) -> Rounding | None:
    """How a projection of :class:`~moefuse.ops.coded.CodedWeights` rounds its rows."""
    codes = getattr(stack.weight, "codes", None)
    found: Rounding | None = None if codes is None else codes.encoding.activation
    return found
