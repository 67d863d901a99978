"""Experts with low-rank terms for few slots on CUDA: the matrix-vector products of ``moefuse::experts`` with terms, and nothing sorted.

A launch for each factor A makes u, in the accumulation dtype; what reads a weight adds the term before it rounds. Factors are read where
they are, in their own dtype. (For many rows ``extended_products.py`` copies them first, since every tile of rows reads them again.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.config import choose, vectors
from moefuse.kernels.triton.device import gemv
from moefuse.kernels.triton.device.structs import Blocks, Experts, Factor, Rows, Stored
from moefuse.kernels.triton.host import plan_vectors
from moefuse.kernels.triton.host.layout import device_of, in_triton
from moefuse.kernels.triton.host.linear import Weight, weight
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.launch.calls import launch
from moefuse.ops.meaning.call import ExpertsCall, Term, columns
from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.tuning.problem import Config, power_of_two, problem_of

MOST_SLOTS, MOST_ROWS = 64, 2.0
"""Slots, and mean rows of an expert that has any, up to which vectors are taken where ``moefuse::experts`` would take tiles: its tiles do
not sort first, those of terms do."""


RANKS, INPUTS = 4, 512
"""Of a block of A."""


class _Expand(NamedTuple):
    """The factor B of a term, as a product takes it."""

    factor: Factor = Factor()
    at: Experts | None = None
    b: Tensor | None = None

    def pointer(self, other: Tensor) -> Tensor:
        """B, or ``other`` where there is none, which is not read."""
        return other if self.b is None else self.b


def blocks_of(call: ExpertsCall) -> Config | None:
    """The blocks of vectors for a call; None where there are too many slots, or experts that these kernels do not read."""
    (hidden, inter), slots = call.w_out.weight[0].shape[-2:], call.ids.numel()
    if not (slots and hidden and inter and call.x.shape[1]) or call.held != call.dtype:
        return None
    if any(len(w) > 1 and not weight(w, dims).operand.uniform for w, dims in zip(call.lists, (2, 2, 2, 1, 1, 1), strict=True)):
        return None
    if call.body.split and any((len(a) > 1) != (len(b) > 1) for a, b in ((call.lists[0], call.lists[1]), (call.lists[3], call.lists[4]))):
        return None
    p, device = problem_of(call.x, call.ids, call.w_in.weight, call.w_out.weight, call.body.gating), device_of(call.x.device)
    found = choose(p, device.name, device.hopper, device.shared, call.x.element_size())
    if found.bm and (p.slots > MOST_SLOTS or p.rows > MOST_ROWS):
        return None
    rule = vectors(p)
    up = rule.up if found.bm else found.up
    down = rule.down if found.bm or found.down.parts else found.down
    return Config(0, up, down, pdl=device.hopper)


def experts(call: ExpertsCall, config: Config | None = None) -> Tensor:
    """The output [T, H] of a call that :func:`blocks_of` takes."""
    config = config or blocks_of(call)
    assert config is not None
    plan = Plan(call, config)
    terms = [stack.term or Term() for stack in call.stacks]
    x, body = call.x, call.body
    slots, out = call.ids.numel(), torch.empty((plan.tokens, plan.out), dtype=call.out_dtype, device=x.device)
    h = torch.empty((slots, plan.inter), dtype=x.dtype, device=x.device)
    u = torch.empty((slots, call.ranks), dtype=accumulation_dtype(x.dtype), device=x.device)
    w_in, w_up, w_out = (weight(s.weight) if s.weight else None for s in (call.w_in, call.w_up, call.w_out))
    b_in, b_up, b_out = (weight(s.bias, 1) if s.bias else None for s in (call.w_in, call.w_up, call.w_out))
    assert w_in is not None
    assert w_out is not None
    routed, parts = {"ids": call.ids, "weights": call.weights}, columns(call.stacks)
    for term, part in zip(terms[:2], parts[:2], strict=True):
        _shrink(plan, x, routed, term, u, part, tokens=True)
    gate = _expand(terms[0], u, parts[0], config.up.bn)
    up = _expand(terms[1], u, parts[1], config.up.bn) if body.split else gate
    first, given = w_in.pointer, (b_in or w_in).pointer
    launch(
        gemv.up_vectors,
        plan_vectors.up_grid(plan, config.up),
        {"x": x, **routed, "w_a": first, "w_b": (w_up or w_in).pointer, "b_a": given, "b_b": b_up.pointer if b_up else given}
        | {"u": u, "f_a": gate.pointer(first), "f_b": up.pointer(first), "h": h},
        warps=config.up.warps,
        stages=max(config.up.stages, 1),
        pdl=plan.pdl,
        **plan_vectors.up_numbers(plan, config.up, ((gate.factor, gate.at), (up.factor, up.at))),
    )
    _shrink(plan, h, routed, terms[2], u, parts[2])
    last = _expand(terms[2], u, parts[2], config.down.bn * config.down.at)
    launch(
        gemv.down_vectors,
        plan_vectors.down_grid(plan, config.down),
        {"h": h, **routed, "w": w_out.pointer, "b": (b_out or w_out).pointer, "u": u, "f": last.pointer(w_out.pointer), "out": out},
        warps=config.down.warps,
        stages=max(config.down.stages, 1),
        pdl=plan.pdl,
        **plan_vectors.down_numbers(plan, config.down, (last.factor, last.at)),
    )
    return out


def _columns(w: Weight, term: Term, u: Tensor, part: slice, block: int = 16) -> Factor:
    of = in_triton(w.tensors[0].dtype)
    return Factor(term.rank, part.start, u.shape[1], w.operand.table, of, min(power_of_two(term.rank), block))


def _expand(term: Term, u: Tensor, part: slice, outputs: int) -> _Expand:
    """``outputs``: of one program, whose block of B is in registers while it streams the weights."""
    if not term.rank:
        return _Expand()
    b = weight(term.b)
    return _Expand(_columns(b, term, u, part, 64 if outputs <= 32 else 16), Experts(*b.strides), b.pointer)


def _shrink(plan: Plan, x: Tensor, routed: Mapping[str, Tensor], term: Term, u: Tensor, part: slice, tokens: bool = False) -> None:
    """The columns of u of one term; ``tokens``: x is [T, K] with the routing weight where the body has it on the input."""
    if not term.rank:
        return
    a, inputs = weight(term.a), x.shape[1]
    bn, bk = min(power_of_two(term.rank), RANKS), min(power_of_two(inputs), INPUTS)
    even = term.rank % bn == 0, inputs % bk == 0
    launch(
        gemv.shrink_vectors,
        (plan.slots, -(-term.rank // bn)),
        {"x": x, **routed, "a": a.pointer, "u": u},
        pdl=plan.pdl,
        top_k=plan.top_k,
        E=plan.experts,
        K=inputs,
        at_x=Rows(*x.stride()),
        at_ids=plan.strides_ids,
        at_weights=plan.strides_weights,
        at_a=Experts(*a.strides),
        scale=term.scale,
        TOKENS=tokens,
        SCALE=tokens and plan.body.on_input,
        term=_columns(a, term, u, part),
        stored=Stored(a.operand.table, a.operand.aligned, a.operand.wide or plan.wide()),
        blocks=Blocks(bn, bk, 2, *even, plan.pdl),
    )
