"""Experts whose weights a program unpacks one by one: the op multiplies what is stored, with the program's own bits, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.passes.match import encodings
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.programs import packed
from tests.programs.packed import SPELLINGS, Gated

FEW_BITS = [spelling for spelling in SPELLINGS if spelling != "floats"]
OP = torch.ops.moefuse.experts_extended.default


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over hit experts too, which are left alone here for they would not be faster."""
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))
    torch.manual_seed(0)


class Compiled:
    """A model by moefuse's pass, its graphs run by torch as they are."""

    def __init__(self, model: nn.Module, *, captured: bool = False, options: Options | None = None, dynamic: bool | None = None) -> None:
        self.report, self.graphs, self.model = FusionReport(), [], model
        options = options or Options()

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            self.report.extend(rewrite.rewrite(gm, example_inputs, options, entry.frame()))
            self.graphs.append(gm)
            return gm.forward

        if captured:
            entry.enable(backend, lambda _arguments: options, lambda found, *_: self.report.extend(found))
        self.run = torch.compile(model, backend=backend, fullgraph=not captured, dynamic=dynamic)

    def check(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            got = self.run(x)
            torch.testing.assert_close(got, self.model(x), rtol=1e-4, atol=1e-4)
        return got

    def check_gradients(self, x: Tensor, *parameters: Tensor) -> None:
        """To the tokens, and to these."""
        x.requires_grad_()
        found = []
        for run in (self.run, self.model):
            out = run(x)
            found.append((out, *torch.autograd.grad(out.square().sum(), (x, *parameters))))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    @property
    def ops(self) -> list[torch.fx.Node]:
        return [node for gm in self.graphs for node in gm.graph.nodes if node.target is OP]


@pytest.mark.every_value
@pytest.mark.parametrize("hit", [False, True], ids=["each", "hit"])
@pytest.mark.parametrize("spelling", FEW_BITS)
def test_what_is_stored_is_multiplied(spelling: str, hit: bool) -> None:
    """Two tokens have four slots for five experts; a loop over hit experts unpacks those alone, however many tokens there are."""
    compiled = Compiled(Gated(spelling, hit=hit), captured=hit)
    compiled.check(torch.randn(11 if hit else 2, packed.H))
    assert [f.spec.encoding != "" for f in compiled.report.fused] == [True], str(compiled.report)
    assert len(compiled.ops) == 1


def test_nothing_is_unpacked_beside_the_op() -> None:
    """What the program unpacked is read by nobody any more."""
    compiled = Compiled(Gated("nibbles"))
    compiled.check(torch.randn(2, packed.H))
    (gm,) = compiled.graphs
    gm.graph.eliminate_dead_code()
    assert not [n for n in gm.graph.nodes if getattr(n.target, "__name__", str(n.target)) in ("and_", "bitwise_and", "rshift", "stack")]


def test_storage_is_live() -> None:
    """Requantised weights are followed by the graph that is there."""
    model = Gated("nibbles")
    compiled = Compiled(model)
    x = torch.randn(2, packed.H)
    before = compiled.check(x)
    model.gate.parts[0].data.add_(3)
    model.down.parts[1].data.mul_(2)
    assert not torch.equal(before, compiled.check(x))
    assert len(compiled.graphs) == 1


@pytest.mark.code_elsewhere
@pytest.mark.parametrize("spelling", ["channel", "levels"])
def test_gradients_of_tokens(spelling: str) -> None:
    """A frozen base: tokens and the router have gradients, and the op is differentiated."""
    model = Gated(spelling)
    compiled = torch.compile(model, backend="moefuse", dynamic=False)
    found = []
    x = torch.randn(2, packed.H, requires_grad=True)
    for run in (compiled, model):
        out = run(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, model.router.weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    report = moefuse.last_report()
    assert report is not None
    assert [f.spec.encoding != "" for f in report.fused] == [True]
    assert "held as" in str(report)


class Computed(Gated):
    """Scales and zeros that the program computes of small tensors."""

    def __init__(self, way: str, *, hit: bool = False) -> None:
        super().__init__("channel", hit=hit)
        self.way = way

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        ways = {
            "a number": lambda q, s: q.float() * (s * (1 / 127)),
            "another scale": lambda q, s: q.float() * (s * s[:1]),
            "zeros behind": lambda q, s: q.float() * s - s,
            "computed zeros behind": lambda q, s: q.float() * s - (s + 0.01),
        }
        gate, up, down = (ways[self.way](*(part[e] for part in layer.parts)) for layer in (self.gate, self.up, self.down))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["a number", "another scale", "zeros behind", "computed zeros behind"])
def test_what_scales_are_computed_of(way: str) -> None:
    """The program computes them, as before, and the op reads them; changes of what they are made of are followed."""
    model = Computed(way)
    compiled = Compiled(model)
    x = torch.randn(2, packed.H)
    before = compiled.check(x)
    assert len(compiled.ops) == 1, str(compiled.report)
    model.up.parts[1].data.mul_(2)
    assert not torch.equal(before, compiled.check(x))


def test_what_is_computed_for_hit_experts_alone_stays() -> None:
    """Scales that the body of a loop computes are those of one expert."""
    compiled = Compiled(Computed("a number", hit=True), captured=True)
    compiled.check(torch.randn(11, packed.H))
    assert not compiled.ops
    assert "makes scales that are no tensor of the model's as they are" in compiled.report.skipped[0].message


class Near(Gated):
    """One statement off what is read."""

    def __init__(self, near: str) -> None:
        super().__init__("channel")
        self.near = near

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        ways = {
            "added": lambda q, s: q.float() + s,
            "clamped": lambda q, s: (q.float() * s).clamp(-0.5, 0.5),
            "twice": lambda q, s: q.float() * q.float() * s,
        }
        gate, up, down = (ways[self.near](*(part[e] for part in layer.parts)) for layer in (self.gate, self.up, self.down))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("near", ["added", "clamped", "twice"])
def test_near_misses_stay(near: str) -> None:
    """They are no encoding: unpacked by the program as before, and told."""
    compiled = Compiled(Near(near))
    compiled.check(torch.randn(2, packed.H))
    assert not compiled.ops
    assert [s.code for s in compiled.report.skipped] == ["encoding-unknown"], str(compiled.report)


def test_the_option_leaves_them_alone() -> None:
    compiled = Compiled(Gated("channel"), options=Options(quantised="off"))
    compiled.check(torch.randn(2, packed.H))
    assert not compiled.ops
    assert "`quantised` is off" in compiled.report.skipped[0].message


def test_scales_that_are_trained_are_left_alone() -> None:
    """The op has no gradients of these."""
    model = Gated("channel")
    model.up.parts[1].requires_grad_()
    compiled = Compiled(model)
    out = compiled.run(torch.randn(2, packed.H))
    out.sum().backward()
    assert model.up.parts[1].grad is not None
    assert not compiled.ops
    assert "is trained" in compiled.report.skipped[0].message


def test_codes_in_one_buffer_are_left_alone() -> None:
    """Nothing guards that an attribute stays where it lies in the memory of another one, which an op would read it by. (It was an internal
    error.)"""
    model = Gated("channel")
    layers = (model.gate, model.up, model.down)
    flat = torch.cat([layer.parts[0].flatten() for layer in layers])
    for layer, part in zip(layers, flat.view(3, packed.E, packed.H, packed.H), strict=True):
        layer.parts[0] = nn.Parameter(part, requires_grad=False)
    compiled = Compiled(model)
    x = torch.randn(2, packed.H)
    compiled.check(x)
    assert not compiled.ops
    assert "lies in the memory of another input" in compiled.report.skipped[0].message
    model.up.parts[0] = nn.Parameter(flat[: packed.E * packed.H**2].view(packed.E, packed.H, packed.H).clone(), requires_grad=False)
    compiled.check(x)


def test_a_loop_over_hit_experts_stays_where_it_is_as_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch alone unpacks them as the program does, and took up to 2.3 times as long."""
    monkeypatch.undo()
    compiled = Compiled(Gated("channel", hit=True), captured=True)
    compiled.check(torch.randn(11, packed.H))
    assert not compiled.ops
    assert "no kernel is quicker than to unpack those that have tokens" in compiled.report.skipped[0].message
