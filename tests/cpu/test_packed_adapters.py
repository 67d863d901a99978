"""Low-rank adapters on quantised experts (QLoRA): the base is multiplied as it is held; A, B, tokens and the router have gradients."""

from __future__ import annotations

import pytest
import torch

from moefuse.passes.match import encodings, whole_stacks
from tests.cpu.test_packed_fused import Compiled
from tests.programs.packed_adapters import Adapted, Beside, Summed
from tests.programs.packed_forms import H


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_stacks, "READ", {"cpu": float("inf")})
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))
    torch.manual_seed(0)


def check(model: Adapted, tokens: int, bound: float) -> Compiled:
    """Values and gradients within ``bound`` of the program's size; the op reads the base as it is held."""
    compiled, found = Compiled(model), []
    x = torch.randn(tokens, H, requires_grad=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    for run in (compiled.run, model):
        out = run(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, *trained))))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max() if ours.numel() else ours.shape == theirs.shape
    assert [(f.tier, f.spec.encoding != "") for f in compiled.report.fused] == [("fused", True)], str(compiled.report)
    assert not compiled.report.notes
    (gm,) = compiled.graphs
    (op,) = gm.graph.find_nodes(op="call_function", target=torch.ops.moefuse.experts_extended.default)
    assert len(op.kwargs["scales"]) == 3
    assert any(op.kwargs["encodings"])
    return compiled


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tokens", [0, 1, 3, 9])
@pytest.mark.parametrize("held", ["nibbles", "channel"])
def test_beside_each_expert(held: str, tokens: int) -> None:
    """However many experts have a token."""
    check(Beside(held, whole=False), tokens, 1e-5)


def test_beside_experts_of_a_stack() -> None:
    check(Beside("block", whole=True), 9, 1e-5)


@pytest.mark.thorough
def test_in_16_bits() -> None:
    """Factors in float32 beside a base in bfloat16: terms are not rounded where the program's are, no more."""
    check(Beside("block", whole=False, dtype=torch.bfloat16), 9, 0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("held", ["nibbles", "levels"])
def test_in_the_weight(held: str) -> None:
    """Neither the base nor the sum is made."""
    compiled = check(Summed(held), 9, 1e-5)
    (gm,) = compiled.graphs
    gm.graph.eliminate_dead_code()
    assert not [n for n in gm.graph.nodes if n.target is torch.bmm]


def test_a_base_that_is_trained_is_none() -> None:
    """Its scales have gradients, which no op gives: that sum is made as before, and told."""
    model = Summed("channel")
    base = model.bases[0]
    base.parts[1].requires_grad_()  # type: ignore[union-attr, index, operator]
    compiled = Compiled(model)
    out = compiled.run(torch.randn(9, H))
    out.sum().backward()
    assert base.parts[1].grad is not None  # type: ignore[union-attr, index]
    (op,) = compiled.graphs[0].graph.find_nodes(op="call_function", target=torch.ops.moefuse.experts_extended.default)
    assert [name == "" for name in op.kwargs["encodings"]] == [True, False, False], str(compiled.report)
    assert any("low-rank adapters is made" in note for note in compiled.report.notes)
