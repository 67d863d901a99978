"""Training through weights of four bits: a library's function with a backward pass of its own is replaced where that is the gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefuse.passes.match import encodings
from moefuse.passes.rules.rows import foreign_flat
from tests.cpu.test_fp8_operators import Compiled
from tests.programs import four_bits_trained as trained
from tests.programs.four_bits import BLOCK, H, Hit, Loop
from tests.programs.four_bits_trained import Lora, Trained, of

HELD = f"lut16, groups of {BLOCK}"
APART = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(foreign_flat, "QUICKER", ("cpu",))  # these tests ask what is right
    monkeypatch.setattr(encodings, "OF_HIT_EXPERTS", ("cpu",))


def agree(compiled: Compiled, x: Tensor, apart: float) -> None:
    """Results, and gradients of tokens and of all that is trained, are so far from the model's, as a part of their size."""
    found = []
    for run in (compiled.run, compiled.model):
        x = x.detach().requires_grad_()
        compiled.model.zero_grad()
        out = run(x)
        out.backward(torch.sin(torch.arange(out.numel())).view_as(out).to(out.dtype))
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in compiled.model.parameters() if p.requires_grad]
        found.append([out.detach(), x.grad, *grads])
    for got, wanted in zip(*found, strict=True):
        assert (got.double() - wanted.double()).norm() <= apart * wanted.double().norm() + 1e-12


def functions(compiled: Compiled) -> list[torch.fx.Node]:
    return [n for gm in compiled.graphs for n in gm.graph.nodes if "autograd_function_apply" in str(n.target)]


def is_fused(compiled: Compiled) -> None:
    assert [f.spec.encoding for f in compiled.report.fused] == [HELD], str(compiled.report)
    assert (functions(compiled), compiled.report.skipped, len(compiled.graphs)) == ([], [], 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [Loop, Hit])
