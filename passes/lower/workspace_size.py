"""Memory that a call of a fused op takes in addition to its result, for the report: known from sizes alone, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.passes.graph.calls import fake
from moefuse.passes.lower.cost_gate import experts_call
from moefuse.runtime import providers
from moefuse.tuning.problem import hint

DEVICES = {"cuda"}


def workspace(new_nodes: Sequence[Node], grad: bool) -> tuple[int, int] | None:
    """(bytes, tokens): what one call in inference takes with the tokens that the graph was traced with.

    None where nothing is known: on other devices than CUDA, in training, or without the fused op. ``grad``: whether grad mode is on there.
    """
    call = experts_call(new_nodes)
    kernels = providers.triton_module("host.chunks") if call is not None and fake(call).device.type in DEVICES else ""
    if call is None or isinstance(kernels, str):
        return None
    from moefuse.kernels.triton.host.layout import DTYPES, device_of

    args: Any = torch.fx.node.map_arg(call.args, fake)
    tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,))]
    if (grad and any(t.requires_grad for t in tensors)) or args[0].dtype not in DTYPES or args[3][0].dtype != args[0].dtype:
        return None
    try:
        lists = [[like(t) for t in part] for part in args[3:9]]
        given: list[Any] = [*map(like, args[:3]), *lists]
        described = ExpertsCall.of(*given, **{**call.kwargs, "out_dtype": fake(call).dtype})
        return kernels.workspace_bytes(described, device_of(args[0].device)), described.x.shape[0]
    except Exception:  # sizes without a hint; a number for the report is no reason to stop the user's program
        return None


def like(t: Tensor) -> Tensor:
    """A tensor without memory of the sizes and strides that a fake one was traced with."""
    return torch.empty_strided([hint(s) for s in t.shape], [hint(s) for s in t.stride()], dtype=t.dtype, device="meta")
