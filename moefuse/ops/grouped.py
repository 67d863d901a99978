"""The grouped tier: ``permute``, ``grouped_linear``, ``expert_rows`` and ``combine``, with fakes and registration.

An expert body without a template runs as permute, grouped_linear, the user's own row-local ops, grouped_linear, combine. order and
offsets are described in ``moefuse/runtime/routing.py``; rows from offsets[E] on are of no expert, and what is computed for them is zeros.

On a CPU values of order and offsets that are not such raise a ValueError. On CUDA, where to look would be a wait or a launch more for each
product, they are undefined behaviour, as for torch's own grouped products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops import autograd_grouped as autograd
from moefuse.ops.autograd import once
from moefuse.ops.check_values import check_offset_values, check_order_values
from moefuse.ops.meaning.checks import check_combine, check_expert_rows, check_grouped_linear, check_permute
from moefuse.ops.meaning.composite import pulled_back
from moefuse.ops.meaning.reference_grouped import combine_reference, expert_rows_reference, grouped_linear_reference, permute_reference
from moefuse.ops.schema import implement
from moefuse.runtime import providers

Lists = Sequence[Tensor]


def _permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    check_permute(x, ids, num_experts)
    out: tuple[Tensor, Tensor, Tensor] = providers.run("permute", x, ids, num_experts)
    return out


def _permute_fake(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    check_permute(x, ids, num_experts)
    slots = x.shape[0] * ids.shape[1]
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, num_experts + 1))
    return x.new_empty((slots, x.shape[1])), order, offsets


def _grouped_linear(xs: Tensor, offsets: Tensor, w: Lists, b: Lists) -> Tensor:
    check_grouped_linear(xs, offsets, w, b)
    check_offset_values(offsets, xs.shape[0], "grouped_linear")
    out: Tensor = providers.run("grouped_linear", xs, offsets, w, b)
    return out


def _grouped_linear_fake(xs: Tensor, offsets: Tensor, w: Lists, b: Lists) -> Tensor:
    return xs.new_empty((xs.shape[0], check_grouped_linear(xs, offsets, w, b)))


def _grouped_linear_backward(grad: Tensor, xs: Tensor, offsets: Tensor, w: Lists, b: Lists, needs: Sequence[bool]) -> list[Tensor]:
    check_offset_values(offsets, xs.shape[0], "grouped_linear_backward")
    out: list[Tensor] = providers.run("grouped_linear_backward", grad, xs, offsets, w, b, needs)
    return out


def _grouped_linear_backward_fake(grad: Tensor, xs: Tensor, offsets: Tensor, w: Lists, b: Lists, needs: Sequence[bool]) -> list[Tensor]:
    out = [xs.new_empty(xs.shape)] if needs[0] else []
    out += [torch.empty_like(t) for t in w] if needs[1] else []
    out += [torch.empty_like(t) for t in b] if needs[2] else []
    return out


def _expert_rows(v: Lists, offsets: Tensor, num_rows: int) -> Tensor:
    check_expert_rows(v, offsets, num_rows)
    check_offset_values(offsets, num_rows, "expert_rows", "num_rows")
    out: Tensor = providers.run("expert_rows", v, offsets, num_rows)
    return out


def _expert_rows_fake(v: Lists, offsets: Tensor, num_rows: int) -> Tensor:
    return v[0].new_empty((num_rows, check_expert_rows(v, offsets, num_rows)))


def _expert_rows_backward(grad: Tensor, v: Lists, offsets: Tensor) -> list[Tensor]:
    check_offset_values(offsets, grad.shape[0], "expert_rows_backward", "grad")
    out: list[Tensor] = providers.run("expert_rows_backward", grad, v, offsets)
    return out


def _expert_rows_backward_fake(grad: Tensor, v: Lists, offsets: Tensor) -> list[Tensor]:
    return [torch.empty_like(t) for t in v]


def _combine(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None) -> Tensor:
    check_combine(ys, weights, order, offsets, top_k, out_dtype)
    check_order_values(order, "combine")
    out: Tensor = providers.run("combine", ys, weights, order, offsets, top_k, out_dtype)
    return out


def _combine_fake(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None) -> Tensor:
    tokens = check_combine(ys, weights, order, offsets, top_k, out_dtype)
    return ys.new_empty((tokens, ys.shape[1]), dtype=out_dtype or ys.dtype)


def _combine_backward(
    grad: Tensor, ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, needs: Sequence[bool]
) -> list[Tensor]:
    out: list[Tensor] = providers.run("combine_backward", grad, ys, weights, order, offsets, top_k, needs)
    return out


def _combine_backward_fake(
    grad: Tensor, ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, needs: Sequence[bool]
) -> list[Tensor]:
    out = [ys.new_empty(ys.shape)] if needs[0] else []
    return out + ([weights.new_empty(weights.shape)] if needs[1] and weights is not None else [])


# -- the gradients, by their definition


def _grouped_linear_again(grad: Tensor, xs: Tensor, offsets: Tensor, w: Lists, b: Lists, needs: Sequence[bool]) -> list[Tensor]:
    def function(xs: Tensor, *flat: Tensor) -> Tensor:
        return grouped_linear_reference(xs, offsets, flat[: len(w)], flat[len(w) :])

    return pulled_back(function, [xs, *w, *b], [needs[0], *(needs[1] for _ in w), *(needs[2] for _ in b)], grad)


def _expert_rows_again(grad: Tensor, v: Lists, offsets: Tensor) -> list[Tensor]:
    return pulled_back(lambda *v: expert_rows_reference(v, offsets, grad.shape[0]), v, [True] * len(v), grad)


def _combine_again(
    grad: Tensor, ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, needs: Sequence[bool]
) -> list[Tensor]:
    def function(ys: Tensor, weights: Tensor | None = None) -> Tensor:
        return combine_reference(ys, weights, order, offsets, top_k, grad.dtype)

    inputs = [ys] if weights is None else [ys, weights]
    return pulled_back(function, inputs, needs[: len(inputs)], grad)


implement("permute", kernel=_permute, fake=_permute_fake, autograd=autograd.permute, composite=permute_reference)
implement(
    "grouped_linear",
    kernel=_grouped_linear,
    fake=_grouped_linear_fake,
    autograd=autograd.grouped_linear,
    composite=grouped_linear_reference,
)
implement("expert_rows", kernel=_expert_rows, fake=_expert_rows_fake, autograd=autograd.expert_rows, composite=expert_rows_reference)
implement("combine", kernel=_combine, fake=_combine_fake, autograd=autograd.combine, composite=combine_reference)
for _name, _run, _fake, _rules in (
    ("grouped_linear_backward", _grouped_linear_backward, _grouped_linear_backward_fake, _grouped_linear_again),
    ("expert_rows_backward", _expert_rows_backward, _expert_rows_backward_fake, _expert_rows_again),
    ("combine_backward", _combine_backward, _combine_backward_fake, _combine_again),
):
    implement(_name, kernel=_run, fake=_fake, autograd=once(_name, _rules), composite=_rules)
