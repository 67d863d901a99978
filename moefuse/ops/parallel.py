"""Experts on several ranks as operations: weights that are gathered, or tokens that travel. Fakes, registration, gradients.

    W [E, ...] = gathered(local [<=L, ...], place [E], L, terms)          what a sharded weight means: all of it
    *rows, ids, *handle = ep_dispatch([x [T, H], weights [T, K], ..], ids [T, K], place, L, terms, layer, trained)
    y [R, N]   = experts(rows[0], ids, rows[1], local weights, ..)         every rank's tokens, this rank's experts
    out [T, N] = ep_combine(y, handle, T, terms, layer)

P ranks with at most L experts each; ``place[e]`` is ``rank * L + local`` of expert e. R rows arrive, of all ranks, with id -1 for experts
of other ranks, for ids outside [0, E), and for padding, so that nothing is computed or read for them. The handle is what the transport has
to remember of who sent what (``moefuse/runtime/transports``). ``ep_combine`` adds what the ranks computed for a token, in the order of
ranks. Both sides compute the same function:

    ep_combine(experts(ep_dispatch(x, ids, w), local)) == experts(x, ids, w, gathered(local))

Gradients: dispatch and combine are adjoint, so backward of one is the other. On their way to the experts gradients are scaled
(``Terms.scale``), for an expert sees the tokens of all ranks, where data parallelism takes the mean over ranks; on their way back that is
taken out again. Which collectives backward has must not depend on what one rank alone wants gradients of, such as its tokens. So all
rows go back where anything of the region is differentiated: ``trained`` are the weights of the experts, of which nothing else is read; and
a dispatch that is differentiated on some ranks only is another call than that of the others (``runtime/words.py``). ``terms`` is the text
of :class:`moefuse.runtime.groups.Terms`; ``layer`` names the layer in errors.

All of them communicate, on every rank of the mesh, whatever it has; fakes do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import never_dead
from moefuse.ops.autograd import below_autograd, not_recorded, ops, wants_grad
from moefuse.ops.schema import TRAVELS, implement
from moefuse.runtime import lasting, overflow, providers, transports
from moefuse.runtime.groups import Terms, of_weight, said_of
from moefuse.runtime.peers import peers, told
from moefuse.runtime.ranks import numbers_dtype
from moefuse.runtime.transports.base import Dispatched
from moefuse.runtime.transports.weights import all_rows, own_rows
from moefuse.runtime.words import Call

TWICE = "expert-parallel ops can be differentiated once, not twice"


# -- weights


def _gathered(local: Tensor, place: Tensor, slots: int, terms: str) -> Tensor:
    known = Terms.parse(terms)
    with peers(known, "gathering the weights of experts", said_of("gathered", terms), [local], place):
        told(known, 0)  # a frame that broke gathers as often as it has graphs, and others may dispatch tokens
        return all_rows(known.group, local, place, slots)


def _gathered_fake(local: Tensor, place: Tensor, slots: int, terms: str) -> Tensor:
    return local.new_empty((place.shape[0], *local.shape[1:]))


def _gathered_backward(grad: Tensor, place: Tensor, slots: int, held: int, terms: str) -> Tensor:
    known = Terms.parse(terms)
    with peers(known, "reducing the gradients of experts", said_of("gathered_backward", terms), [grad], place):
        told(known, 0)  # in which order gradients are reduced depends on what each rank's loss depends on
        return own_rows(known.group, grad, place, slots, held).mul_(known.scale_gathered())


def _gathered_backward_fake(grad: Tensor, place: Tensor, slots: int, held: int, terms: str) -> Tensor:
    return grad.new_empty((held, *grad.shape[1:]))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, place: Tensor, slots: int, terms: str) -> Tensor:
        ctx.slots, ctx.terms, ctx.held = slots, terms, local.shape[0]
        ctx.save_for_backward(place)
        with below_autograd():
            return ops.gathered.default(local, place, slots, terms)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (place,) = ctx.saved_tensors
        return ops.gathered_backward.default(grad.contiguous(), place, ctx.slots, ctx.held, ctx.terms), None, None, None


def gathered(local: Tensor, place: Tensor, slots: int, terms: str) -> Tensor:
    """Autograd entry of ``moefuse::gathered``: local [L, ...] to [E, ...]."""
    if wants_grad((local,)):
        return _Gathered.apply(local, place, slots, terms)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.gathered.default(local, place, slots, terms)  # type: ignore[no-any-return]


# -- tokens


def local_ids(ids: Tensor, place: Tensor | None, slots: int, terms: str) -> Tensor:
    """[T, K]: the number of each expert among those of this rank, -1 for one that it does not have; without a table it has all."""
    if place is None:
        return ids.to(numbers_dtype(ids.dtype), copy=True, memory_format=torch.contiguous_format)
    local: Tensor = providers.run("local_ids", ids.contiguous(), place, Terms.parse(terms).group.rank * slots, slots)
    return local


def dispatched(terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
    """Rows to the ranks that have their experts; what arrives has this rank's numbers of them."""
    how, every = transports.transport(terms), terms.group.size * slots
    if terms.copied and place is not None and terms.transport != "symm":
        # Tables differ between ranks: the sender's says in which slots a token's experts are, and all ranks have all slots alike.
        ids = providers.run("local_ids", ids.contiguous(), place, 0, every)
        place = lasting.kept(_slots, (every, ids.device), ids.device, lambda: _all_slots(every, ids.device))
    arrived = how.dispatch(terms, rows, ids, place, slots)
    if arrived.local:
        return arrived
    return replace(arrived, ids=local_ids(arrived.ids, place, slots, terms.text), local=True)


