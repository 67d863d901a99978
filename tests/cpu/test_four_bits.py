"""Operators of libraries that multiply weights of four bits in one dimension: what codes stand for is read from the running operator."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.passes.rules.rows import foreign_flat
from tests.cpu.test_fp8_operators import Compiled
from tests.programs import four_bits
from tests.programs.four_bits import BLOCK, Counting, Guarded, H, Hit, Loop, Lora, Matrix, Narrow, Noted, Row, Wide

HELD = f"lut16, groups of {BLOCK}"
APART = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(foreign_flat, "QUICKER", ("cpu",))  # these tests ask what is right


def operators(compiled: Compiled) -> list[torch.fx.Node]:
    return [n for gm in compiled.graphs for n in gm.graph.nodes if "gemm_4bit" in str(n.target)]


def is_fused(compiled: Compiled) -> None:
    assert [f.spec.encoding for f in compiled.report.fused] == [HELD], str(compiled.report)
    assert (operators(compiled), compiled.report.skipped) == ([], [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "nested"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_a_list_of_experts(dtype: torch.dtype, nested: bool) -> None:
    """One op on the storage; scales that are codes are computed once per call."""
    compiled = Compiled(Loop(dtype, nested=nested), captured=True)
    compiled.check(torch.randn(11, H).to(dtype), APART[dtype])
    is_fused(compiled)
    assert len(compiled.ops) == 1


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_the_storage_is_not_copied(nested: bool) -> None:
    """Views of one dimension: the op reads the memory of the parameters."""
    model = Loop(nested=nested)
    compiled = Compiled(model, captured=True)
    compiled.check(torch.randn(5, H).bfloat16(), 0.01)
    (op,) = compiled.ops
    for part in (3, 4, 5):
        for node in op.args[part]:
            assert node.op == "placeholder" or node.target in (torch.reshape, torch.detach), str(node.target)


def test_on_a_cpu_the_operator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is quicker there; the report says so."""
    monkeypatch.undo()
    compiled = Compiled(Loop(), captured=True)
    compiled.check(torch.randn(5, H).bfloat16(), 0.01)
    (lost,) = compiled.report.skipped
    assert (lost.code, compiled.report.fused) == ("encoding-unknown", [])
    assert "on cpu nothing is quicker than the operator" in lost.message


def test_a_loop_over_hit_experts_stays() -> None:
    """On a CPU: nothing is quicker there than the operator with those that have tokens."""
    compiled = Compiled(Hit(), captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.0)
    assert compiled.ops == []
    found = {(s.code, "on cpu no kernel is quicker" in s.message) for s in compiled.report.skipped}
    assert found == {("encoding-unknown", True)}, str(compiled.report)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [Matrix, Guarded])
