"""What the probe sees: a misreading that the values of a fresh model hide, and everything of a region that the program around it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from moefuse.passes import driver, replacement
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import ExpertVector, Expr, Linear, Op, SharedVector
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.lower import Lowering
from moefuse.passes.match.lift import lift
from moefuse.passes.prove import surroundings, synthetic_inputs
from tests.cpu.test_verify import Light

E, K, H = 3, 2, 8


class Loop(nn.Module):
    """A loop over experts with H inner features; every vector of it is neutral in a new model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.w_in = nn.ParameterList(torch.randn(H, H) for _ in range(E))
        self.w_out = nn.Parameter(torch.randn(E, H, H))
        self.bias = nn.Parameter(torch.zeros(E, H))
        self.scale, self.shift = nn.Parameter(torch.ones(H)), nn.Parameter(torch.zeros(H))
        self.start = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = x.tanh() * self.start
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = F.linear(torch.tanh(F.linear(x[tok], self.w_in[e])), self.w_out[e]) + self.bias[e]
            out = out.index_add(0, tok, (y * self.scale + self.shift) * weights[tok, slot, None])
        return out


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def without(name: str, kind: type[Expr]) -> Callable[[Any], Any]:
    """A reading that leaves out the operation on a value of some kind."""

    def read(expr: Any) -> Any:
        if isinstance(expr, Op):
            left = [a for a in expr.args if not isinstance(a, kind)]
            if expr.name == name and len(left) < len(expr.args):
                return read(left[0])
            return replace(expr, args=tuple(map(read, expr.args)))
        return replace(expr, child=read(expr.child)) if isinstance(expr, Linear) else expr

    return read


def reversed_experts(expr: Any) -> Any:
    """A reading that takes the last expert for the first."""
    if isinstance(expr, Op):
        return replace(expr, args=tuple(map(reversed_experts, expr.args)))
    if isinstance(expr, Linear):
        leaf = expr.weight
        return replace(expr, child=reversed_experts(expr.child), weight=replace(leaf, parts=leaf.parts[::-1]))
    return expr


def transposed_weights(expr: Any) -> Any:
    """A reading that takes rows of the last projection for columns."""
    if isinstance(expr, Op):
        return replace(expr, args=tuple(map(transposed_weights, expr.args)))
    return replace(expr, weight=replace(expr.weight, order=expr.weight.order[::-1])) if isinstance(expr, Linear) else expr


def misread(monkeypatch: pytest.MonkeyPatch, change: Callable[[Context, Region], Region]) -> None:
    """A bug in a rule: every region is something else than it is."""

    def wrong(ctx: Context) -> Iterator[Any]:
        for found in lift(ctx):
            yield change(ctx, found) if isinstance(found, Region) else found

    monkeypatch.setattr(driver, "lift", wrong)


def of_expression(change: Callable[[Any], Any]) -> Callable[[Context, Region], Region]:
    return lambda _, region: replace(region, expr=change(region.expr))


def set_weights(model: Loop, name: str, value: Callable[[Tensor], Tensor]) -> None:
    found = getattr(model, name)
    with torch.no_grad():
        for p in found if isinstance(found, nn.ParameterList) else [found]:
            p.copy_(value(p))


def fused(model: nn.Module, *args: Tensor) -> Light:
    light = Light()
    with torch.no_grad():
        torch.compile(model, backend=light, fullgraph=True)(*(args or (torch.randn(5, H),)))
    return light


READINGS: dict[str, tuple[Callable[[Context, Region], Region], str, Callable[[Tensor], Tensor]]] = {
    "a scale of ones left out": (of_expression(without("mul", SharedVector)), "scale", torch.ones_like),
    "a shift of zeros left out": (of_expression(without("add", SharedVector)), "shift", torch.zeros_like),
    "biases of zeros left out": (of_expression(without("add", ExpertVector)), "bias", torch.zeros_like),
    "a base of zeros left out": (lambda _, region: replace(region, base=None), "start", torch.zeros_like),
    "equal experts out of order": (of_expression(reversed_experts), "w_in", lambda w: torch.arange(H * H).view(H, H).sin()),
    "an identity transposed": (of_expression(transposed_weights), "w_out", lambda w: torch.eye(H).expand(E, H, H)),
    "experts of zeros transposed": (of_expression(transposed_weights), "w_out", torch.zeros_like),
    "experts of one number transposed": (of_expression(transposed_weights), "w_out", lambda w: torch.full_like(w, 0.3)),
}