_slots: dict[tuple[int, torch.device], Tensor] = {}


def _all_slots(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, dtype=torch.int32, device=device)


def _local_ids_fake(ids: Tensor, place: Tensor | None, slots: int, terms: str) -> Tensor:
    return ids.new_empty(ids.shape, dtype=numbers_dtype(ids.dtype))


@contextmanager
def refusing(call: Call, ids: Tensor) -> Iterator[None]:
    """Whoever raises in here before others have heard of its tokens tells them that none will come."""
    try:
        yield
    except Exception:
        if not call.said:
            with suppress(RuntimeError):  # what this rank has raised says more than that nobody listened
                transports.transport(call.terms).refuse(call.terms, ids)
        raise


def _check_rows(rows: Sequence[Tensor], ids: Tensor) -> None:
    if ids.dim() != 2 or ids.is_floating_point() or any(r.dim() < 1 or r.shape[0] != ids.shape[0] for r in rows):
        shapes = ", ".join(str(list(r.shape)) for r in rows)
        raise ValueError(f"ep_dispatch takes ids [T, K] of integers and rows [T, ..], not {ids.dtype} {list(ids.shape)} and {shapes}")


def _dispatch(
    rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int, terms: str, layer: str, trained: Sequence[Tensor] | None = None
) -> list[Tensor]:
    known = Terms.parse(terms)
    with peers(known, layer, said_of("ep_dispatch", terms), [*rows, ids], place) as call, refusing(call, ids):
        if (recorder := providers.recorder()) is not None and isinstance(known.bound, float):
            recorder.refuse("what came before may have been more rows than are kept")
        overflow.check(known)
        _check_rows(rows, ids)
        arrived = dispatched(known, rows, ids, place, slots)
    return [*arrived.rows, arrived.ids, *arrived.handle]


def _dispatch_fake(
    rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int, terms: str, layer: str, trained: Sequence[Tensor] | None = None
) -> list[Tensor]:
    known = Terms.parse(terms)
    how = transports.transport(known)
    arrivals: Any = how.arrivals(known, ids.shape[0])
    if isinstance(arrivals, int) and arrivals < 0:
        arrivals = torch.library.get_ctx().new_dynamic_size(min=0)
    ids_dtype = numbers_dtype(ids.dtype)
    local = ids.new_empty((arrivals, *ids.shape[1:]), dtype=ids_dtype)
    return [*(r.new_empty((arrivals, *r.shape[1:])) for r in rows), local, *how.handle(known, ids)]


def _send(
    rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float, terms: str, layer: str, *, place: Tensor | None = None
) -> list[Tensor]:
    """[T, F] each to [arrivals, F], scaled."""
    known = Terms.parse(terms)
    with peers(known, layer, "ep_send", rows, place):
        return transports.transport(known).send(known, rows, handle, arrivals, scale)


def _send_fake(rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, *_: Any, place: Tensor | None = None) -> list[Tensor]:
    return [r.new_empty((arrivals, *r.shape[1:])) for r in rows]


def _give_back(
    rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float, terms: str, layer: str, *, place: Tensor | None = None
) -> list[Tensor]:
    """[R, F] each to [tokens, F], scaled."""
    known = Terms.parse(terms)
    with peers(known, layer, "ep_give_back", rows, place):
        return transports.transport(known).give_back(known, rows, handle, tokens, scale)


def _give_back_fake(rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, *_: Any, place: Tensor | None = None) -> list[Tensor]:
    return [r.new_empty((tokens, *r.shape[1:])) for r in rows]


