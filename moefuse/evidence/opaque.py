"""What in a graph without mixture-of-experts code moefuse could not look into: the cause that a user reads where nothing was found."""

from __future__ import annotations

import torch

from moefuse import _torch_private
from moefuse.evidence.few_bits import few_bits

_KNOWN = frozenset(("aten", "prims", "prim", "moefuse", "inductor", "higher_order", "_c10d_functional", "fsdp"))


def opaque(gm: torch.fx.GraphModule) -> list[str]:
    """What in a graph moefuse cannot look into, the widest first."""
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    ops = [t for t in targets if isinstance(t, _torch_private.OpOverload | _torch_private.OpOverloadPacket)]
    names = list(dict.fromkeys(str(t).partition(".")[::2] for t in ops))
    found = [f"`{space}.{name}` is an operator that moefuse cannot look into" for space, name in names if space not in _KNOWN]
    aten = sum(1 for space in (str(t).partition(".")[0] for t in ops) if space == "aten")
    if aten * 2 > len(targets):
        found.insert(0, "the graph is of ATen operations (an exported program, or one that was traced before), of which moefuse reads few")
    held = (n.meta.get("example_value") for n in gm.graph.nodes if n.op in ("placeholder", "get_attr"))
    packed = next((v for v in held if isinstance(v, torch.nn.Parameter) and v.dim() >= 2 and few_bits(v.dtype)), None)
    if packed is not None:
        found.append(f"weights are quantised ({str(packed.dtype).removeprefix('torch.')})")
    if any(isinstance(t, _torch_private.HigherOrderOperator) for t in targets):
        kinds = dict.fromkeys(t.name() for t in targets if isinstance(t, _torch_private.HigherOrderOperator))
        found.append(f"`{next(iter(kinds))}` runs it as a function of its own")
    return found
