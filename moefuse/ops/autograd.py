"""Gradients of ``moefuse::experts``, and the helpers every op's autograd entry uses.

An Autograd kernel costs little when nothing is to be differentiated: it redispatches to the plain op. Otherwise one
``autograd.Function`` runs the op that also returns what backward needs. Weights are saved as they are, never copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.ops.meaning import composite
from moefuse.ops.meaning.call import Body, ExpertsCall, cut, lists_of, stacks
from moefuse.ops.meaning.checks import check_experts
from moefuse.ops.meaning.composite import flatten
from moefuse.ops.meaning.grad_calls import GradCall, InCall, Needs, OutCall, RowsCall

ops = torch.ops.moefuse
below_autograd = _torch_private.below_autograd


def wants_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether this call has to be recorded."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def again(tensors: Iterable[Tensor]) -> bool:
    """Whether a gradient of these is differentiated itself, so that a composite makes it: from the inputs, and from no rows of forward."""
    return torch.is_grad_enabled() or any(map(_torch_private.has_tangent, tensors))


def keep(ctx: Any, *tensors: Tensor) -> None:
    """Save tensors for backward, which :func:`kept` gives; those that autograd does not save, inference tensors, beside it.

    It compares the versions of all others, and these have none.
    """
    ctx.beside = {i: t for i, t in enumerate(tensors) if t.is_inference()}
    ctx.save_for_backward(*(None if i in ctx.beside else t for i, t in enumerate(tensors)))


def kept(ctx: Any) -> list[Tensor]:
    """What :func:`keep` was given."""
    return [ctx.beside.get(i, t) for i, t in enumerate(ctx.saved_tensors)]


def grads_for(needs: Sequence[bool], lengths: Sequence[int], computed: Iterable[Tensor]) -> list[Tensor | None]:
    """Spread the computed gradients (whole groups, in order) over all positions; None for groups that were not asked for."""
    source = iter(computed)
    return [next(source) if need else None for need, n in zip(needs, lengths, strict=True) for _ in range(n)]


class _Experts(torch.autograd.Function):
    """One call of ``moefuse::experts`` that is differentiated."""

    @staticmethod
    def forward(ctx: Any, counts: list[int], body: tuple[Any, ...], out_dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        with below_autograd():
            out, h, order, offsets = ops.experts_forward.default(tensors, counts, *body, out_dtype)
        x, _, weights, *flat = tensors
        ctx.counts, ctx.body = counts, body
        ctx.save_for_backward(x, weights, h, order, offsets, *flat)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, *gradients(grad, ctx.saved_tensors, ctx.counts, ctx.body, ctx.needs_input_grad[3:])


def gradients(grad: Tensor, saved: Sequence[Tensor], counts: list[int], code: tuple[Any, ...], needs: Sequence[bool]) -> tuple[Any, ...]:
    """Of x, ids, weights and all of the lists, as ``needs`` says, from grad [T, Hout].

    Args:
        saved: x [T, H], weights [T, K], h [S, width], order [S], offsets [E + 1] and what is in the lists.
        counts, code: as the internal ops take them.
    """
    need_x, _, need_weights, *need_flat = needs
    flags = [need_x, need_weights, *(any(part) for part in cut(need_flat, counts))]
    x, weights, h, order, offsets, *flat = saved
    body = Body.decode(*code)
    call = GradCall(grad, x, weights, h, order, offsets, *stacks(cut(flat, counts)), Needs.of(flags, body.on_input), body)
    parts = grad.device.type in IN_PARTS and not _whole((grad, *saved))
    computed = in_parts(call, Here()) if parts else ops.experts_backward.default(*call.pack())
    d_x, d_weights, *d_flat = grads_for(flags, (1, 1, *counts), computed)
    return d_x, None, d_weights, *d_flat


def _whole(tensors: Sequence[Tensor]) -> bool:
    """Whether backward has to be the one op that has a composite."""
    return bool(_torch_private.transform()) or again(tensors)


IN_PARTS = ("cuda",)
"""Devices where backward is three ops, so that a compiled program frees what the next does not read. Elsewhere one op goes by chunks."""


class Here:
    """Where rows are those of the tokens that a call was given; elsewhere they come and go (``moefuse/ops/spread.py``)."""

    def rows(self, call: RowsCall) -> tuple[Tensor, Iterator[Tensor]]:
        """The gradient of the output as the third part takes it, and what the first part makes."""
        return call.grad, _run(ops.experts_backward_rows, call)

    def lists(self, call: InCall, rows: list[Tensor]) -> tuple[list[Tensor], Iterator[Tensor]]:
        """The gradients of tokens where they belong, and what the second part makes for lists."""
        return rows, _run(ops.experts_backward_in, call) if call.need.h else iter(())


def _run(op: Any, of: RowsCall | InCall | OutCall) -> Iterator[Tensor]:
    return iter(op.default(*of.pack()))


def in_parts(call: GradCall, way: Here) -> list[Tensor]:
    """The parts of ``moefuse/runtime/backward.py``; the largest gradients are made last, when all else is as small as it gets.

    Nothing waits for those of w_in, and they have a call of their own: a compiler may make them when the memory of earlier layers is free.
    """
    grad, x, weights, h, order, offsets, w_in, w_up, w_out, need, body, _ = call
    none: list[Tensor] = []
    d_x, rows, d_out = none, iter(none), iter(none)
    if need.rows:
        grad, rows = way.rows(RowsCall(grad, weights, h, order, offsets, w_out, need, body))
    d_h, a, d_weights = ([next(rows)] if wanted else [] for wanted in (need.h, need.w_out, need.products))

    def second(wanted: Needs) -> InCall:
        return InCall(x, weights, d_h[0] if d_h else h, order, offsets, w_in, w_up, wanted, body)

    if need.tokens:
        found = _run(ops.experts_backward_in, second(need.of_tokens))
        d_x = [next(found)] if need.x else []
        d_weights = [next(found)] if need.weights and need.on_input else d_weights
    back, d_in = way.lists(second(need.of_lists), [*d_x, *d_weights])
    if need.out:
        d_out = _run(ops.experts_backward_out, OutCall(grad, weights, order, offsets, a[0] if a else None, w_out, need, body))
    taken = zip((d_in, d_in, d_out) * 2, lists_of(w_in, w_up, w_out), need.flags[2:], strict=True)
    return [*back, *(next(source) for source, tensors, wanted in taken if wanted for _ in tensors)]


def experts_by(function: Any, first: Sequence[Any], *data: Any, **options: Any) -> Tensor:
    """A call of experts that ``function`` differentiates, given ``first`` and the packed call; inference where no gradient is wanted."""
    call = ExpertsCall.of(*data, **options)
    check_experts(call)
    tensors, counts, *body, dtype = call.pack()
    if wants_grad(tensors):
        return function.apply(*first, counts, tuple(body), dtype, *tensors)  # type: ignore[no-any-return]
    with below_autograd():
        return ops.experts_infer.default(tensors, counts, *body, dtype)  # type: ignore[no-any-return]


experts = functools.partial(experts_by, _Experts, ())
"""Autograd entry of ``moefuse::experts``; a partial, which costs the host less than a function would."""

INTERNAL = (
    "is internal and has no gradient; call the public op it belongs to. (A graph that make_fx has traced where gradients were recorded has "
    "it in its place: trace with pre_dispatch=True, or run that graph under torch.no_grad().)"
)


def not_differentiable(name: str, why: str = INTERNAL) -> Callable[..., Any]:
    """Autograd entry of an op without a gradient: a RuntimeError says ``why`` where one is wanted."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        if wants_grad(flatten(args)):
            raise RuntimeError(f"moefuse::{name} {why}")
        with below_autograd():
            return getattr(ops, name).default(*args, **kwargs)

    return entry