@pytest.mark.parametrize("reading", READINGS)
def test_no_neutral_value_hides_a_misreading(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's first step would show it: the check must not pass because a new model has zeros and ones."""
    change, name, value = READINGS[reading]
    model = Loop()
    set_weights(model, name, value)
    assert len(fused(model).fused) == 1
    torch._dynamo.reset()
    misread(monkeypatch, change)
    light = fused(model)
    assert light.fused == []
    assert [s.code for s in light.skipped] == ["verification-failed"]
    assert "recognised meaning" in light.skipped[0].message


def test_neutral_experts_do_not_hide_a_wrong_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked weights that are all equal, which the op gets in the wrong order."""
    model = Loop()
    set_weights(model, "w_out", lambda w: w[:1].expand(E, H, H))
    right = Lowering.vectors
    monkeypatch.setattr(
        Lowering, "vectors", lambda self, leaf: [self.emit(torch.flip, n, (0,)) if leaf and leaf.stacked else n for n in right(self, leaf)]
    )
    assert [s.code for s in fused(model).skipped] == ["verification-failed"]


def test_the_users_values_are_kept_in_size_and_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a drawn value might saturate what the real one does not."""
    seen: dict[str, Tensor] = {}
    right = replacement.verify

    def look(ctx: Context, region: Region, new: Any, result: Node, known: dict[Node, Any], assumptions: Any, held: Any) -> Any:
        inputs = synthetic_inputs.Inputs(ctx, region, known)
        seen.update({str(n.target).split("_")[-2]: inputs.weight(n) for n in known})
        return right(ctx, region, new, result, known, assumptions, held)

    monkeypatch.setattr(replacement, "verify", look)
    model = Loop()
    set_weights(model, "scale", lambda w: torch.full_like(w, 300.0))
    set_weights(model, "shift", lambda w: -1e-6 * torch.rand_like(w))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert len(fused(model).fused) == 1
    assert 150 <= float(seen["scale"].min()) < float(seen["scale"].max()) <= 450
    assert -1.5e-6 <= float(seen["shift"].min()) < float(seen["shift"].max()) <= 0
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_copies_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for copies the real values are read, and no copy is made."""
    monkeypatch.setattr(synthetic_inputs, "COPIES", 0)
    for name in ("like", "perturbed"):
        monkeypatch.setattr(synthetic_inputs, name, lambda *_: pytest.fail("copied"))
    model = Loop()
    set_weights(model, "w_out", torch.zeros_like)
    assert len(fused(model).fused) == 1


def holds_half(ctx: Context, region: Region) -> Region:
    return replace(region, holders=(*region.holders, *(n for n in ctx.graph.nodes if n.name == "half")))


def writes_to_tokens(ctx: Context, region: Region) -> Region:
    return replace(region, nodes=region.nodes | {n for n in ctx.graph.nodes if n.name == "mul_"})


class Halved(Loop):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        half = out * 0.5
        return out, half + 1


class Written(Loop):
    def forward(self, x: Tensor) -> Any:
        h = x.sin()
        weights, ids = self.gate(h).softmax(-1).topk(K)
        dense = torch.zeros(x.shape[0], E).scatter(1, ids, weights)
        y = torch.einsum("teh,eih->tei", torch.einsum("th,eih->tei", h, self.w_out).tanh(), self.w_out)
        out = torch.einsum("te,teh->th", dense, y)
        h.mul_(2.0)
        return out, h


class Sorted(Loop):
    """The inverse permutation is written in place, belongs to the region, and is returned."""

    def forward(self, x: Tensor) -> Any:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        order = ids.reshape(-1).argsort(stable=True)
        ends = torch.bincount(ids.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
        rows = x[order // K].contiguous()
        y = torch._grouped_mm(rows.bfloat16(), self.w_out.bfloat16().transpose(-2, -1), offs=ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return (y[inverse].view(-1, K, H) * weights[..., None]).sum(1), inverse


def test_another_value_is_not_taken_for_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of every holder read the fused result, so every holder has to be equal to it."""
    assert len(fused(Halved()).fused) == 1
    torch._dynamo.reset()
    misread(monkeypatch, holds_half)
    (skipped,) = fused(Halved()).skipped
    assert skipped.code == "verification-failed"
    assert "`half` is read behind the layer as its result" in skipped.message


def test_nothing_older_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write in a region would be erased with it, though its tensor is older and read afterwards."""
    assert len(fused(Written()).fused) == 1
    torch._dynamo.reset()
    misread(monkeypatch, writes_to_tokens)
    (skipped,) = fused(Written()).skipped
    assert skipped.code == "verification-failed"
    assert "`h`, which is older than the layer, is changed in it" in skipped.message


def test_what_others_read_of_a_region_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inverse permutation that a layer makes by assignment, and that the program returns, with the assignment and without."""
    assert len(fused(Sorted()).fused) == 1
    torch._dynamo.reset()
    monkeypatch.setattr(
        surroundings.Around, "_with_writes", lambda self, nodes: {n for k in nodes for n in (k, *k.all_input_nodes)} & self.region.nodes
    )
    (skipped,) = fused(Sorted()).skipped
    assert "`inverse` is also read behind the layer" in skipped.message


class Started(nn.Module):
    """A vector added to the accumulator in place, before the experts."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.w = nn.Parameter(torch.randn(E, H, H))
        self.b = nn.Parameter(torch.full((H,), value))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        out.add_(self.b)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(x[tok], self.w[e]).tanh() * weights[tok, slot, None])
        return out


@pytest.mark.parametrize("values", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_an_equal_layer_does_not_speak_for_one_with_other_values(values: tuple[float, float]) -> None:
    """A base that is zero when compiled, in one layer or both, hid what the other's adds, and the next step of training."""
    model, x = nn.Sequential(*map(Started, values)), torch.randn(6, H)
    compiled = torch.compile(model, backend=Light(), fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        for layer in model:
            layer.b.add_(0.5)
        torch.testing.assert_close(compiled(x), model(x))


class Packed(nn.Module):
    """Weights of four bits, two in a byte, unpacked by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.register_buffer("packed", torch.randint(256, (E, H // 2, H), dtype=torch.uint8))
        self.zero, self.size = nn.Parameter(torch.full((E, H, 1), 7.5)), nn.Parameter(torch.rand(E, H, 1))

    def unpacked(self) -> Tensor:
        w = torch.empty(E, H, H)
        w[:, ::2] = (self.packed & 15).float()
        w[:, 1::2] = (self.packed >> 4).float()
        return (w - self.zero) * self.size

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        w, out = self.unpacked(), torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(x[tok], w[e]).tanh() * weights[tok, slot, None])
        return out


def test_weights_that_are_unpacked_by_assignment_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """What assigns is no data ancestor; without it the probe would run on uninitialised memory."""
    seen: list[Tensor] = []
    right = replacement.verify

    def look(ctx: Context, region: Region, new: Any, result: Node, known: dict[Node, Any], assumptions: Any, held: Any) -> Any:
        inputs = synthetic_inputs.Inputs(ctx, region, known)
        seen.extend(inputs.weight(n) for n in region.leaves if tuple(n.meta["example_value"].shape) == (E, H, H))
        return right(ctx, region, new, result, known, assumptions, held)

    monkeypatch.setattr(replacement, "verify", look)
    model, x = Packed(), torch.randn(5, H)
    packed = model.packed.clone()
    with torch.no_grad():
        light = Light()
        got = torch.compile(model, backend=light, fullgraph=True)(x)
        assert len(light.fused) == 1
        torch.testing.assert_close(got, model(x))
        (weight,) = seen
        assert torch.equal(weight, model.unpacked())
    assert torch.equal(packed, model.packed)
