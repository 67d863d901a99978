"""A program with inputs and weights that are one rounding off: what eager makes of those says how much of its error is luck."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.programs.model import MoE, gold

COUNT = 16


def nearby(model: MoE, inputs: tuple[Tensor, ...], autocast: torch.dtype | None = None) -> Iterator[tuple[MoE, tuple[Tensor, ...]]]:
    """Copies in which every value is multiplied by 1 + eps or 1 - eps, at random; only those whose experts do not hang on rounding.

    ``autocast``: the dtype whose eps is meant, if it is not that of the values.
    """
    for seed in range(COUNT):
        generator, twin = torch.Generator().manual_seed(seed), copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.copy_(moved(p, generator, autocast))
            given = tuple(moved(t, generator, autocast) for t in inputs)
            same = _one_choice(twin, given)
        if same:
            yield twin, given


def moved(t: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
    """Values that are one rounding off; integers as they are."""
    if not t.is_floating_point():
        return t
    sign = torch.randint(0, 2, t.shape, generator=generator) * 2.0 - 1
    return (t.double() * (1 + torch.finfo(dtype or t.dtype).eps * sign)).to(t.dtype)


def _one_choice(model: MoE, inputs: tuple[Tensor, ...]) -> bool:
    """Whether the router chooses the same experts in float64."""
    if len(inputs) > 1:
        return True
    exact = gold(model, plain=True)
    here, there = model.router(model.prepare(inputs[0])), exact.router(exact.prepare(inputs[0].double()))
    return torch.equal(here.ids, there.ids)
