"""``moefuse::ep_experts`` where it is differentiated: one op each for forward, and for what comes and what goes back in backward.

    out [T, N], x [R, H], ids [R, K], weights [R, K], h, order, offsets, *handle = ep_experts_forward(own tokens, local weights, ..)
    grad [R, N], *rows                     = ep_backward_rows(grad [T, N], .., handle)   ``ep_send`` and ``experts_backward_rows``
    d_x [T, H], d_weights [T, K], *lists   = ep_backward_in(.., their rows, handle)      ``ep_give_back`` and ``experts_backward_in``

R rows arrive (``moefuse/ops/parallel.py``); h, order and offsets are those of ``experts_forward``. Each is what the ops of its line are one
after the other; together they may have rows travel beside work that needs none of them (``moefuse/runtime/transports/beside.py``): what
comes beside the sorting of own rows, what goes back beside the gradients of w_in and w_up.

Where forward is computed again in backward, nobody asks for its result: :func:`without_results` says so, and no rows go back.

All rows go back wherever anything of the layer is differentiated, and tokens have gradients then: which collectives backward has must not
depend on what one rank alone wants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import in_backward, never_dead
from moefuse.ops import autograd, experts
from moefuse.ops.autograd import below_autograd, in_parts, not_differentiable, not_recorded, ops
from moefuse.ops.meaning.call import Body, ExpertsCall, cut, stacks
from moefuse.ops.meaning.checks import check_experts
from moefuse.ops.meaning.grad_calls import GradCall, InCall, Needs, RowsCall
from moefuse.ops.parallel import TRAINED, dispatched, refusing
from moefuse.ops.schema import SPREAD, implement
from moefuse.runtime import overflow, providers, transports
from moefuse.runtime.groups import Terms, of_weight, said_of
from moefuse.runtime.peers import peers
from moefuse.runtime.ranks import numbers_dtype
from moefuse.runtime.transports import beside


def _forward(*given: Any, result: bool = True) -> list[Tensor]:
    *packed, place, slots, terms, layer = given
    known, call = Terms.parse(terms), ExpertsCall.unpack(*packed)
    op, rows = said_of("ep_experts", of_weight(terms, TRAINED)), [call.x, call.weights, call.ids]
    with peers(known, layer, op, rows, place) as running, refusing(running, call.ids):
        overflow.check(known)
        check_experts(call, "ep_experts")
        found = beside.forward(known, call, place, slots, result)
        if found is not None:
            return found
        arrived = dispatched(known, [call.x, call.weights], call.ids, place, slots)
        (x, weights), local = arrived.rows, arrived.ids
        y, *kept = experts.forward(call._replace(x=x, ids=local, weights=weights))
        out = y.new_empty((0, y.shape[1]))
        if result:
            (out,) = transports.transport(known).give_back(known, [y], arrived.handle, call.x.shape[0])
    return [out, x, local, weights, *kept, *arrived.handle]


def _forward_fake(*given: Any, result: bool = True) -> list[Tensor]:
    *packed, _, _, terms, _ = given
    known, call = Terms.parse(terms), ExpertsCall.unpack(*packed)
    how = transports.transport(known)
    arrivals: Any = how.arrivals(known, call.x.shape[0])
    if isinstance(arrivals, int) and arrivals < 0:
        arrivals = torch.library.get_ctx().new_dynamic_size(min=0)
    x, ids, weights = (t.new_empty((arrivals, *t.shape[1:])) for t in (call.x, call.ids, call.weights))
    local = ids.to(numbers_dtype(ids.dtype))
    kept = experts.forward_fake(call._replace(x=x, ids=local, weights=weights))[1:]
    out = experts.result(call)
    return [out if result else out.new_empty((0, *out.shape[1:])), x, local, weights, *kept, *how.handle(known, call.ids)]


def _backward_rows(*given: Any, place: Tensor | None = None) -> list[Tensor]:
    *packed, handle, arrivals, terms, layer = given
    known, call = Terms.parse(terms), RowsCall.unpack(*packed)
    with peers(known, layer, "ep_backward_rows", [call.grad], place):
        found = beside.backward_rows(known, call, handle)
        if found is not None:
            return found
        (grad,) = transports.transport(known).send(known, [call.grad], handle, arrivals, known.scale())
        return [grad, *providers.run("experts_backward_rows", call._replace(grad=grad))]


def _backward_rows_fake(*given: Any, place: Tensor | None = None) -> list[Tensor]:
    *packed, _, arrivals, _, _ = given
    grad = RowsCall.unpack(*packed).grad
    return [grad.new_empty((arrivals, *grad.shape[1:])), *experts.rows_fake(*packed)]


def _backward_in(*given: Any, place: Tensor | None = None) -> list[Tensor]:
    *packed, rows, handle, tokens, terms, layer = given
    known, call = Terms.parse(terms), InCall.unpack(*packed)
    with peers(known, layer, "ep_backward_in", rows, place):
        found = beside.backward_in(known, call, rows, handle, tokens)
        if found is not None:
            return found
        back = transports.transport(known).give_back(known, rows, handle, tokens, 1 / known.scale())
        return [*back, *(providers.run("experts_backward_in", call) if call.need.h else ())]


def _backward_in_fake(*given: Any, place: Tensor | None = None) -> list[Tensor]:
    *packed, rows, _, tokens, _, _ = given
    return [*(r.new_empty((tokens, *r.shape[1:])) for r in rows), *experts.in_fake(*packed)]


class _Spread(torch.autograd.Function):
    """One call that is differentiated. ``recompute``: h is made once more in backward."""

    @staticmethod
    def forward(
        ctx: Any, how: tuple[Any, ...], recompute: bool, counts: list[int], body: tuple[Any, ...], out_dtype: torch.dtype, *tensors: Tensor
    ) -> Tensor:
        with below_autograd():
            out, x, local, weights, h, *rest = ops.ep_experts_forward.default(tensors, counts, *body, out_dtype, *how)
        ctx.counts, ctx.body, ctx.recompute, ctx.tokens, (*_, ctx.terms, ctx.layer) = counts, body, recompute, tensors[0].shape[0], how
        ctx.save_for_backward(how[0], x, weights, local if recompute else h, *rest[:2], *tensors[3:], *rest[2:])
        return out  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        place, x, weights, h, order, offsets, *others = ctx.saved_tensors
        flat, handle = others[: sum(ctx.counts)], others[sum(ctx.counts) :]
        if ctx.recompute:
            h = ops.experts_hidden.default([x, h, weights, *flat], ctx.counts, *ctx.body, order, offsets)
        *_, needs = cut(ctx.needs_input_grad, [5, 3, len(flat)])
        body, flags = Body.decode(*ctx.body), [any(part) for part in cut(needs, ctx.counts)]
        need = Needs.of([True, True, *flags], body.on_input)
        call = GradCall(grad.contiguous(), x, weights, h, order, offsets, *stacks(cut(flat, ctx.counts)), need, body)
        way = _Way(handle, x.shape[0], ctx.tokens, ctx.terms, ctx.layer, place)
        computed = in_parts(call, way) if grad.device.type in autograd.IN_PARTS else way.whole(call)
        d_x, d_weights, *d_flat = autograd.grads_for([True, True, *flags], (1, 1, *ctx.counts), computed)
        return None, None, None, None, None, d_x, None, d_weights, *d_flat


class _Way(autograd.Here):
    """Between own tokens and the rows that arrived."""

    def __init__(self, handle: Sequence[Tensor], arrivals: int, tokens: int, terms: str, layer: str, place: Tensor | None) -> None:
        self.handle, self.arrivals, self.tokens, self.how, self.place = handle, arrivals, tokens, (terms, layer), place

    def rows(self, call: RowsCall) -> tuple[Tensor, Iterator[Tensor]]:
        grad, *found = ops.ep_backward_rows.default(*call.pack(), self.handle, self.arrivals, *self.how, place=self.place)
        return grad, iter(found)

    def lists(self, call: InCall, rows: list[Tensor]) -> tuple[list[Tensor], Iterator[Tensor]]:
        found = ops.ep_backward_in.default(*call.pack(), rows, self.handle, self.tokens, *self.how, place=self.place)
        return found[: len(rows)], iter(found[len(rows) :])

    def whole(self, call: GradCall) -> list[Tensor]:
        """Where backward of experts is one op."""
        scale = Terms.parse(self.how[0]).scale()
        (grad,) = ops.ep_send.default([call.grad], self.handle, self.arrivals, scale, *self.how, place=self.place)
        d_x, d_weights, *lists = ops.experts_backward.default(*call._replace(grad=grad).pack())
        back = ops.ep_give_back.default([d_x, d_weights], self.handle, self.tokens, 1 / scale, *self.how, place=self.place)
        return [*back, *lists]


def without_results(backward: torch.fx.GraphModule) -> None:
    """Have forward, computed again in a graph of backward, make only what is read there."""
    for op in (ops.ep_experts_forward.default, ops.ep_experts_forward_compiled.default):
        for node in backward.graph.find_nodes(op="call_function", target=op):
            if not any(user.args[1] == 0 for user in node.users):
                node.kwargs = {**node.kwargs, "result": False}
                out = node.meta["val"][0]
                node.meta["val"] = [out.new_empty((0, *out.shape[1:])), *node.meta["val"][1:]]
    backward.recompile()


def differentiated(call: ExpertsCall, how: tuple[Any, ...], recompute: bool) -> Tensor:
    """The call [T, N], recorded by autograd; ``how``: (place, slots, terms, layer)."""
    tensors, counts, *body, dtype = call.pack()
    return _Spread.apply(how, recompute, counts, tuple(body), dtype, *tensors)  # type: ignore[no-any-return,no-untyped-call]


in_backward(without_results)
for _name in SPREAD:
    never_dead(getattr(ops, _name).default)
    never_dead(getattr(ops, f"{_name}_compiled").default)
implement("ep_experts_forward", kernel=_forward, fake=_forward_fake, autograd=not_differentiable("ep_experts_forward"))
implement("ep_backward_rows", kernel=_backward_rows, fake=_backward_rows_fake, autograd=not_recorded("ep_backward_rows"))
implement("ep_backward_in", kernel=_backward_in, fake=_backward_in_fake, autograd=not_recorded("ep_backward_in"))
