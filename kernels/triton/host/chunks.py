"""Calls whose workspace would be larger than the user allows (MOEFUSE_WORKSPACE_MIB), as several calls on fewer tokens each.

Each chunk has the configuration of the whole call. A token's result depends on nothing but that configuration and the token's own data, so
the result is the same, bit for bit. The smallest chunk has :data:`ROWS` tokens, whatever is allowed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host.layout import Device
from moefuse.kernels.triton.host.plan import Plan
from moefuse.machine.environment import workspace
from moefuse.ops.meaning.call import ExpertsCall

ROWS = 256
"""Chunks begin at multiples of this: addresses in them are aligned as in the whole call."""


allowed = workspace
"""Bytes that the workspace of a call may have; None if the user sets no limit."""


def chunked(plan: Plan, call: ExpertsCall) -> Plan | ChunkedPlan:
    """The plan itself if its workspace is small enough, else one in chunks."""
    limit = allowed()
    if limit is None or plan.empty or plan.workspace.size <= limit or plan.tokens <= ROWS:
        return plan
    return ChunkedPlan(plan, call, limit)


def workspace_bytes(call: ExpertsCall, device: Device) -> int:
    """What a call of these kinds of tensors (on the meta device) takes beside its result."""
    plan = chunked(Plan(call, device=device), call)
    return plan.workspace.size if isinstance(plan, Plan) else max(part.workspace.size for part in plan.plans)


class ChunkedPlan:
    """All calls of one kind, in equal chunks and a rest."""

    def __init__(self, whole: Plan, call: ExpertsCall, limit: int) -> None:
        self.whole, tokens = whole, whole.tokens

        def part(first: int, last: int) -> Plan:
            return Plan(call.of_tokens(slice(first, last)), whole.config)

        step = -(-tokens // (2 * ROWS)) * ROWS
        while (plan := part(0, step)).workspace.size > limit and step > ROWS:
            step = max(step // (2 * ROWS), 1) * ROWS
        rest = tokens % step
        self.step = step
        self.plans = [plan] * (tokens // step) + ([part(tokens - rest, tokens)] if rest else [])

    def run(self, call: ExpertsCall) -> Tensor:
        """The output [T, N]."""
        call = self.whole.uniform(call)
        out = torch.empty((self.whole.tokens, self.whole.out), dtype=self.whole.out_dtype, device=call.device)
        for i, plan in enumerate(self.plans):
            rows = slice(i * self.step, i * self.step + plan.tokens)
            plan.run(call.of_tokens(rows), out[rows])
        return out
