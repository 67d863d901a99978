"""``moefuse::recomputed_experts``: ``moefuse::experts`` that keeps tokens and routing for backward, and no hidden activations.
(``moefuse::experts_extended`` does the same with ``recompute``.)

h [S, 2I], which is most of what a layer keeps, is computed again when its gradient is wanted, by the same kernels from the same tokens and
in the same order of rows: gradients are the same bits. It costs the first product of the forward pass once more. An activation checkpoint
around the layer would compute attention again as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import again, below_autograd, experts_by, gradients, not_differentiable, ops
from moefuse.ops.experts import composite, fake, kernel
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.checks import check_experts
from moefuse.ops.schema import implement
from moefuse.runtime import providers


def _hidden(tensors: Sequence[Tensor], counts: list[int], *rest: Any) -> Tensor:
    """h of ``experts_forward`` with these ``order`` and ``offsets``."""
    *body, order, offsets = rest
    if tensors[0].device.type == "cuda":
        return providers.run("experts_hidden", ExpertsCall.unpack(tensors, counts, *body, tensors[0].dtype), order, offsets)  # type: ignore[no-any-return]
    return ops.experts_forward.default(tensors, counts, *body, tensors[0].dtype)[1]  # type: ignore[no-any-return]


def _hidden_fake(tensors: Sequence[Tensor], counts: list[int], *rest: Any) -> Tensor:
    *body, order, _ = rest
    call = ExpertsCall.unpack(tensors, counts, *body, tensors[0].dtype)
    return call.x.new_empty((order.shape[0], check_experts(call)[1]))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: list[int], body: tuple[Any, ...], out_dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        with below_autograd():
            out, _, order, offsets = ops.experts_forward.default(tensors, counts, *body, out_dtype)
        ctx.counts, ctx.body = counts, body
        ctx.save_for_backward(order, offsets, *tensors)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        order, offsets, *tensors = ctx.saved_tensors
        x, _, weights, *flat = tensors
        # What is differentiated once more is made from the tokens alone.
        h = x if again((grad, *tensors)) else ops.experts_hidden.default(tensors, ctx.counts, *ctx.body, order, offsets)
        saved = (x, weights, h, order, offsets, *flat)
        return None, None, None, *gradients(grad, saved, ctx.counts, ctx.body, ctx.needs_input_grad[3:])


def recomputed_experts(*data: Any, **options: Any) -> Tensor:
    """Autograd entry of ``moefuse::recomputed_experts``."""
    return experts_by(_Recomputed, (), *data, **options)


implement("recomputed_experts", kernel=kernel, fake=fake, autograd=recomputed_experts, composite=composite)
implement("experts_hidden", kernel=_hidden, fake=_hidden_fake, autograd=not_differentiable("experts_hidden"))
