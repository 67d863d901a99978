"""Whose router a stack of experts has, where the biases of experts look like one as well."""

from __future__ import annotations

import torch
from torch import nn

from moefuse.parallel.find import experts_of
from tests.dist import layers


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.zeros(5, 8, 12)), nn.Parameter(torch.zeros(5, 12))
        self.down, self.down_bias = nn.Parameter(torch.zeros(5, 12, 8)), nn.Parameter(torch.zeros(5, 8))


class Outside(nn.Module):
    """The router beside the module of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 5, bias=False), Stack()


def found(model: nn.Module) -> list[tuple[str, str, tuple[str, ...], int]]:
    return [(site.layer, site.name, site.names, site.widths[0]) for site in experts_of(model)]


NAMES = ("up", "up_bias", "down", "down_bias")


def test_a_router_in_a_module_beside_the_weights() -> None:
    """That of the next layer, which the module around has, is none of this one's."""
    model = layers.Model(layers.Transposed, 5)
    assert found(model) == [("first", "first", NAMES, 8), ("second", "second", NAMES, 8)]


def test_a_router_outside() -> None:
    assert found(nn.Sequential(Outside(), Outside())) == [("0", "0.experts", NAMES, 8), ("1", "1.experts", NAMES, 8)]
