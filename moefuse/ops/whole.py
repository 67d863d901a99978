"""What every rank has whole beside experts that are spread: adapters, scales and biases that are no part of their Parameters.

    mine [held]  = own_numbers(place [E], L, held, terms)               which experts are here, once for a layer
    w [held, ..] = own_experts(whole [E, ..], mine, place, L, terms)    their rows
    x [..]       = own_experts(x [..], None, None, 0, terms)            one tensor for all experts, as it is

Forward communicates nothing. A rank's experts see the tokens of all ranks, so what comes back is the gradient of all tokens for some
experts, where data parallelism and people who add up expect, of a Parameter that every rank has, parts whose sum over ranks is the
gradient. So gradients are added up over ranks, and each gets an equal share: its P-th part, or all of it where all ranks have the same
tokens. Who averages them afterwards, or leaves them alone, has what one process has (as of a bias in ``slices.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import never_dead
from moefuse.ops.autograd import below_autograd, not_recorded, ops, wants_grad
from moefuse.ops.schema import implement
from moefuse.runtime.collectives import all_reduce
from moefuse.runtime.groups import Terms
from moefuse.runtime.peers import peers


def share(grad: Tensor, terms: Terms) -> Tensor:
    """In place: of a gradient that ranks have found for their experts, or some of it, what each has of the sum."""
    all_reduce(grad, terms.group.process_group)
    ranks = 1 if terms.tokens == "replicated" else terms.group.size
    return grad.mul_(1 / (ranks * terms.scale()))


def _numbers(place: Tensor, slots: int, held: int, terms: str) -> Tensor:
    """Slots behind a rank's experts have the number of some other, and no token goes to them."""
    group = Terms.parse(terms).group
    experts = torch.arange(place.shape[0], device=place.device)
    of_slot = place.new_zeros((group.size * slots,), dtype=torch.int64).index_copy_(0, place.long(), experts)
    return of_slot[group.rank * slots :][:held].clone()


def _numbers_fake(place: Tensor, slots: int, held: int, terms: str) -> Tensor:
    return place.new_empty((held,), dtype=torch.int64)


def _own(whole: Tensor, mine: Tensor | None, place: Tensor | None, slots: int, terms: str) -> Tensor:
    return whole.clone(memory_format=torch.contiguous_format) if mine is None else whole.index_select(0, mine)


def _own_fake(whole: Tensor, mine: Tensor | None, place: Tensor | None, slots: int, terms: str) -> Tensor:
    return whole.new_empty(whole.shape if mine is None else (mine.shape[0], *whole.shape[1:]))


def _own_backward(grad: Tensor, place: Tensor | None, slots: int, terms: str) -> Tensor:
    known = Terms.parse(terms)
    with peers(known, "adding up the gradients of what all ranks have", "own_experts_backward", [grad]):
        return share(grad.clone() if place is None else _rows(grad, place, known.group.rank * slots), known)


def _rows(grad: Tensor, place: Tensor, first: int) -> Tensor:
    """[held, ..] to [E, ..]: zeros for experts of other ranks."""
    if not grad.shape[0]:
        return grad.new_zeros((place.shape[0], *grad.shape[1:]))
    local = place.long() - first
    here = ((local >= 0) & (local < grad.shape[0])).view(-1, *[1] * (grad.dim() - 1))
    return torch.where(here, grad.index_select(0, local.clamp(0, grad.shape[0] - 1)), 0)


def _own_backward_fake(grad: Tensor, place: Tensor | None, slots: int, terms: str) -> Tensor:
    return grad.new_empty(grad.shape if place is None else (place.shape[0], *grad.shape[1:]))


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mine: Tensor | None, place: Tensor | None, slots: int, terms: str) -> Tensor:
        ctx.how = slots, terms
        ctx.save_for_backward(place)
        with below_autograd():
            return ops.own_experts.default(whole, mine, place, slots, terms)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ops.own_experts_backward.default(grad.contiguous(), *ctx.saved_tensors, *ctx.how), None, None, None, None


def own_experts(whole: Tensor, mine: Tensor | None, place: Tensor | None, slots: int, terms: str) -> Tensor:
    """Autograd entry of ``moefuse::own_experts``: whole [E, ...] to [held, ...]."""
    if wants_grad((whole,)):
        return _Own.apply(whole, mine, place, slots, terms)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.own_experts.default(whole, mine, place, slots, terms)  # type: ignore[no-any-return]


never_dead(ops.own_experts_backward.default)

implement("own_numbers", kernel=_numbers, fake=_numbers_fake, autograd=None)
implement("own_experts", kernel=_own, fake=_own_fake, autograd=own_experts)
implement("own_experts_backward", kernel=_own_backward, fake=_own_backward_fake, autograd=not_recorded("own_experts_backward"))
