"""``moefuse::grouped_linear_coded`` and its gradients on CUDA: grouped products whose weights are made in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, sorted_rows, wgrad
from moefuse.kernels.triton.host.sorted_rows import Lists
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide.coded_products import Product, Rows, product
from moefuse.kernels.triton.provide.products import Own
from moefuse.ops.meaning.coded_weights import Codes, codes_of

__all__ = ["grouped_linear_coded", "grouped_linear_coded_backward", "supports"]


def supports(x: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str, *_: object) -> str | None:
    """None, or why these kernels cannot run a call; ``x``: the rows, or their gradient."""
    return f"no kernel for {x.dtype}" if x.dtype not in coded.DTYPES else coded.refusal(codes_of(w, codes, encoding), w[0])


def _held(w: Lists, codes: Lists, encoding: str) -> coded.Held:
    encoded, scale, zero = codes_of(w, codes, encoding)
    return coded.held(coded.as_bytes(w), Codes(encoded, coded.as_bytes(scale), coded.as_bytes(zero)))


@recorded
def grouped_linear_coded(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    """``moefuse::grouped_linear_coded``."""
    held = _held(w, codes, encoding)
    out = torch.empty((xs.shape[0], held.features), dtype=xs.dtype, device=xs.device)
    if out.numel():
        it = sorted_rows.given(offsets, xs.shape[0])
        product(Product(out, xs, held, Rows(Own(it, xs.dtype)), b))
        sorted_rows.clear_dead(out, it)
    return out


@recorded
def grouped_linear_coded_backward(
    grad: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of xs and b that ``needs`` asks for, flattened in that order."""
    held, it, out = _held(w, codes, encoding), sorted_rows.given(offsets, grad.shape[0]), list[Tensor]()
    if needs[0]:
        d_xs = torch.empty((grad.shape[0], held.inputs), dtype=grad.dtype, device=grad.device)
        if d_xs.numel():
            product(Product(d_xs, grad.contiguous(), held, Rows(Own(it, grad.dtype)), back=True))
            sorted_rows.clear_dead(d_xs, it)
        out.append(d_xs)
    if needs[1]:
        out += wgrad.vector_grads(b, grad, it)
    return out
