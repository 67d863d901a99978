"""The projections of a call in few bits, as kernels read them that make experts in two products."""

from __future__ import annotations

from typing import Any, NamedTuple

from moefuse.kernels.triton.host import coded, linear
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.linear import Weight
from moefuse.ops.meaning.call import ExpertsCall


class Projections(NamedTuple):
    """Gate and up, which are one where they are not apart, and the last; with their biases in that order."""

    first: Held
    second: Held
    last: Held
    biases: tuple[Weight | None, Weight | None, Weight | None]


MIXED = "a projection is in floating point, has a low-rank term, or gate and up are held in two ways"


def known(call: ExpertsCall) -> Projections:
    """Of a call of which a kernel has refused nothing."""
    it = of_call(call)
    assert it is not None, "refusal() comes first"
    return it


def of_call(call: ExpertsCall) -> Projections | None:
    """None where one kernel does not read gate and up together, or a projection is in floating point or has a term (:data:`MIXED`)."""
    body = call.body
    if any(stack.term is not None for stack in call.stacks):
        return None
    every = call.stacks if body.split else (call.w_in, call.w_out)
    held = [coded.held(stack.weight, stack.codes) for stack in every if stack.codes is not None]
    if len(held) < len(every):
        return None
    first, second = held[0], held[1] if body.split else held[0]
    if body.split and form_of(first) != form_of(second):
        return None
    b_in, b_up, b_out = (linear.weight(s.bias, 1) if s.bias else None for s in call.stacks)
    return Projections(first, second, held[-1], (b_in, b_in if body.gating == "merged" else b_up, b_out))


def form_of(held: Held) -> tuple[Any, ...]:
    """What two projections must have in common that one kernel reads together."""
    parts = (held.storage, held.scale, *((held.zero,) if held.zero else ()))
    return held.codes.encoding, held.features, *((p.operand, p.tensors[0].dtype) for p in parts)
