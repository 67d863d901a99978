"""Layers straight behind each other, with nothing in between: what one gives is what the next reads."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.model import MoE, build, gold, near_tie
from tests.programs.program import Program, invalid

TOKENS = 6


class Chain(nn.Module):
    """Layers of which each reads what the one before gave; with ``shared`` all go by the first one's router.

    They read rows [T, H] as they come, without the views that a layer of a :class:`Program` has around it.
    """

    def __init__(self, layers: list[MoE], shared: bool) -> None:
        super().__init__()
        self.layers, self.shared = nn.ModuleList(layers), shared

    def forward(self, x: Tensor) -> Tensor:
        routed: Any = None
        for layer in self.layers:
            routed = layer.router(x) if routed is None or not self.shared else routed
            x = layer.mix(layer.experts, x, routed)  # type: ignore[operator]
        return x

    def exact(self) -> Chain:
        """A float64 copy, each layer of which visits one routed slot at a time."""
        twin = copy.deepcopy(self)
        twin.layers = nn.ModuleList(gold(layer, plain=True) for layer in self.layers)  # type: ignore[arg-type]
        return twin


def fitted(programs: list[Program], shared: bool) -> list[Program] | None:
    """The programs with the widths, and where they share a router the experts, of the first; None where that is no program."""
    first = programs[0]
    same: dict[str, Any] = {"hidden": first.hidden, "tokens": (TOKENS,), "dtype": "float32"}
    if shared:
        same |= {"experts": first.experts, "top_k": first.top_k, "routing": first.routing}
    found = [replace(p, **same, noise=replace(p.noise, layout="features_last", pre_norm=False)) for p in programs]
    return None if any(invalid(p) or p.routing.recipe == "inputs" for p in found) else found


def chain(programs: list[Program], shared: bool) -> Chain:
    """Layers of these programs, one straight behind the other."""
    return Chain([build(p) for p in programs], shared)


def rows_for(model: Chain, seed: int) -> Tensor | None:
    """Rows [T, H] of which no router is in doubt; None if some are."""
    first: Any = model.layers[0]
    x = torch.randn(TOKENS, first.program.hidden, generator=torch.Generator().manual_seed(seed))
    rows = x
    for layer in [first] if model.shared else model.layers:
        with torch.no_grad():
            if near_tie(layer, gold(layer, plain=True), rows, 1e-4).any():
                return None
            rows = layer.mix(layer.experts, rows, layer.router(rows))
    return x
