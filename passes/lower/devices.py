"""Whether a replacement can run where the model is: every op of ours in it needs a kernel for that device that never waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.passes.graph.calls import fake
from moefuse.runtime import providers

_DIFFERENTIATED = {
    "experts": ("experts_forward", "experts_backward_rows", "experts_backward_in", "experts_backward_out"),
    "experts_extended": ("experts_extended_forward", "experts_extended_backward"),
    "permute": ("permute",),
    "grouped_linear": ("grouped_linear", "grouped_linear_backward"),
    "grouped_linear_coded": ("grouped_linear_coded", "grouped_linear_coded_backward"),
    "expert_rows": ("expert_rows", "expert_rows_backward"),
    "combine": ("combine", "combine_backward"),
    "topk": ("topk",),
    "route": ("route",),
}
"""What an op of a replacement runs as when a gradient is wanted; the first of them takes the arguments of the op itself."""


def _extended(*data: Any, recompute: bool = False, **options: Any) -> ExpertsCall:
    return ExpertsCall.of_extended(*data, **options)


_CALLS: Mapping[str, Callable[..., tuple[Any, ...]]] = {"experts": ExpertsCall.of, "experts_extended": _extended}
"""The call that providers take instead of the arguments of an op."""


def unsupported(new_nodes: Sequence[Node], grad: bool) -> tuple[str, str] | None:
    """(device, reason) if an op among ``new_nodes`` has no kernel for its device. ``grad``: whether grad mode is on there."""
    for node in new_nodes:
        target = node.target
        if not isinstance(target, _torch_private.OpOverload) or target.namespace != "moefuse":
            continue
        args = torch.fx.node.map_arg(node.args, fake)
        tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, torch.Tensor)]
        device = tensors[0].device.type
        if device == "cpu":
            continue
        name = str(target).split(".")[1]
        if name not in providers.PROVIDERS:
            continue  # made of torch's operators, which are everywhere
        differentiated = grad and any(t.requires_grad for t in tensors)
        names = _DIFFERENTIATED[name] if differentiated else (name,)
        missing = _missing(names, device)
        if missing:
            return device, f"no kernel for {missing}{' (training)' if differentiated else ''}"
        if (reason := _refusal(names[0], _CALLS.get(name), args, node.kwargs, device)) is not None:
            return device, reason
    return None


def _missing(names: Iterable[str], device: str) -> str | None:
    return next((name for name in names if all(p.device != device for p in providers.PROVIDERS[name])), None)


def _refusal(
    name: str, call: Callable[..., tuple[Any, ...]] | None, args: Sequence[object], options: Mapping[str, object], device: str
) -> str | None:
    """Why no kernel of the device takes this very call; it is asked with fake tensors."""
    first: str | None = None
    given = (*args, *options.values()) if call is None else (call(*args, **options),)
    for provider in providers.PROVIDERS[name]:
        if provider.device == device:
            answer = provider.supports(*given)
            if answer is None:
                return None
            first = first or answer
    return first
