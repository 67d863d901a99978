"""The cost gate: a region whose program was measured to be at least as fast as its replacement is left alone.

Only measurements decide, of this program on this device for about this many tokens (one bucket of T*K/E). They are the user's own, made by
``moefuse.warmup``, or of shipped ones. Without one the region passes. Where the number of tokens is symbolic, the one that the
graph was traced with decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.kernels.triton.config import table_times
from moefuse.kernels.triton.problem import Problem, problem_of
from moefuse.passes.graph.calls import fake, raw_name
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.program import name_of
from moefuse.tuning import store
from moefuse.tuning.entries import Pair, key_of


def device_name(device: torch.device) -> str | None:
    """What measurements of a device go by; None if there can be none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def experts_call(nodes: Sequence[Node]) -> Node | None:
    """The fused op among the nodes of a replacement, if it is one."""
    return next((n for n in nodes if n.target is torch.ops.moefuse.experts.default), None)


def problem_and_grad(call: Node, grad: bool) -> tuple[Problem, bool] | None:
    """(the problem of a fused op's call, whether it is differentiated); None if there is none. ``grad``: grad mode."""
    args: Any = torch.fx.node.map_arg(call.args, fake)
    tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,))]
    x, ids, _, w_in, _, w_out = args[:6]
    if w_in[0].dtype != x.dtype:
        return None  # nothing is measured of weights that are rounded as they are read
    try:
        problem = problem_of(x, ids, w_in, w_out, str(call.kwargs["gating"]))
    except (TypeError, ValueError):
        return None
    return problem, grad and any(t.requires_grad for t in tensors)


def not_faster(region: Region, new_nodes: Sequence[Node], grad: bool) -> dict[str, Any] | None:
    """Details of a refusal, if the region's program is at least as fast as its replacement. ``grad``: whether grad mode is on there."""
    call = experts_call(new_nodes)
    device = device_name(fake(region.value).device) if call is not None else None
    if call is None or device is None:
        return None
    found = problem_and_grad(call, grad)
    # Times are of the forward op alone.
    if found is None or found[1]:
        return None
    measured = measurement(device, found[0], name_of(region), grouped=any(raw_name(n).endswith("grouped_mm") for n in region.nodes))
    if measured is None or store.faster(measured[0]):
        return None
    pair, source = measured
    return {
        "program": f"{pair.program_us:.1f}",
        "fused": f"{pair.fused_us:.1f}",
        "tokens": pair.tokens,
        "device": device,
        "source": source,
    }


def measurement(device: str, problem: Problem, program: str, grouped: bool) -> tuple[Pair, str] | None:
    """(times, where they are from) of a program at a problem. ``grouped``: it is grouped products, whose times may be shipped."""
    mine = store.comparison(device, problem, program)
    if mine is not None:
        return mine, "measured here by moefuse.warmup"
    if not (grouped and problem.slots and problem.experts):
        return None
    shipped = (Pair(peer, us, p.tokens) for p, us, peer in table_times(device) if key_of(p) == key_of(problem))
    pair = next(shipped, None)
    return None if pair is None else (pair, "measured for the configurations that ship with moefuse")
