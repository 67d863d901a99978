"""A model of transformers that checkpoints its layers, whose experts are spread, beside the same model on one process."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._functorch import config
from torch._inductor import compile_fx
from torch.distributed.tensor import DTensor

import moefuse
from tests.dist import equal, pretrained, scenes


def trained(rank: int, reentrant: bool, how: dict[str, Any]) -> tuple[float, float, str]:
    """(largest difference of a loss, of a gradient relative to its largest value, what was fused) in two steps of other sizes."""
    single = pretrained.single().train()
    model: Any = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh(), **how)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.compile(backend="moefuse")
    same = how.get("tokens") == "replicated"
    losses, worst = 0.0, 0.0
    for step in range(2):
        every = [_text(3 + step + (0 if same else 4 * r), 0 if same else r) for r in range(2)]
        model.zero_grad()
        single.zero_grad()
        with _as_it_is():
            loss = model(input_ids=every[rank], labels=every[rank]).loss
            loss.backward()
        wanted = [single(input_ids=text, labels=text).loss for text in every]
        torch.stack(wanted).mean().backward()
        losses = max(losses, abs(float(loss.detach() - wanted[rank].detach())))
        theirs = dict(single.named_parameters())
        for name, parameter in model.named_parameters():
            goal: Any = theirs[name].grad
            worst = max(worst, float((_whole(model, name, parameter.grad) - goal).abs().max() / goal.abs().max()))
    return losses, worst, moefuse.last_report().summary


def _text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(seed))


def _whole(model: nn.Module, name: str, grad: Any) -> torch.Tensor:
    """Of experts from all ranks; of the rest their mean, as data parallelism takes it."""
    if isinstance(grad, DTensor):
        ((_, whole),) = equal.full(model, name, grad)
        return whole
    mean: torch.Tensor = grad / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Inductor up to where it writes code, with its own partition of forward and backward."""

    def run(gm: torch.fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    inner = functools.partial(compile_fx.compile_fx, inner_compile=run)
    with mock.patch.object(compile_fx, "compile_fx", inner), config.patch(enable_autograd_cache=False):
        yield
