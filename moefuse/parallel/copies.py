"""More ranks than experts: every E ranks of a mesh have all experts, and the gradients of these copies are averaged.

Tokens stay in their group. Gradients are averaged over the copies when a backward pass ends, in the order of the plan: in which order they
become ready may differ from rank to rank, and torch's collectives are matched by their order alone. Averaging twice changes nothing, so
gradients may be accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.runtime.collectives import all_reduce
from moefuse.runtime.peers import lost_peers


def average(parameters: Sequence[tuple[str, nn.Parameter]], group: Any, copies: int) -> None:
    """Let every backward pass end with gradients that are the mean over a group of ``copies`` ranks.

    Args:
        parameters: (name for errors, Parameter), in an order that is the same on all ranks.
    """
    waiting: set[int] = set()

    def done() -> None:
        ready = [(name, p) for name, p in parameters if id(p) in waiting]
        waiting.clear()
        for name, parameter in ready:
            with lost_peers(name, "experts that other ranks have as well"):
                _mean(parameter, group, copies)

    def ready(parameter: Tensor) -> None:
        if not waiting:
            _torch_private.when_backward_ends(done)
        waiting.add(id(parameter))

    for _, parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_hook(ready))


def _hook(ready: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    return torch.compiler.disable(ready)  # type: ignore[no-any-return]


def _mean(parameter: nn.Parameter, group: Any, copies: int) -> None:
    grad: Any = parameter.grad
    if grad is None:
        return
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    with torch.no_grad():
        total = local.contiguous()
        all_reduce(total, group)
        local.copy_(total.mul_(1 / copies))