def _combine(y: Tensor, handle: Sequence[Tensor], tokens: int, terms: str, layer: str, *, place: Tensor | None = None) -> Tensor:
    return _give_back([y], handle, tokens, 1.0, terms, layer, place=place)[0]


def _combine_fake(y: Tensor, handle: Sequence[Tensor], tokens: int, *_: Any, place: Tensor | None = None) -> Tensor:
    return y.new_empty((tokens, *y.shape[1:]))


TRAINED = "with gradients"
"""Of a dispatch that is differentiated, for people and for the other ranks."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, place: Tensor | None, slots: int, terms: str, layer: str, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        rows = tensors[:count]
        with below_autograd():
            out = ops.ep_dispatch.default(rows, ids, place, slots, of_weight(terms, TRAINED), layer)
        ctx.tokens, ctx.terms, ctx.layer = ids.shape[0], terms, layer
        ctx.differ = [row.is_floating_point() and row.dtype.itemsize > 1 for row in rows]  # codes have no gradients
        ctx.mark_non_differentiable(*(o for o, differs in zip(out[:count], ctx.differ, strict=True) if not differs), *out[count:])
        ctx.save_for_backward(place, *out[count + 1 :])
        ctx.set_materialize_grads(True)
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        need = ctx.needs_input_grad[6:]
        sent = [g.contiguous() for g, differs in zip(grads, ctx.differ, strict=False) if differs]
        (place, *handle), scale = ctx.saved_tensors, 1 / Terms.parse(ctx.terms).scale()
        found = iter(ops.ep_give_back.default(sent, handle, ctx.tokens, scale, ctx.terms, ctx.layer, place=place))
        came = [next(found) if differs else None for differs in ctx.differ]
        wanted = [grad if wants else None for grad, wants in zip(came, need, strict=False)]
        return None, None, None, None, None, None, *wanted, *(None for _ in need[len(came) :])


def dispatch(
    rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int, terms: str, layer: str, trained: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Autograd entry of ``moefuse::ep_dispatch``: rows [T, F] and ids [T, K] to [R, F] and [R, K], and the handle."""
    if wants_grad((*rows, *(trained or ()))):
        return list(_Dispatch.apply(ids, place, slots, terms, layer, len(rows), *rows, *(trained or ())))  # type: ignore[no-untyped-call]
    with below_autograd():
        return ops.ep_dispatch.default(rows, ids, place, slots, terms, layer)  # type: ignore[no-any-return]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: int, terms: str, layer: str, place: Tensor | None, *handle: Tensor) -> Tensor:
        ctx.arrivals, ctx.terms, ctx.layer = y.shape[0], terms, layer
        ctx.save_for_backward(place, *handle)
        with below_autograd():
            return ops.ep_combine.default(y, handle, tokens, terms, layer, place=place)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        place, *handle = ctx.saved_tensors
        scale = Terms.parse(ctx.terms).scale()
        (back,) = ops.ep_send.default([grad.contiguous()], handle, ctx.arrivals, scale, ctx.terms, ctx.layer, place=place)
        return back, None, None, None, None, *(None for _ in handle)


def combine(y: Tensor, handle: Sequence[Tensor], tokens: int, terms: str, layer: str, *, place: Tensor | None = None) -> Tensor:
    """Autograd entry of ``moefuse::ep_combine``: y [R, H] to [T, H]."""
    if wants_grad((y,)):
        return _Combine.apply(y, tokens, terms, layer, place, *handle)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.ep_combine.default(y, handle, tokens, terms, layer, place=place)  # type: ignore[no-any-return]


for _name in ("gathered", "gathered_backward", *TRAVELS, *(f"{name}_compiled" for name in TRAVELS)):
    never_dead(getattr(ops, _name).default)

implement("gathered", kernel=_gathered, fake=_gathered_fake, autograd=gathered)
implement("gathered_backward", kernel=_gathered_backward, fake=_gathered_backward_fake, autograd=not_recorded("gathered_backward"))
implement("ep_local_ids", kernel=local_ids, fake=_local_ids_fake, autograd=None)
implement("ep_dispatch", kernel=_dispatch, fake=_dispatch_fake, autograd=dispatch)
implement("ep_combine", kernel=_combine, fake=_combine_fake, autograd=combine)
implement("ep_send", kernel=_send, fake=_send_fake, autograd=not_recorded("ep_send"))
implement("ep_give_back", kernel=_give_back, fake=_give_back_fake, autograd=not_recorded("ep_give_back"))