@pytest.mark.parametrize(
    ("dtype", "nested"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_experts(program: type[Loop], dtype: torch.dtype, nested: bool) -> None:
    """One graph, in which nothing is left of the function, and gradients are the program's."""
    compiled = Compiled(program(dtype, make=Trained, nested=nested), captured=True)
    agree(compiled, torch.randn(11, H).to(dtype), APART[dtype])
    is_fused(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_experts_without_rows(tokens: int) -> None:
    """In eager they take the function's other way, whose backward pass gives nothing; one token leaves most experts so."""
    compiled = Compiled(Loop(torch.float32, make=Trained), captured=True)
    agree(compiled, torch.randn(tokens, H), 1e-5)
    if tokens:
        is_fused(compiled)


def test_any_number_of_tokens() -> None:
    compiled = Compiled(Loop(torch.float32, make=Trained), captured=True)
    for tokens in (11, 5):
        x = torch.randn(tokens, H)
        torch._dynamo.mark_dynamic(x, 0)
        agree(compiled, x, 1e-5)
    assert compiled.ops
    assert functions(compiled) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", [Loop, Hit])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters(program: type[Loop], dtype: torch.dtype) -> None:
    """Those are trained, in the dtype of the base or, as PEFT has them, in float32."""
    compiled = Compiled(program(make=functools.partial(Lora, factors=dtype), nested=True), captured=True)
    agree(compiled, torch.randn(11, H).bfloat16(), 0.02)
    assert [(f.tier, f.spec.encoding) for f in compiled.report.fused] == [("fused", HELD)], str(compiled.report)
    assert functions(compiled) == []


def test_a_bias() -> None:
    """One that is not trained."""
    model = Loop(torch.float32, make=Trained)
    for module in model.modules():
        if isinstance(module, Trained):
            module.bias = nn.Parameter(torch.randn(module.shape[0]), requires_grad=False)
    compiled = Compiled(model, captured=True)
    agree(compiled, torch.randn(11, H), 1e-5)
    is_fused(compiled)


def test_as_a_whole() -> None:
    """The graphs before and after agree in the gradients of everything."""
    compiled = Compiled(Loop(torch.float32, make=Trained), captured=True, verify="graph")
    agree(compiled, torch.randn(11, H), 1e-5)
    is_fused(compiled)
    assert compiled.report.notes == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verify", ["off", "probe"])
def test_a_function_beside_the_experts_stays(verify: str) -> None:
    """One of a layer that no expert is called in is the call that it was, in front of the experts and behind them."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = (of(f)(H, H, dtype=torch.float32) for f in (trained.Doubled, trained.Always))
            self.experts = Loop(torch.float32, make=Trained)

        def forward(self, x: Tensor) -> Tensor:
            return self.behind(self.experts(self.before(x)))  # type: ignore[no-any-return]

    compiled = Compiled(Between(), captured=True, verify=verify)
    agree(compiled, torch.randn(11, H), 1e-5)
    assert len(compiled.ops) == 1
    assert len(functions(compiled)) == 2


def test_a_second_result_that_nobody_reads() -> None:
    """Torch 2.11 returns what forward computes on the way, of every function."""
    compiled = Compiled(Loop(torch.float32, make=of(trained.Two)), captured=True)
    agree(compiled, torch.randn(64, H), 1e-5)
    is_fused(compiled)


OTHERS = {
    "Doubled": ("verification-failed", "multiplies by other numbers than its forward pass"),
    "Clamped": ("verification-failed", "is more than a product: `clamp`"),
    "Squared": ("verification-failed", "is more than a product: `mul`"),
    "OfRows": ("verification-failed", "is computed from rows"),
    "Straight": ("verification-failed", "multiplies by other numbers than its forward pass"),
    "Nothing": ("verification-failed", "gives rows no gradient"),
    "Drawn": ("encoding-unknown", "is an operator that moefuse cannot look into"),
    "Few": ("not-captured", "it asks how many tokens an expert has"),
    "Ones": ("not-captured", "other code runs"),
    "Noted": ("not-captured", "other code runs"),
    "Kept": ("not-captured", "other code runs"),
    "Both": ("encoding-unknown", "is an operator that moefuse cannot look into"),
    "Written": ("encoding-unknown", "is an operator that moefuse cannot look into"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    """Functions that are no products to backward, or that do something else without rows: they give what they gave."""
    code, text = OTHERS[name]
    model = Loop(torch.float32, make=of(getattr(trained, name)))
    for module in model.modules():
        if isinstance(module, Trained):
            module.register_buffer("times", torch.zeros(()))
    compiled = Compiled(model, captured=True)
    if name == "Drawn":
        compiled.run(torch.randn(64, H).requires_grad_())
    else:
        agree(compiled, torch.randn(64, H), 1e-6)
    assert (compiled.ops, compiled.report.fused) == ([], []), str(compiled.report)
    assert {(s.code, text in s.message) for s in compiled.report.skipped} == {(code, True)}, str(compiled.report)


def test_a_bias_that_is_trained() -> None:
    """Without rows its gradient is whatever the function says."""
    model = Loop(torch.float32, make=Trained)
    for module in model.modules():
        if isinstance(module, Trained):
            module.bias = nn.Parameter(torch.randn(module.shape[0]))
    compiled = Compiled(model, captured=True)
    agree(compiled, torch.randn(64, H), 1e-6)
    assert compiled.ops == []
    assert {s.code for s in compiled.report.skipped} == {"encoding-unknown"}, str(compiled.report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("nested", "adapters"), [(False, False), (True, False), (True, True)])
def test_bitsandbytes(nested: bool, adapters: bool) -> None:
    """The library itself, in the layout that it has on every device, and PEFT's modules around it."""
    library = pytest.importorskip("bitsandbytes")

    def make(n: int, k: int, dtype: torch.dtype) -> nn.Module:
        made = library.nn.Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type="nf4", compress_statistics=nested)
        made.support_avx512bf16_for_cpu = False  # a layout of its own, for inference
        return made.to("cpu").requires_grad_(False)

    model: Any = Loop(make=lambda n, k, dtype: make(2 * n, k, dtype) if n == 96 else make(n, 2 * k, dtype))
    if adapters:
        peft = pytest.importorskip("peft")
        model.is_loaded_in_4bit = True
        config = peft.LoraConfig(r=4, target_modules=["gate", "up", "down"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).base_model.model
    compiled = Compiled(model.train(), captured=True)
    agree(compiled, torch.randn(11, H).bfloat16(), 0.02)
    assert [f.spec.encoding for f in compiled.report.fused] == ["nf4, groups of 64"], str(compiled.report)
    assert functions(compiled) == []
