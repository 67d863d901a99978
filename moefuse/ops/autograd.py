"""Gradients of ``moefuse::experts``, and the helpers every op's autograd entry uses.

An Autograd kernel costs little when nothing is to be differentiated: it redispatches to the plain op. Otherwise one
``autograd.Function`` runs the op that also returns what backward needs. Weights are saved as they are, never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.body import Needs, decode, encode_needs, pack
from moefuse.ops.checks import check_experts

ops = torch.ops.moefuse
below_autograd = torch._C._AutoDispatchBelowAutograd

Lists = Sequence[Tensor]


def wants_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether this call has to be recorded."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def flatten(args: Iterable[Any]) -> list[Tensor]:
    """All tensors among op arguments, lists opened."""
    out: list[Tensor] = []
    for a in args:
        if isinstance(a, Tensor):
            out.append(a)
        elif isinstance(a, (list, tuple)):
            out += [t for t in a if isinstance(t, Tensor)]
    return out


def split(tensors: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Cut a flat sequence into lists of the given lengths."""
    out, start = [], 0
    for n in lengths:
        out.append(list(tensors[start : start + n]))
        start += n
    return out


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
        need_x, _, need_weights, *need_flat = ctx.needs_input_grad[3:]
        needs = [need_x, need_weights, *(any(part) for part in split(need_flat, ctx.counts))]
        backward = _in_parts if grad.device.type in IN_PARTS else _at_once
        computed = backward(grad, ctx.saved_tensors, ctx.counts, needs, ctx.body)
        d_x, d_weights, *d_flat = grads_for(needs, (1, 1, *ctx.counts), computed)
        return None, None, None, d_x, None, d_weights, *d_flat


IN_PARTS = ("cuda",)
"""Devices where backward is three ops, so that a compiled program frees what the next does not read. Elsewhere one op goes by chunks."""


def _at_once(grad: Tensor, saved: Lists, counts: list[int], needs: list[bool], body: tuple[Any, ...]) -> list[Tensor]:
    computed: list[Tensor] = ops.experts_backward.default([grad, *saved], counts, encode_needs(needs), *body)
    return computed


def _in_parts(grad: Tensor, saved: Lists, counts: list[int], needs: list[bool], body: tuple[Any, ...]) -> list[Tensor]:
    """The parts of ``moefuse/runtime/backward.py``; the largest gradients are made last, when all else is as small as it gets."""
    need, bits = Needs.of(needs, decode(*body)["weight_on_input"]), encode_needs(needs)
    x, weights, h, order, offsets, *flat = saved
    w_in, w_up, w_out, b_in, b_up, b_out = split(flat, counts)

    def part(op: Any, tensors: Lists, *lists: Lists) -> Iterator[Tensor]:
        return iter(op.default([*tensors, *(t for part in lists for t in part)], [len(part) for part in lists], bits, *body))

    none: list[Tensor] = []
    d_x, rows, d_in, d_out = none, iter(none), iter(none), iter(none)
    if need.rows:
        rows = part(ops.experts_backward_rows, (grad, weights, h, order, offsets), w_out, b_out)
    d_h, a, d_weights = ([next(rows)] if wanted else [] for wanted in (need.h, need.w_out, need.products))
    if d_h:
        d_in = part(ops.experts_backward_in, (x, weights, *d_h, order, offsets), w_in, w_up, b_in, b_up)
        d_x = [next(d_in)] if need.x else []
        d_weights = [next(d_in)] if need.weights and need.on_input else d_weights
    if need.out:
        d_out = part(ops.experts_backward_out, (grad, weights, order, offsets), a, w_out, b_out)
    taken = zip((d_in, d_in, d_out) * 2, (w_in, w_up, w_out, b_in, b_up, b_out), needs[2:], strict=True)
    return [*d_x, *d_weights, *(next(source) for source, tensors, wanted in taken if wanted for _ in tensors)]


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    *,
    activation: str = "silu",
    activation_args: Sequence[float] = (),
    gating: str = "merged",
    up_first: bool = False,
    weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Autograd entry of ``moefuse::experts``."""
    data = (x, ids, weights, w_in, w_up, w_out, b_in, b_up, b_out)
    check_experts("experts", *data, activation, activation_args, gating, up_first, out_dtype)
    tensors, counts, *body, dtype = pack(data, activation, activation_args, gating, up_first, weight_on_input, out_dtype)
    if wants_grad(tensors):
        return _Experts.apply(counts, tuple(body), dtype, *tensors)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.experts_infer.default(tensors, counts, *body, dtype)  # type: ignore[no-any-return]


INTERNAL = "is internal and has no gradient; call the public op it belongs to"


def not_differentiable(name: str, why: str = INTERNAL) -> Callable[..., Any]:
    """Autograd entry of an op without a gradient: a RuntimeError says ``why`` where one is wanted."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        if wants_grad(flatten(args)):
            raise RuntimeError(f"moefuse::{name} {why}")
        with below_autograd():
            return getattr(ops, name)(*args, **kwargs)

    return entry


class _Once(torch.autograd.Function):
    """A backward op: runs, and refuses only when its own gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, name: str, public: str, call: Callable[[], list[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.public = public
        with below_autograd():
            return tuple(call())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"moefuse::{ctx.public} can be differentiated once, not twice; compute second derivatives on the original model "
            "(compile it without moefuse, or exclude this module from fusion)"
        )


def once(name: str, public: str) -> Callable[..., Any]:
    """Autograd entry of a backward op, whose gradient (a second derivative) raises a RuntimeError that names the public op."""

    def entry(*args: Any, **kwargs: Any) -> list[Tensor]:
        op = getattr(ops, name)
        tensors = flatten(args)
        if wants_grad(tensors):
            return list(_Once.apply(name, public, lambda: op(*args, **kwargs), *tensors))  # type: ignore[no-untyped-call]
        with below_autograd():
            return op(*args, **kwargs)  # type: ignore[no-any-return]

    return entry
