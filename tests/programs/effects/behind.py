"""A model that writes to the tokens of its layers behind them, in its own frame: before the backward pass, which needs what they were."""

from __future__ import annotations

import linecache
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.programs.effects.layers import H
from tests.programs.effects.overlaps import APART, RELATED, WITHIN

BEHIND = "behind"
"""The place behind the layers."""

TOKENS = ("x.data", "x.data[1:3]", "x.data.view(-1)[2:9]", "torch.from_numpy(x.detach().numpy())", "torch.from_dlpack(x.detach())[:2]")
WRITES = ("{}.mul_(0.5)", "{}.add_(1)", "{}.zero_()", "{}.neg_()", "{}[...] = 0.25")


def statements(rng: random.Random) -> list[tuple[str, str]]:
    """(place, statement): a write to the tokens themselves, or to what the caller gave, which lies in them in some calls."""
    if rng.random() < 0.5:
        return [(BEHIND, rng.choice(WRITES).format(rng.choice(TOKENS)))]
    given = [rng.choice(WITHIN if rng.random() < 0.5 else APART) for _ in range(3)]
    return [*((RELATED, f"layer.side = {value}") for value in given), (BEHIND, rng.choice(WRITES).format("self[0].side"))]


def model(written: str, layers: Sequence[nn.Module]) -> nn.Module:
    """The layers one behind the other, and what is written behind them. What eager keeps of the tokens themselves is frozen then."""
    if not written:
        return nn.Sequential(*layers)
    for layer in layers:
        for linear in (layer.gate, layer.shared):
            linear.requires_grad_(False)
    lines = "\n".join("    " + line for line in written.splitlines())
    source = f"def forward(self, x):\n    out = nn.Sequential.forward(self, x)\n{lines}\n    return out\n"
    name = f"<behind {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "H": H}
    exec(compile(source, name, "exec"), space)
    found: nn.Module = type("Behind", (nn.Sequential,), {"forward": space["forward"]})(*layers)
    return found