def not_recorded(name: str) -> Callable[..., Any]:
    """Autograd entry of an op that carries gradients and has none of its own."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        with below_autograd():
            return getattr(ops, name).default(*args, **kwargs)

    return entry


def once(name: str, rules: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd entry of a backward op: where its own gradient is wanted (a second derivative), its composite."""

    def entry(*args: Any, **kwargs: Any) -> list[Tensor]:
        tensors = flatten(args)
        if wants_grad(tensors):
            return composite.composed(rules, tensors, args, kwargs)  # type: ignore[no-any-return]
        with below_autograd():
            return getattr(ops, name).default(*args, **kwargs)  # type: ignore[no-any-return]

    return entry


class _Once(torch.autograd.Function):
    """A part of a backward op: runs, and refuses only when its own gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, public: str, call: Callable[[], list[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.public = public
        with below_autograd():
            return tuple(call())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"moefuse::{ctx.public} can be differentiated once, not twice; compute second derivatives on the original model "
            "(compile it without moefuse, or exclude this module from fusion)"
        )


def part(name: str, public: str) -> Callable[..., Any]:
    """Autograd entry of a part of a backward op, whose gradient raises a RuntimeError that names the public op."""

    def entry(*args: Any, **kwargs: Any) -> list[Tensor]:
        op = getattr(ops, name).default
        tensors = flatten(args)
        if wants_grad(tensors):
            return list(_Once.apply(public, lambda: op(*args, **kwargs), *tensors))  # type: ignore[no-untyped-call]
        with below_autograd():
            return op(*args, **kwargs)  # type: ignore[no-any-return]

    return entry
