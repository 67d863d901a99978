"""Noting a fused region for ``moefuse.warmup``: what it is, which of the user's tensors it reads, and what the program was."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import fake, location, module_path
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.cost_gate import experts_call, problem_and_grad
from moefuse.passes.lower.lower import Lowered
from moefuse.passes.lower.program import NotComparableError, name_of, origin, take_out, weak_tensor_of
from moefuse.tuning import sites
from moefuse.tuning.weak_tensor import WeakTensor

log = logging.getLogger(__name__)


def remember(
    ctx: Context, known: dict[Node, Any], assumptions: Sequence[Assumption], region: Region, emit: Emitter, lowered: Lowered
) -> None:
    """Note a region just before it is replaced. A failure here is no reason to stop anything: the region cannot be tuned then."""
    call, device = experts_call(emit.nodes), fake(region.value).device
    if call is None or device.type not in sites.DEVICES:
        return
    try:
        site = _site(ctx, known, assumptions, region, emit, lowered, call)
    except Exception:
        log.debug("a fused region cannot be tuned", exc_info=True)
        return
    if site is not None:
        sites.remember(site)


def _site(
    ctx: Context,
    known: dict[Node, Any],
    assumptions: Sequence[Assumption],
    region: Region,
    emit: Emitter,
    lowered: Lowered,
    call: Node,
) -> sites.Site | None:
    found = problem_and_grad(call, ctx.mode[region.anchor].grad)
    if found is None:
        return None
    lists: Any = call.args[3:9]
    device = fake(region.value).device
    weak = [tuple(weak_tensor_of(n, known) for n in part) for part in lists]
    made_from = [known.get(origin(n, known)) for part in lists for n in part]
    # A graph for any number of tokens and one for a fixed number are one program, and not one graph.
    key = name_of(region), found[0], fake(call).dtype, device, tuple(map(str, region.routing.tokens))
    program: Any = sites.programs.get(key)
    try:
        program = program or take_out(ctx, region, emit.nodes, lowered.result, known, assumptions)
        sites.programs[key] = program
    except NotComparableError as error:
        program = str(error)
    return sites.Site(
        module_path(region.anchor),
        location(region.anchor),
        lowered.spec,
        found[0],
        fake(call).dtype,
        (bool(lists[3]), bool(lists[4]), bool(lists[5])),
        device,
        _complete(weak),
        tuple(weakref.ref(t) for t in made_from if isinstance(t, torch.Tensor)),
        program,
        found[1],
    )


def _complete(lists: Sequence[tuple[WeakTensor | None, ...]]) -> tuple[tuple[WeakTensor, ...], ...] | None:
    """The operands, if every one of them is the user's own tensor."""
    whole = tuple(tuple(weak for weak in part if weak is not None) for part in lists)
    return whole if [len(part) for part in whole] == [len(part) for part in lists] else None
