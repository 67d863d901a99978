"""Programs around quantised weights, put together at random: encodings times rows times where the weights are unpacked, near misses too.

Whatever is read, the results are those of the program; what has no mistake in it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from moefuse.config import Options
from moefuse.passes.match import encodings, whole_stacks
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.cpu.recorded_case import recorded
from tests.cpu.test_encodings_generated import E, K, N, Program, programs
from tests.cpu.test_packed_fused import Compiled
from tests.programs.packed_forms import GATHERED, WHOLE, Domain, Form

H, WIDE = K, N
Way = Literal["whole", "gathered", "each", "apart"]
Holder = Literal["parameters", "buffers", "attributes"]
EACH: tuple[Domain, ...] = ("loop", "masked")
EXAMPLES = 3 if settings().max_examples < 100 else 2500
POWERS = (116, 132)
"""Bytes whose powers of two are such that sums of products are numbers."""


@dataclass(frozen=True)
class Layer:
    """``apart``: each expert has tensors of its own. ``holder``: what these are to their module."""

    program: Program
    domain: Domain
    way: Way
    tokens: int
    holder: Holder = "parameters"


class Parts(nn.Module):
    """What holds a projection."""

    def __init__(self, parts: Iterator[Tensor], holder: Holder) -> None:
        super().__init__()
        self.names = list[str]()
        for i, part in enumerate(parts):
            self.names.append(f"part_{i}")
            if holder == "parameters":
                self.register_parameter(self.names[i], nn.Parameter(part, requires_grad=False))
            elif holder == "buffers":
                self.register_buffer(self.names[i], part)
            else:
                setattr(self, self.names[i], part)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]


class Generated(Form):
    """Two projections that the program says, and one in floating point."""

    def __init__(self, of: Layer) -> None:
        super().__init__("channel", of.domain, whole=of.way == "whole")
        self.of, self.experts, self.router = of, E, nn.Linear(H, E, bias=False)
        self.held = nn.ModuleList(Parts(self._parts(), of.holder) for _ in range(2))
        self.dtype = self.unpacked(self.held[0], 0).dtype
        self.last = nn.Parameter(torch.randn(E, H, WIDE).to(self.dtype), requires_grad=False)
        self.lasts = nn.ParameterList(nn.Parameter(one.clone(), requires_grad=False) for one in self.last)

    def _parts(self) -> Iterator[Tensor]:
        for i, part in enumerate(replace(self.of.program, stacked=True).parts()):
            held = part.clamp(*POWERS) if i == 1 and self.of.program.powers else part
            each = held.unbind() if self.of.way == "apart" else [held]
            yield from (one.clone() for one in each)

    def unpacked(self, held: nn.Module, index: int | Tensor) -> Tensor:
        assert isinstance(held, Parts)
        parts = held.tensors()
        if self.of.way == "apart":
            assert isinstance(index, int)
            return replace(self.of.program, stacked=False).weight(*parts[index::E])
        return replace(self.of.program, stacked=False).weight(*(part[index] for part in parts))

    def stacks(self) -> list[Tensor]:
        return [*(self.of.program.weight(*held.tensors()) for held in self.held), self.last]  # type: ignore[operator]

    def weights(self) -> list[Callable[[int | Tensor], Tensor]]:
        if self.all:
            return super().weights()
        first, second = self.held
        last = self.last.__getitem__ if self.of.way == "gathered" else self.lasts.__getitem__
        return [lambda i: self.unpacked(first, i), lambda i: self.unpacked(second, i), last]

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate.relu() * up


@st.composite
def layers(draw: st.DrawFn, *, misses: bool) -> Layer:
    way: Way = draw(st.sampled_from(["whole", "gathered", "each", "apart"]))
    domain = draw(st.sampled_from({"whole": WHOLE, "gathered": GATHERED}.get(way, EACH)))
    program = replace(draw(programs(misses=misses)), stacked=True)
    if program.block == (2, 1):  # its scales are larger than what holds the codes, which are then no quantised weights to moefuse
        program = replace(program, block=(4, 8))
    if program.miss == "expert" and way != "whole":  # of which one expert alone knows nothing
        program = replace(program, miss="add")
    holder: Holder = draw(st.sampled_from(["parameters", "buffers", "attributes"]))
    return Layer(program, domain, way, draw(st.sampled_from([1, 4])), holder)


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the op is always quicker. Layers are so small that threads wait for each other: beside other tests three times as long."""
    monkeypatch.setattr(whole_stacks, "READ", {"cpu": float("inf")})
    monkeypatch.setattr(whole_stacks, "BY_SLOT", {})
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _report(layer: Layer, *, traced: bool | None = None) -> FusionReport:
    """What becomes of the layer; its results are those of the program, within a few roundings of the dtype that it computes in.

    ``traced``: by Dynamo; None: all of a few, every tenth of many.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Generated(layer), torch.randn(layer.tokens, H)
    by_dynamo = (EXAMPLES < 100 or zlib.crc32(repr(layer).encode()) % 10 == 0) if traced is None else traced
    by_dynamo |= layer.holder == "attributes"  # which a recorded graph has no inputs for
    with torch.no_grad():
        ours, report = (_compiled if by_dynamo else _recorded)(model, x)
        theirs = model(x).double()
    bound = 1e-4 if model.dtype == torch.float32 else 0.03
    assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max() + 1e-30, str(report)
    return report


def _compiled(model: Generated, x: Tensor) -> tuple[Tensor, FusionReport]:
    compiled = Compiled(model)
    return compiled.run(x), compiled.report


def _recorded(model: Generated, x: Tensor) -> tuple[Tensor, FusionReport]:
    gm, inputs = recorded(model, x)
    report = rewrite.rewrite(gm, inputs, Options(), None)
    (out,) = gm(*inputs)
    return out, report


def _is_held(report: FusionReport) -> list[bool]:
    return [f.spec.encoding != "" for f in report.fused]


@settings(max_examples=EXAMPLES)
@given(layers(misses=False))
def test_layers(layer: Layer) -> None:
    """Every combination is read, and right."""
    report = _report(layer)
    assert _is_held(report) == [True], str(report)


@settings(max_examples=EXAMPLES)
@given(layers(misses=True))
def test_near_misses(layer: Layer) -> None:
    """What has a mistake in it stays, or is read as what it is."""
    _report(layer)


@pytest.mark.parametrize("way", ["loop", "sorted"])
def test_recorded_graphs_are_those_of_dynamo(way: Domain) -> None:
    """The same is found in them, and said."""
    layer = Layer(Program("u4", words=True, place="write", block=(4, 8), powers="pow"), way, "each" if way == "loop" else "gathered", 4)
    found = [_report(layer, traced=traced) for traced in (True, False)]
    ours, theirs = ([(f.tier, f.domain, f.spec) for f in report.fused] for report in found)
    assert ours == theirs
    assert len(ours) == 1
