"""Casts that make one id of several: top-k ids that go through bool are not distinct any more, and each slot still counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu.beside_eager import MoE, check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Merged(MoE):
    """``out[tok] +=`` adds one of a token's slots, and takes any."""

    def __init__(self) -> None:
        super().__init__(experts=2)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        ids = ids.bool().long()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


def test_ids_through_bool() -> None:
    check(Merged)
