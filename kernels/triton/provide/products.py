"""The products of training over sorted rows: by our own kernels, or by the library where experts are large and have many rows each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton import config
from moefuse.kernels.triton.host import linear, sorted_rows, specialised, wgrad
from moefuse.kernels.triton.host.available import available
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted
from moefuse.kernels.triton.provide import library

LIBRARY_ROWS = 768
LIBRARY_SIZE = 4096
"""Mean rows of an expert, and features of either projection, from which on the library's products are taken. Measured on an H200
(``benchmarks/train_gpu.py``): a step with 1024 rows of 14336 x 4096 takes 0.96 of the time, all smaller ones 1.09 to 1.18 times as long.
Where kernels with specialised warps run (``hopper/``) it takes 1.04 times as long as they do, so they are taken."""


class _Rows:
    """The sorted rows of a call, and the copy of the last tokens that were gathered."""

    def __init__(self, it: Sorted) -> None:
        self.it = it
        self.last: tuple[Tensor, Tensor] | None = None

    def rows(self, t: Tensor, tokens: bool, scale: Tensor | None) -> Tensor:
        """t itself, or its sorted copy if it has tokens."""
        if not tokens:
            return t
        if self.last is None or self.last[0] is not t:
            self.last = t, library.gathered(t, self.it, scale)
        return self.last[1]


class Own(_Rows):
    """Tokens are gathered while they are loaded, where no kernel wants them sorted; any strides, dtypes, biases and lists."""

    def __init__(self, it: Sorted, dtype: torch.dtype) -> None:
        super().__init__(it)
        self.dtype = dtype

    @functools.cached_property
    def tiled(self) -> Sorted:
        """The rows with the tiles that all products share; gradients of weights need none."""
        return sorted_rows.tiled(self.it, self.dtype)

    def linear(
        self,
        x: Tensor,
        w: Lists,
        b: Lists = (),
        *,
        back: bool = False,
        tokens: bool = False,
        scale: Tensor | None = None,
        out: Tensor | None = None,
        add: bool = False,
        term: linear.Term | None = None,
    ) -> Tensor:
        """Rows of x times w[e]^T plus b[e], or with ``back`` times w[e]; dead rows are not written. The rest: ``linear.linear``."""
        if out is None:
            out = torch.empty((self.it.slots, w[0].shape[-1 if back else -2]), dtype=x.dtype, device=x.device)
        if out.numel():
            weight, bias = linear.weight(w).transposed() if back else linear.weight(w), linear.weight(b, 1) if b else None
            if tokens and not add and term is None and self._sorts(x, out, weight):
                x, tokens, scale = library.gathered(x, self.it, scale), False, None
            linear.linear(out, x, weight, self.tiled, bias=bias, tokens=tokens, scale=scale, add=add, term=term)
        return out

    def _sorts(self, x: Tensor, out: Tensor, w: Weight) -> bool:
        """Whether tokens are copied into sorted order first, for kernels that take rows."""
        item = w.tensors[0].element_size()
        cut = specialised.linear_cut(x, w.operand, item, self.tiled, out.shape[1], x.shape[1])
        return cut is not None and sorted_rows.aligned_rows(out) and out.dtype == x.dtype

    def weight_grads(
        self,
        w: Lists,
        g: Tensor,
        x: Tensor,
        *,
        g_tokens: bool = False,
        x_tokens: bool = False,
        scale: Tensor | None = None,
        last: bool = False,
    ) -> list[Tensor]:
        """Gradients of w, with its strides. ``last``: nobody asks for the sorted copy of these tokens again."""
        tiles = wgrad.grad_tiles(g, x, self.it)
        if tiles is not None and last and g_tokens != x_tokens and wgrad.halved(w, *((g, x) if g_tokens else (x, g)), self.it):
            sort = functools.partial(library.gathered, it=self.it, scale=None if g_tokens else scale)
            return wgrad.weight_grads_by_halves(w, g, x, self.it, tiles, sort, of_g=g_tokens)
        if tiles is not None:
            return wgrad.weight_grads(w, self.rows(g, g_tokens, None), self.rows(x, x_tokens, scale), self.it)
        return wgrad.weight_grads(w, g, x, self.it, g_tokens=g_tokens, x_tokens=x_tokens, scale=scale)


class Library(_Rows):
    """``grouped_mm`` on gathered copies of the tokens; what :func:`moefuse.kernels.triton.provide.library.refusal` lets through."""

    def __init__(self, it: Sorted) -> None:
        super().__init__(it)
        self.ends = it.offsets[1:].to(torch.int32)

    def linear(
        self,
        x: Tensor,
        w: Lists,
        b: Lists = (),
        *,
        back: bool = False,
        tokens: bool = False,
        scale: Tensor | None = None,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:
        """As of :class:`Own`."""
        assert out is None
        assert not b
        assert not add
        return library.product(self.rows(x, tokens, scale), w[0] if back else w[0].transpose(1, 2), self.ends)

    def weight_grads(
        self,
        w: Lists,
        g: Tensor,
        x: Tensor,
        *,
        g_tokens: bool = False,
        x_tokens: bool = False,
        scale: Tensor | None = None,
        last: bool = False,
    ) -> list[Tensor]:
        """As of :class:`Own`; ``grouped_mm`` takes whole rows."""
        rows_g, rows_x = self.rows(g, g_tokens, None), self.rows(x, x_tokens, scale)
        self.last = None
        return [library.weight_grad(w[0], rows_g, rows_x, self.ends)]


def products(x: Tensor, it: Sorted, gating: str, biases: Sequence[Lists], size: int, *lists: Lists) -> Own | Library:
    """Who computes the products with the weights ``lists``. ``size``: the smaller of the features of a token and of the activation."""
    large = it.mean_rows >= LIBRARY_ROWS and size >= LIBRARY_SIZE and not available(device_of(x.device))
    if config.PRODUCTS == "own" or (config.PRODUCTS is None and not large):
        return Own(it, x.dtype)
    if not it.slots or library.refusal(x, gating, biases, *lists) is not None:
        return Own(it, x.dtype)
    return Library(it)
