"""More ranks than experts: every E ranks of a mesh have all experts, and the gradients of these copies are averaged.

Tokens stay in their group. Gradients are averaged over the copies when a backward pass ends, in the order of the plan: in which order they
become ready may differ from rank to rank, and torch's collectives are matched by their order alone. Averaging twice changes nothing, so
gradients may be accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.runtime.collectives import all_reduce
from moefuse.runtime.transports.base import lost_peers


@dataclass(frozen=True)
class Average:
    """Every backward pass ends with gradients of a layer's experts that are the mean over a group of ``copies`` ranks."""

    layer: str
    group: Any
    copies: int

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do so for these Parameters, in an order that is the same on all ranks; those that it is done for already are left alone."""
        parameters = [p for p in parameters if p.requires_grad]
        if all(any(hasattr(hook, _AVERAGES) for hook in _torch_private.hooks_of_gradients(p)) for p in parameters):
            return
        waiting: set[int] = set()

        def done() -> None:
            ready = [p for p in parameters if id(p) in waiting]
            waiting.clear()
            for parameter in ready:
                with lost_peers(self.layer, "experts that other ranks have as well"):
                    _mean(parameter, self.group, self.copies)

        def ready(parameter: Tensor) -> None:
            if not waiting:
                _torch_private.when_backward_ends(done)
            waiting.add(id(parameter))

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_hook(ready))


_AVERAGES = "_moefuse_averages"


def _hook(ready: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    hook: Callable[[Tensor], None] = torch.compiler.disable(ready)
    setattr(hook, _AVERAGES, True)
    return hook


def _mean(parameter: nn.Parameter, group: Any, copies: int) -> None:
    grad: Any = parameter.grad
    if grad is None:
        return
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    with torch.no_grad():
        total = local.contiguous()
        all_reduce(total, group)
        local.copy_(total.mul_(1 / copies))