def test_experts_with_biases(make: type[Matrix]) -> None:
    """The operator adds them itself."""
    model = Loop(make=make)
    for module in model.modules():
        if isinstance(module, Matrix):
            module.bias = nn.Parameter(torch.randn(module.shape[0]).bfloat16(), requires_grad=False)
    compiled = Compiled(model, captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.01)
    is_fused(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_a_product_that_is_not_called_without_rows(tokens: int) -> None:
    """Without rows both ways of its branch return the same: nothing, of the same shape. One token leaves most experts without."""
    compiled = Compiled(Loop(make=Guarded, nested=True), captured=True)
    compiled.check(torch.randn(tokens, H).bfloat16(), 0.01)
    if tokens:
        is_fused(compiled)


def test_any_number_of_tokens() -> None:
    """A graph for all sizes, and no tokens at all."""
    compiled = Compiled(Loop(make=Guarded), captured=True)
    for tokens in (11, 5, 0):
        x = torch.randn(tokens, H).bfloat16()
        torch._dynamo.mark_dynamic(x, 0) if tokens > 1 else None
        compiled.check(x, 0.01)
    assert compiled.ops


def test_a_square_weight_and_one_kind_beside_another() -> None:
    """Two tables in one expert are two encodings, and each is the operator's."""
    model = Loop()
    for expert in model.experts:
        expert.down.kind = "signs"
    compiled = Compiled(model, captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.01)
    assert len(compiled.ops) == 1
    names = compiled.ops[0].kwargs["encodings"]
    assert names[0] == names[1] != names[2]


def test_adapters_beside_them() -> None:
    """Low-rank terms are of the same op as the base, which is read as it is held."""
    compiled = Compiled(Loop(make=Lora), captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.02)
    assert [(f.tier, f.spec.encoding) for f in compiled.report.fused] == [("fused", HELD)], str(compiled.report)
    assert operators(compiled) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_projection_that_is_not_packed(dtype: torch.dtype) -> None:
    """In the same dtype it is a part of the op; in another one there is no op."""

    class Mixed(four_bits.Expert):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(four_bits.INNER, H, bias=False, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.down((F.silu(self.gate(x)) * self.up(x)).to(dtype)).to(x.dtype)

    model = Loop()
    model.experts = nn.ModuleList(Mixed() for _ in range(four_bits.E))
    compiled = Compiled(model, captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.01)
    if dtype == torch.bfloat16:
        is_fused(compiled)
        return
    assert not compiled.ops
    (lost,) = compiled.report.skipped
    assert (lost.code, "the projections of an expert compute in" in lost.message) == ("encoding-unsupported", True)


def test_storage_and_scales_are_live() -> None:
    """What is requantised in place is followed by the graph that is there."""
    model = Loop(nested=True)
    compiled = Compiled(model, captured=True)
    x = torch.randn(11, H).bfloat16()
    compiled.check(x, 0.01)
    model.experts[1].up.weight.data.copy_(model.experts[1].up.weight.flip(0))
    model.experts[2].up.absmax.mul_(2)
    model.experts[3].down.absmax_offset.add_(1)
    compiled.check(x, 0.01)
    assert len(compiled.graphs) == 1


class _Of(Matrix):
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.op = self.other


class Turned(_Of):
    other = four_bits.TURNED


class Bent(_Of):
    other = four_bits.BENT


class Other(_Of):
    other = four_bits.OTHER


class Squared(_Of):
    other = four_bits.SQUARED


class Straddling(Matrix):
    """Scales of more weights than a feature has inputs."""

    def __init__(self, n: int, k: int, **how: Any) -> None:
        super().__init__(n, k, **how)
        self.block = 4 * BLOCK
        self.absmax = self.absmax[: n * k // self.block].clone()


class Part(Matrix):
    """Scales that begin somewhere in the middle of a tensor."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.absmax = torch.cat((self.absmax, self.absmax))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight, self.shape, self.absmax[3 : 3 + len(self.absmax) // 2], self.block, self.kind)  # type: ignore[no-any-return]


NEAR = {
    "activations turned": (Turned, "encoding-unknown", "not a table of sixteen numbers times scales"),
    "scales squared": (Squared, "encoding-unknown", "not a table of sixteen numbers times scales"),
    "activations squared": (Bent, "verification-failed", "differs from its recognised meaning"),
    "arguments": (Other, "encoding-unknown", "is an operator that moefuse cannot look into"),
    "blocks": (Straddling, "encoding-unknown", f"with scales of {4 * BLOCK} weights"),
    "part of a tensor": (Part, "encoding-unknown", "a part of a tensor"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("near", NEAR)
def test_near_misses_stay(near: str) -> None:
    make, code, text = NEAR[near]
    compiled = Compiled(Loop(make=make), captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.0)
    assert (compiled.ops, compiled.report.fused) == ([], []), str(compiled.report)
    assert {(s.code, text in s.message) for s in compiled.report.skipped} == {(code, True)}, str(compiled.report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [Narrow, Wide, Row, Counting, Noted])
def test_other_ways_without_rows_stay(make: type[Matrix]) -> None:
    """What is returned, or done, without rows is not what products without rows are: the graph breaks as without moefuse."""
    compiled = Compiled(Loop(make=make), captured=True)
    x = torch.randn(1, H).bfloat16()
    if make in (Counting, Noted):
        compiled.check(x, 0.0)
    else:
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # as in eager, where features do not fit
            compiled.run(x)
    assert compiled.ops == []
    assert {s.code for s in compiled.report.skipped} == {"not-captured"}, str(compiled.report)


def test_the_option_leaves_them_alone() -> None:
    compiled = Compiled(Loop(), captured=True, quantised="off")
    compiled.check(torch.randn(11, H).bfloat16(), 0.0)
    assert not compiled.ops
    assert {(s.code, "`quantised` is off" in s.message) for s in compiled.report.skipped} == {("encoding-unknown", True)}


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_bitsandbytes(kind: str, nested: bool) -> None:
    """The library itself, in the layout that it has on every device."""
    library = pytest.importorskip("bitsandbytes")

    def make(n: int, k: int, dtype: torch.dtype) -> nn.Module:
        made = library.nn.Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type=kind, compress_statistics=nested)
        made.support_avx512bf16_for_cpu = False  # a layout of its own, in which a call would bring the weights
        return made.to("cpu").requires_grad_(False)

    model = Loop(make=lambda n, k, dtype: make(2 * n, k, dtype) if n == 96 else make(n, 2 * k, dtype))
    x = torch.randn(11, H).bfloat16()
    compiled = Compiled(model, captured=True)
    compiled.check(x, 0.01)
    assert [f.spec.encoding for f in compiled.report.fused] == [f"{'nf4' if kind == 'nf4' else 'lut16'}, groups of 64"], str(
        compiled.report
    )
    assert operators(compiled) == []
