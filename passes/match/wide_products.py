"""What autocast leaves in float32, and so the fused op too: products it has no rule for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moefuse.passes.graph.calls import location, tensor
from moefuse.passes.graph.modes import autocast_dtype
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Linear, walk
from moefuse.passes.ir.regions import Region


def notes(ctx: Context, fused: Sequence[Region]) -> list[str]:
    """A note for each fused region that computes in float32 under autocast, as its program does, with the spellings that do not."""
    found = []
    for region in fused:
        products = {e.node: value for e in walk(region.expr) if isinstance(e, Linear) and (value := tensor(e.node)) is not None}
        if not products or any(value.dtype != torch.float32 for value in products.values()):
            continue
        node, value = next(iter(products.items()))
        dtype = autocast_dtype(ctx.mode[node], value.device.type)
        if dtype is not None and dtype != torch.float32:
            name = str(dtype).removeprefix("torch.")
            found.append(
                f"experts are computed in float32 under autocast to {name} at {location(region.anchor)}, as without moefuse: autocast has "
                f"no rule for what multiplies them (grouped_mm); a loop or a batched product of the same experts is fused in {name} "
                '(transformers: model.set_experts_implementation("eager"))'
            )
    return list(dict.fromkeys(found))
