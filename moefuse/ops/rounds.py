"""``moefuse::ep_experts``: experts on several ranks as one op.

    out [T, N] = ep_experts(x [T, H], ids [T, K], weights [T, K], local weights, .., place, slots, terms, layer, limit)

is ``ep_combine(experts(ep_dispatch(..)))``. Where it is differentiated it runs as the ops of ``moefuse/ops/spread.py``, else as
``ep_experts_infer``, all of which is one record of launches where rows travel through memory that ranks share
(``kernels/triton/launch/record.py``).

With a ``limit`` tokens travel in rounds. P ranks with at most M tokens each would have P * M rows arrive at once: every rank goes
ceil(M / C) rounds instead, whatever it has, of C tokens each, and behind its last one of padding. C is counted from ``limit`` in bytes,
sizes and P, which all ranks have alike. A token's result depends on its own data alone, so it is the same bit for bit wherever kernels
choose their tiles alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moefuse._torch_private import failures, never_dead
from moefuse.ops.autograd import below_autograd, ops, wants_grad
from moefuse.ops.experts import infer, result
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.checks import check_experts
from moefuse.ops.meaning.composite import flatten
from moefuse.ops.parallel import dispatched, refusing
from moefuse.ops.schema import implement
from moefuse.ops.spread import differentiated
from moefuse.runtime import transports
from moefuse.runtime.groups import Terms, said_of
from moefuse.runtime.peers import peers
from moefuse.runtime.transports import beside
from moefuse.runtime.transports.base import most_tokens

LEAST = 128
"""Tokens of the smallest round, and what rounds are multiples of: fewer would only read weights again."""


def tokens_of_a_round(call: ExpertsCall, world: int, limit: int) -> int:
    """C: most tokens that each of ``world`` ranks sends at once."""
    return max(limit // bytes_of_a_token(call, world) // LEAST, 1) * LEAST


def bytes_of_a_token(call: ExpertsCall, world: int) -> int:
    """What a round takes for each token of a rank: all ranks' rows, and partial sums; of these two sets, on their way back."""
    back = call.w_out.features * call.out_dtype.itemsize
    row = call.x.shape[1] * call.dtype.itemsize + call.top_k * (2 * call.ids.dtype.itemsize + call.weights.dtype.itemsize)
    return world * (max(row, back) + back)


def _infer(*given: Any) -> Tensor:
    *packed, place, slots, terms, layer, limit = given
    known, call = Terms.parse(terms), ExpertsCall.unpack(*packed)
    tokens = call.x.shape[0]
    with (
        peers(known, layer, said_of("ep_experts", terms), [call.x, call.weights, call.ids], place) as running,
        refusing(running, call.ids),
    ):
        _, _, hidden = check_experts(call, "ep_experts")
        most = most_tokens(known, tokens)
        step = most if limit is None else tokens_of_a_round(call, known.group.size, limit)
        if most <= step:
            return _round(replace(known, most=most) if known.most == "any" else known, call, place, slots)
        out = call.x.new_empty((tokens, hidden), dtype=call.out_dtype)
        for start in range(0, most, step):
            at, part = replace(known, most=min(step, most - start)), slice(start, start + step)
            out[part] = _round(at, call.of_tokens(part), place, slots)
    return out


def _round(terms: Terms, call: ExpertsCall, place: Tensor | None, slots: int) -> Tensor:
    hidden = beside.layer(terms, call, place, slots)
    if hidden is not None:
        return hidden
    arrived = dispatched(terms, [call.x, call.weights], call.ids, place, slots)
    here, handle = call._replace(x=arrived.rows[0], ids=arrived.ids, weights=arrived.rows[1]), arrived.handle
    del arrived
    y = infer(here)
    del here
    return transports.transport(terms).give_back(terms, [y], handle, call.x.shape[0])[0]


def _infer_fake(*given: Any) -> Tensor:
    return result(ExpertsCall.unpack(*given[:-5]))


def _kernel(*data: Any, **options: Any) -> Tensor:
    how, limit, _, body = _apart(**options)
    return _as_raised(*ExpertsCall.of(*data, **body).pack(), *how, limit)  # type: ignore[no-any-return]


_as_raised = failures.as_raised(ops.ep_experts_infer.default)


def _fake(*data: Any, **options: Any) -> Tensor:
    *_, body = _apart(**options)
    return result(ExpertsCall.of(*data, **body))


def _apart(
    *, terms: str, layer: str, limit: int | None = None, recompute: bool = False, place: Tensor | None = None, slots: int = 0, **body: Any
) -> tuple[tuple[Any, ...], int | None, bool, dict[str, Any]]:
    """(place, slots, terms, layer), what else is this op's own, and the options of ``moefuse::experts``."""
    return (place, slots, terms, layer), limit, recompute, body


def ep_experts(*data: Any, **options: Any) -> Tensor:
    """Autograd entry of ``moefuse::ep_experts``: x [T, H] to [T, N]."""
    if not wants_grad(flatten(data)):
        with below_autograd():
            return _kernel(*data, **options)
    how, _, recompute, body = _apart(**options)
    call = ExpertsCall.of(*data, **body)
    check_experts(call)
    return differentiated(call, how, recompute)


for _name in ("ep_experts", "ep_experts_infer"):
    never_dead(getattr(ops, _name).default)
implement("ep_experts", kernel=_kernel, fake=_fake, autograd=ep_experts)
implement("ep_experts_infer", kernel=_infer, fake=_infer_fake, autograd=None)
