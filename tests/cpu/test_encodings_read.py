"""How weights in few bits are read: each form as it must be, each near miss refused, and the proof against a reader's mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from moefuse.ops.encoding import Packing, dequantise, parse
from moefuse.passes.encodings.part import emit, joined
from moefuse.passes.encodings.prove import drawn, holds
from moefuse.passes.encodings.read import Coded, Weight, read
from moefuse.passes.encodings.table import equal
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost
from tests.cpu.encoding_forms import FORMS, NEAR, Case, E, byte, grouped, nibbles, some


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


class Made(nn.Module):
    """A module that computes weights from what it holds."""

    def __init__(self, weight: Callable[..., Any], parts: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.weight = weight
        self.parts = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in parts)

    def forward(self) -> Any:
        return self.weight(*self.parts)


@dataclass
class Traced:
    """A graph as Dynamo makes it, what its inputs hold, and the nodes that it returns."""

    ctx: Context
    values: dict[Node, Tensor]
    returned: tuple[Node, ...]

    def value(self, node: Node) -> Tensor:
        return self.values[node]


def traced(weight: Callable[..., Any], parts: tuple[Tensor, ...]) -> Traced:
    found: list[Traced] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        returned: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
        found.append(Traced(Context(gm.graph), values, tuple(returned)))
        return gm.forward

    torch.compile(Made(weight, tuple(p.clone() for p in parts)), backend=backend, fullgraph=True)()
    return found[0]


def shown(coded: Coded, of: Traced) -> Tensor:
    """What an encoding says of what the model holds."""
    parts = [part.show(of.value(part.node)) for part in coded.parts]
    return dequantise(coded.encoding, parts[0], parts[1], parts[2] if len(parts) > 2 else None, coded.dtype)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    """Each is read as what it is: the text, the bits of the weight, views that alias, and the proof on made-up numbers."""
    case = FORMS[name]
    parts = case.parts()
    of = traced(case.weight, parts)
    coded = read(of.ctx, of.returned[0], case.order)
    assert isinstance(coded, Coded), coded
    assert str(coded.encoding).startswith(case.text or "?"), str(coded.encoding)
    assert parse(str(coded.encoding)) == coded.encoding
    want = case.weight(*parts).permute(case.order)
    assert want.shape == case.sizes[-want.dim() :]
    assert equal(shown(coded, of), want)
    weight = Weight(of.returned[0], case.order)
    assert holds(of.ctx, weight, coded, of.value)
    assert holds(of.ctx, weight, coded, drawn(coded))


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    """What is almost an encoding is refused by the operation that makes the difference."""
    case = NEAR[name]
    of = traced(case.weight, case.parts())
    lost = read(of.ctx, of.returned[0], case.order)
    if case.at == "":
        assert isinstance(lost, Coded)
        return
    assert isinstance(lost, Lost), str(lost)
    call = of.ctx.calls[lost.node]
    assert lost.code == "encoding-unknown"
    assert call is not None and call.name == case.at, lost.details
