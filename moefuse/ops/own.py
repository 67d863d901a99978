"""``moefuse::own``: the values of a tensor in memory of its own, to be kept for gradients where others may write to the original.

An op keeps its inputs where the program that it replaces may have kept something else, so that the program may write to them behind the
graph and before the backward pass. Autograd raises then; of views of what the graph made, AOTAutograd keeps no version counter, and the
gradients are wrong. A ``clone`` would not do: the partitioner may drop it and keep what it was made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import below_autograd, ops, wants_grad
from moefuse.ops.schema import implement


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with below_autograd():
            return ops.own.default(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def own(x: Tensor) -> Tensor:
    """Autograd entry of ``moefuse::own``: x [...] -> its values, contiguous, in memory of their own. The gradient is handed through."""
    if wants_grad((x,)):
        return _Own.apply(x)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.own.default(x)  # type: ignore[no-any-return]


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


implement("own", kernel=_own, fake=_own, autograd=own, composite=_own)
