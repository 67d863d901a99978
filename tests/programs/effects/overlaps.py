"""A tensor beside the tokens that the layer writes to, which lies in other memory in each call: apart, in the tokens, in a weight."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor, nn

from tests.programs.effects.layers import LOOPED, UNROLLED, E, H, Spelling

RELATED = "related"
"""The place before a call, where the caller gives each ``layer`` a tensor; the first such statement belongs to the first call."""

APART = ("torch.full((2, H), 0.5)", "torch.zeros(6, H)[2:4]")
WITHIN = (
    "x.data[:2]", "x.data[-2:]", "x.data[1:3]", "x.data[2:4]", "layer.w_in.data[0, :2]", "layer.w_in.data[1, 1:3]",
    "layer.gate.weight.data[:2]", "torch.from_numpy(x.detach().numpy()[:2])",
)  # fmt: skip
"""What the tensor is, of one size and one layout throughout: nothing but its place in memory tells calls apart."""

WRITES = ("self.side.mul_(0.5)", "self.side.add_(1)", "self.side[0] = 0.25", "self.side.data.neg_()", "self.side.view(-1)[3:8].zero_()")


def statements(rng: random.Random, spelling: Spelling) -> list[tuple[str, str]]:
    """(place, statement) of what the caller does before each call, and of a write."""
    given = [rng.choice(APART) if rng.random() < (0.7 if number == 0 else 0.25) else rng.choice(WITHIN) for number in range(3)]
    between = [place for place in spelling.places if place in LOOPED]
    place, write = rng.choice(between if between and rng.random() < 0.5 else spelling.places), rng.choice(WRITES)
    if place in LOOPED and spelling.body in UNROLLED and rng.random() < 0.7:
        write = f"if e == {rng.randrange(E)}: {write}"
    return [*((RELATED, f"layer.side = {value}") for value in given), (place, write)]


def relate(before: Sequence[str], number: int, model: nn.Module, x: Tensor) -> None:
    """What the caller does before a call with ``x``."""
    import torch

    for layer in model.children() if before else ():
        exec(before[min(number, len(before) - 1)], {"layer": layer, "x": x, "torch": torch, "H": H})
