"""What is done to sorted rows between the products: the activation, its gradient, and products of pairs of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moefuse.kernels.triton.device import backward
from moefuse.kernels.triton.device.structs import Halves, Rows, Wanted
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.sorted_rows import Sorted, bins, blocks, rows_of, whole
from moefuse.kernels.triton.launch.calls import launch
from moefuse.ops.meaning.activations import limits_pass
from moefuse.ops.meaning.call import Body


def pair(
    it: Sorted,
    tokens: Tensor,
    ys: Tensor,
    weights: Tensor | None,
    *,
    out: Tensor | None,
    d_weights: Tensor | None,
    from_rows: bool = False,
    scaled: bool = True,
) -> None:
    """``backward.pair_rows``: what is not None of out [S, N] and d_weights [T, K] is written."""
    n = ys.shape[1]
    br, bn = blocks(n, 1024)
    scale = weights if scaled else None
    launch(
        backward.pair_rows,
        (-(-it.slots // br),),
        {
            "tokens": tokens, "rows": ys, "weights": ys if scale is None else scale, "order": it.order, "offsets": it.offsets,
            "out": ys if out is None else out, "d_weights": ys if d_weights is None else d_weights,
        },
        S=it.slots,
        top_k=it.top_k,
        E=it.experts,
        N=n,
        at_tokens=Rows(*tokens.stride()),
        at_rows=Rows(*ys.stride()),
        at_weights=rows_of(scale),
        FROM_ROWS=from_rows,
        SCALE=scale is not None,
        WANT_OUT=out is not None,
        WANT_WEIGHTS=d_weights is not None,
        BR=br,
        BN=bn,
    )  # fmt: skip


class Activation(NamedTuple):
    """The activation of one kind of expert, and where gate and up are in a row of the pre-activation [S, width]."""

    body: Body
    inter: int

    @property
    def halves(self) -> Halves:
        """What the kernels of ``backward.py`` take of it."""
        body = self.body
        second, step = (1, 2) if body.gating == "interleaved" else (self.inter, 1)
        gate, up = (second, 0) if body.up_first else (0, second)
        plain = body.gating == "plain"
        return Halves(gate, 0 if plain else up, step, plain, body.activation, *body.pair, limits_pass())


def activate(a: Tensor, h: Tensor, it: Sorted, how: Activation) -> None:
    """a [S, I] from h [S, width]."""
    br, bn = blocks(how.inter)
    grid = (-(-it.slots // br), -(-how.inter // bn))
    arrays = {"h": h, "offsets": it.offsets, "a": a}
    sizes: dict[str, Any] = {"S": it.slots, "E": it.experts, "I": how.inter}
    launch(backward.activate, grid, arrays, **sizes, stride_hr=h.stride(0), halves=how.halves, BR=br, BN=bn)


def activate_grads(
    it: Sorted,
    h: Tensor,
    d_a: Tensor | None,
    how: Activation,
    *,
    scale: Tensor | None,
    d_h: Tensor | None,
    a: Tensor | None,
    d_weights: Tensor | None,
    grad: Tensor,
    bias: Weight | None,
) -> None:
    """``backward.activate_grads`` of h [S, width] and d_a [S, I]: writes what is not None of d_h [S, width], a [S, I] and d_weights [S].

    ``bias``: of the second projection.
    """
    br, bn = blocks(how.inter, 1024 if whole(h.element_size(), how.inter) else 512)
    launch(
        backward.activate_grads,
        (-(-it.slots // br),),
        {
            "h": h, "d_a": h if d_a is None else d_a, "grad": grad, "b": h if bias is None else bias.pointer,
            "weights": h if scale is None else scale, "order": it.order, "offsets": it.offsets, "d_h": h if d_h is None else d_h,
            "a": h if a is None else a, "d_weights": h if d_weights is None else d_weights,
        },
        S=it.slots,
        top_k=it.top_k,
        E=it.experts,
        I=how.inter,
        N=grad.shape[1],
        stride_hr=h.stride(0),
        at_grad=Rows(*grad.stride()),
        at_b=Rows(*((0, 0) if bias is None else bias.strides)),
        at_weights=rows_of(scale),
        halves=how.halves,
        SCALE=scale is not None,
        want=Wanted(d_h is not None, a is not None, d_weights is not None),
        bias=(bias is not None, bias is not None and bias.operand.table, bias is not None and bias.tensors[0].dtype != h.dtype),
        BE=bins(it.experts),
        BR=br,
        BN=bn,
    )  # fmt: skip
