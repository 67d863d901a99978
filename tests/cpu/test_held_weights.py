"""Weights that are tensors of a class of their own: read by what the program's product makes of them, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moefuse.config import Options
from moefuse.passes.match import encodings
from tests.cpu.test_packed_fused import Compiled
from tests.programs import held
from tests.programs.held import KINDS, NEAR, STACKED, Loop, Stacked

WORDS = {
    "int8": "s8, a scale for each channel",
    "float8": "e4m3, a scale for each channel",
    "scales behind": "s8, a scale for each channel",
    "nibbles": f"u4, groups of {held.G} with zeros",
    "nested": f"u4, groups of {held.G} with zeros",
    "levels": f"lut16, groups of {held.G}",
}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def _x(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, held.H).to(dtype)


class Near(Compiled):
    """As :class:`Compiled`, to the precision of the dtype."""

    def check(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            got, want = self.run(x), self.model(x)
        rtol = 1e-4 if x.dtype == torch.float32 else 0.03
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * float(want.abs().max()) if len(x) else 0)
        return got


def _encoding(compiled: Compiled) -> list[str]:
    assert not compiled.report.skipped, str(compiled.report)
    return [fused.spec.encoding for fused in compiled.report.fused]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_has_its_own(kind: str) -> None:
    """The op reads the tensors that they are made of, and no class is asked to unpack any."""
    compiled = Near(Loop(KINDS[kind], torch.float32 if kind == "levels" else torch.bfloat16))
    compiled.check(_x(5, torch.float32 if kind == "levels" else torch.bfloat16))
    assert _encoding(compiled) == [WORDS[kind]]
    assert len(compiled.ops) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", STACKED)
def test_stacks(kind: str) -> None:
    """One stack for each part, views of what the class has."""
    compiled = Near(Stacked(KINDS[kind]))
    for tokens in (7, 1):
        compiled.check(_x(tokens))
    assert _encoding(compiled)[0] == WORDS[kind]
    assert all(isinstance(op.args[3], list | tuple) and len(op.args[3]) == 1 for op in compiled.ops)


def test_hit_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over experts with tokens: where a kernel is there; else it stays, and the report says why."""
    for devices, fused in ((("cpu",), 1), ((), 0)):
        torch._dynamo.reset()
        monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", devices)
        compiled = Near(Loop(KINDS["int8"], hit=True), captured=True)
        compiled.check(_x(5))
        assert len(compiled.ops) == fused, str(compiled.report)
    assert "no kernel is quicker than to unpack those that have tokens" in compiled.report.skipped[0].message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", NEAR)
def test_near_misses_stay(kind: str) -> None:
    """Rows that the class rounds as well, and numbers that are no product with a scale."""
    compiled = Near(Loop(NEAR[kind]))
    compiled.check(_x(5))
    assert not compiled.ops
    (skipped,) = compiled.report.skipped
    assert skipped.code == "quantised"
    assert ("rounded to few bits in each call" if "rounds" in kind else "are made of q int8[32, 32], s float32[32, 1]") in skipped.message


def test_the_option_leaves_them_alone() -> None:
    compiled = Near(Loop(KINDS["int8"]), options=Options(quantised="off"))
    compiled.check(_x(5))
    assert not compiled.ops
    assert "`quantised` is off" in compiled.report.skipped[0].message


def test_one_expert_that_is_held_otherwise() -> None:
    """The op has one encoding for a projection."""
    model = Loop(KINDS["int8"])
    model.experts[3].up = nn.Parameter(KINDS["float8"]((held.M, held.H), torch.bfloat16), requires_grad=False)
    compiled = Near(model)
    compiled.check(_x(5))
    assert not compiled.ops
    assert [s.code for s in compiled.report.skipped] == ["encoding-unsupported"], str(compiled.report)


@pytest.mark.parametrize("which", [0, 3])
def test_one_expert_that_is_plain(which: int) -> None:
    """It is what the refusal names, whichever it is, beside the class of the others."""
    model = Loop(KINDS["int8"])
    model.experts[which].up = nn.Parameter(torch.randn(held.M, held.H).bfloat16(), requires_grad=False)
    compiled = Near(model)
    compiled.check(_x(5))
    assert not compiled.ops
    (skipped,) = compiled.report.skipped
    assert (skipped.code, f"experts.{which}" in skipped.module) == ("quantised", True)
    others = type(model.experts[1].up).__name__
    assert f"`experts.{which}.up`" in skipped.message
    assert f"is a plain tensor in bfloat16, beside others that are held as `{others}`" in skipped.message


def test_parts_are_read_in_each_call() -> None:
    """Codes that are written to, and other tensors in their place, are followed; what is held in another way is compiled again."""
    model = Loop(KINDS["int8"])
    compiled = Near(model)
    x = _x(5)
    before = compiled.check(x)
    model.experts[1].up.data.q.add_(3)
    assert not torch.equal(before, compiled.check(x))
    for expert in model.experts:
        expert.down = nn.Parameter(KINDS["int8"]((held.H, held.M), torch.bfloat16), requires_grad=False)
    again = compiled.check(x)
    assert not torch.equal(before, again)
    for expert in model.experts:
        down: Any = expert.down
        down.q = down.q.to(torch.float8_e4m3fn)
    compiled.check(x)
    assert compiled.report.fused[-1].spec.encoding.count("e4m3") == 1, "an encoding of the old dtype would have read other numbers"


def test_another_default_device() -> None:
    """What is made up is made on the CPU."""
    compiled = Near(Loop(KINDS["nibbles"]))
    x = _x(5)
    with torch.device("meta"), torch.no_grad():
        compiled.run(x)
    assert len(compiled.ops) == 1, str(compiled.report)


@pytest.mark.code_elsewhere
def test_gradients_of_tokens() -> None:
    """The base is frozen, tokens and the router are not."""
    model = Loop(KINDS["int8"], torch.float32)
    compiled = torch.compile(model, backend="moefuse", dynamic=False)
    found = []
    for run in (compiled, model):
        x = torch.linspace(-1, 1, 5 * held.H).view(5, held.H).requires_grad_()
        out = run(x)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, model.router.weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
