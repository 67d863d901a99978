"""Training of whole models on CUDA under the libraries that people train with: losses and gradients against eager mode's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers.integrations.moe")

import moefuse
from tests.zoo import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]

DEVICE = "cuda"
FAMILIES = [
    ("qwen3_moe", "eager", False),
    ("qwen3_moe", "eager", True),
    ("qwen3_moe", "grouped_mm", False),
    ("qwen3_moe", "batched_mm", True),
    ("gpt_oss", "eager", False),
    ("deepseek_v3", "eager", True),
]
"""The spelling of the experts, and whether autocast is around them."""
PLACES = ["model", "experts", "products", "off", "loop off"]


@pytest.fixture
def trained() -> Iterator[Any]:
    """The tests of accelerate on a CPU, whose helpers these use; what accelerate was told is taken back behind a test."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from tests.cpu import test_accelerate_integration as module

    yield module
    module.forget()


class Cast(nn.Module):
    """float32 experts, and autocast around a part: each expert, its products, none of them, or switched off around the loop."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.gate, self.up = (nn.Parameter(torch.randn(8, 48, 64) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(8, 64, 48) / 7)

    def under(self, *where: str) -> Any:
        if self.where not in where:
            return contextlib.nullcontext()
        return torch.autocast(DEVICE, torch.bfloat16, enabled="off" not in self.where)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = logits.softmax(-1).topk(2)
        with self.under("loop off"):
            out = torch.zeros_like(x)
            for e in range(8):
                token, slot = torch.where(ids == e)
                with self.under("experts"):
                    with self.under("products", "off"):
                        h = F.silu(F.linear(x[token], self.gate[e])) * F.linear(x[token], self.up[e])
                        h = F.linear(h, self.down[e])
                    h = h * weights[token, slot, None]
                out.index_add_(0, token, h.to(out.dtype))
        return out


def stepped(call: Callable[..., Tensor], model: nn.Module) -> list[Tensor]:
    """A loss and the gradients of it."""
    model.zero_grad()
    loss = call()
    loss.backward()
    return [loss.detach(), *(p.grad.detach().clone() for p in model.parameters() if p.requires_grad and p.grad is not None)]


def near(found: list[Tensor], own: list[Tensor], exact: list[Tensor], roundings: float) -> None:
    """As far from double precision as eager mode is in the same dtype, or some roundings of the largest value."""
    for mine, theirs, true in zip(found, own, exact, strict=True):
        assert mine.dtype == theirs.dtype
        allowed = 1.5 * (theirs - true).abs().max() + roundings * true.abs().max()
        assert (mine.double() - true).abs().max() <= allowed


def fused(layers: int) -> None:
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped) == (layers, []), report


@pytest.mark.parametrize("where", PLACES)
def test_autocast(where: str) -> None:
    """In inference and in training: which products are rounded is eager's. (That of whole models: ``test_transformers``.)"""
    torch.manual_seed(0)
    model = Cast(where).to(DEVICE)
    exact, x, logits = copy.deepcopy(model).double(), torch.randn(40, 64, device=DEVICE), torch.randn(40, 8, device=DEVICE)
    exact.where = ""
    compiled = torch.compile(model, backend="moefuse", options={"expect": 1})
    around = where in ("model", "off", "loop off")
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=around):
        outs = [compiled(x, logits), model(x, logits)]
    with torch.no_grad():
        outs.append(exact(x.double(), logits.double()))
    near(*([out] for out in outs), 2.0**-8)

    def loss(of: Callable[[Tensor, Tensor], Tensor], *, around: bool = around, dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=around):
            out = of(x.to(dtype), logits.to(dtype))
        return out.to(dtype).square().mean()

    found, own = stepped(lambda: loss(compiled), model), stepped(lambda: loss(model), model)
    near(found, own, stepped(lambda: loss(exact, around=False, dtype=torch.float64), exact), 2.0**-7)
    fused(1)


def of_labels(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def compared(model: nn.Module, ids: Tensor, *, casts: bool = False) -> None:
    """A step of training compiled, in eager mode and in float64; under autocast without that, for it has other experts."""
    exact, compiled = copy.deepcopy(model).double(), copy.deepcopy(model)
    compiled.compile(backend="moefuse")
    found = []
    for of in (compiled, model):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=casts):
            call = of_labels(of, ids)
            found.append(stepped(call, of))
    if not casts:
        if hasattr(exact, "set_experts_implementation"):
            exact.set_experts_implementation("eager")  # there are no grouped products in float64
        near(*found, stepped(of_labels(exact, ids), exact), 2.0**-14)
        return
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2.0**-4 * float(theirs.abs().max()))


@pytest.mark.parametrize(("name", "implementation", "casts"), FAMILIES)
def test_transformers(name: str, implementation: str, casts: bool) -> None:
    model = tiny.build(name, experts_implementation=implementation).to(DEVICE).train()
    compared(model, tiny.tokens(2, 16).to(DEVICE), casts=casts)
    fused(tiny.FAMILIES[name].layers)


def test_checkpoints() -> None:
    model = tiny.build("qwen3_moe", experts_implementation="eager").to(DEVICE).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compared(model, tiny.tokens(2, 16).to(DEVICE))
    fused(tiny.FAMILIES["qwen3_moe"].layers)


@pytest.mark.parametrize("parameters", [[], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]], ids=["attention", "experts"])
def test_peft(parameters: list[str]) -> None:
    """Adapters that train and are switched off; around the experts, or on them."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=parameters, init_lora_weights=False)
    model = peft.get_peft_model(tiny.build("qwen3_moe", experts_implementation="eager").to(DEVICE), config)
    compared(model, tiny.tokens(2, 16).to(DEVICE))
    fused(tiny.FAMILIES["qwen3_moe"].layers)
    ids, compiled = tiny.tokens(2, 16).to(DEVICE), torch.compile(model.eval(), backend="moefuse")

    def states(of: Callable[..., Any]) -> list[Tensor]:
        with torch.no_grad():
            out = [of(input_ids=ids, use_cache=False).logits]
            with model.disable_adapter():
                return [*out, of(input_ids=ids, use_cache=False).logits]

    for mine, theirs in zip(states(compiled), states(model), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerator(precision: str, trained: Any) -> None:
    losses = []
    for backend in ("no", "moefuse"):
        trained.forget()
        torch.manual_seed(0)
        model = tiny.build("qwen3_moe", experts_implementation="eager")
        accelerator = trained.Accelerator(mixed_precision=precision, dynamo_backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ready, optimizer = accelerator.prepare(model.train(), optimizer)
        ids = tiny.tokens(2, 16).to(accelerator.device)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = ready(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    fused(tiny.FAMILIES["qwen3_moe"].layers)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if precision == "no" else 2e-2)
    assert losses[1][2] < losses[1][0]


def test_trainer(tmp_path: Path, trained: Any) -> None:
    got = trained.losses(tmp_path / "moefuse", torch_compile_backend="moefuse", use_cpu=False)
    fused(tiny.FAMILIES["qwen3_moe"].layers)
    assert got == pytest.approx(trained.losses(tmp_path / "eager", use_cpu=False), rel=1e-3)
