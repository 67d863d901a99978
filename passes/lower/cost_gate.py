"""The cost gate: a region whose program was measured to be at least as fast as its replacement is left alone.

On CUDA only measurements decide, of this program on this device for about this many tokens (one bucket of T*K/E). They are the user's own,
made by ``moefuse.warmup``, or of shipped ones. Without one the region passes. Where the number of tokens is symbolic, the one that the
graph was traced with decides for all.

On a CPU a rule decides, of sizes that are known: where each expert is one product, a call of an op costs as much as some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.kernels.triton.config import table_times
from moefuse.passes.graph.calls import fake, raw_name
from moefuse.passes.graph.op_classes import FILLS, METADATA, MODES, RESHAPES
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Linear, walk
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.program import name_of
from moefuse.tuning import store
from moefuse.tuning.entries import Pair, key_of
from moefuse.tuning.problem import Problem, problem_of

LOOPED = 8
"""Fewer experts of one product each, in a layer that is compiled alone, are trained faster in their loop than by the ops
(``benchmarks/small_loops_cpu.py --train``): in 0.8 of the time with two, 0.9 with four, the same with eight. In inference the ops are
1.0 to 1.4 times as fast from two on."""
ROUTER = 6
"""A graph with no more operations besides is a router's and its experts'. What more there is, is compiled in pieces where the loop breaks
the graph: with a norm, a projection and two sums around it, a layer with two such experts is trained 1.2 times as fast by the ops."""


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


def looped(ctx: Context, region: Region) -> bool:
    """Whether a loop over each expert's own rows, which breaks graphs, is faster than the ops on a CPU."""
    products = [e for e in walk(region.expr) if isinstance(e, Linear)]
    few = len(products) == 1 and region.domain == "selected" and region.rest is None and region.all_experts < LOOPED
    trained = ctx.mode[region.anchor].grad and region.trained
    return few and trained and fake(region.value).device.type == "cpu" and _beside(ctx, region) <= ROUTER


def _beside(ctx: Context, region: Region) -> int:
    """How much the graph computes besides."""
    moved = RESHAPES | METADATA | FILLS | MODES | {"getitem"}
    computed = [n for n, call in ctx.calls.items() if call is not None and call.name not in moved and n not in region.nodes]
    return sum(isinstance(fake(n), torch.Tensor | tuple | list) for n in computed)


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
