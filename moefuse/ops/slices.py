"""Experts of which every rank has a slice, as in tensor parallelism: their weights in full, and what only one rank may add.

    W [.., N, ..]  = gathered_slices(local [.., N / P, ..], axis, blocks, terms)    what a sliced weight means: all of it
    b              = on_one_rank(b, terms)                                           b on the first rank, zeros on the others

A dimension of hidden units consists of equal ``blocks``, and of each block every rank has its part (``runtime/transports/weights.py``).
Every rank's experts give a part of the sum over hidden units, so tokens and results travel as they do for whole experts
(``moefuse/ops/parallel.py``); a bias behind that sum is added once.

The bias is a plain Parameter on every rank, whose gradients others average or leave alone. Each rank gives it an equal share of what the
first one found: its P-th part, or all of it where all ranks have the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import never_dead
from moefuse.ops.autograd import below_autograd, not_recorded, ops, wants_grad
from moefuse.ops.schema import implement
from moefuse.ops.whole import share
from moefuse.runtime.groups import Terms, said_of
from moefuse.runtime.peers import peers, told
from moefuse.runtime.transports.weights import all_slices, own_slice


def _slices(local: Tensor, axis: int, blocks: int, terms: str) -> Tensor:
    known = Terms.parse(terms)
    with peers(known, "gathering the weights of experts", said_of("gathered_slices", terms), [local]):
        told(known, 0)
        return all_slices(known.group, local, axis, blocks)


def _slices_fake(local: Tensor, axis: int, blocks: int, terms: str) -> Tensor:
    shape = list(local.shape)
    shape[axis] *= Terms.parse(terms).group.size
    return local.new_empty(shape)


def _slices_backward(grad: Tensor, axis: int, blocks: int, terms: str) -> Tensor:
    known = Terms.parse(terms)
    with peers(known, "reducing the gradients of experts", said_of("gathered_slices_backward", terms), [grad]):
        told(known, 0)
        return own_slice(known.group, grad, axis, blocks).mul_(known.scale_gathered())


def _slices_backward_fake(grad: Tensor, axis: int, blocks: int, terms: str) -> Tensor:
    shape = list(grad.shape)
    shape[axis] //= Terms.parse(terms).group.size
    return grad.new_empty(shape)


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: int, blocks: int, terms: str) -> Tensor:
        ctx.how = axis, blocks, terms
        with below_autograd():
            return ops.gathered_slices.default(local, axis, blocks, terms)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ops.gathered_slices_backward.default(grad.contiguous(), *ctx.how), None, None, None


def gathered_slices(local: Tensor, axis: int, blocks: int, terms: str) -> Tensor:
    """Autograd entry of ``moefuse::gathered_slices``: local [.., N / P, ..] to [.., N, ..] along ``axis``."""
    if wants_grad((local,)):
        return _Slices.apply(local, axis, blocks, terms)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.gathered_slices.default(local, axis, blocks, terms)  # type: ignore[no-any-return]


def _on_one_rank(x: Tensor, terms: str) -> Tensor:
    return x.clone() if Terms.parse(terms).group.rank == 0 else torch.zeros_like(x)


def _like_x(x: Tensor, terms: str) -> Tensor:
    return torch.empty_like(x)


def _on_one_rank_backward(grad: Tensor, terms: str) -> Tensor:
    known = Terms.parse(terms)
    # Others' gradients are of nothing: their bias was zero.
    found = grad.clone() if known.group.rank == 0 else torch.zeros_like(grad)
    with peers(known, "reducing the gradients of experts", "on_one_rank_backward", [grad]):
        return share(found, known)


class _OnOneRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: str) -> Tensor:
        ctx.terms = terms
        with below_autograd():
            return ops.on_one_rank.default(x, terms)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ops.on_one_rank_backward.default(grad.contiguous(), ctx.terms), None


def on_one_rank(x: Tensor, terms: str) -> Tensor:
    """Autograd entry of ``moefuse::on_one_rank``."""
    if wants_grad((x,)):
        return _OnOneRank.apply(x, terms)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.on_one_rank.default(x, terms)  # type: ignore[no-any-return]


for _name in ("gathered_slices", "gathered_slices_backward", "on_one_rank_backward"):
    never_dead(getattr(ops, _name).default)

implement("gathered_slices", kernel=_slices, fake=_slices_fake, autograd=gathered_slices)
implement(
    "gathered_slices_backward", kernel=_slices_backward, fake=_slices_backward_fake, autograd=not_recorded("gathered_slices_backward")
)
implement("on_one_rank", kernel=_on_one_rank, fake=_like_x, autograd=on_one_rank)
implement("on_one_rank_backward", kernel=_on_one_rank_backward, fake=_like_x, autograd=not_recorded("on_one_rank_backward"))
