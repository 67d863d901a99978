"""PEFT's ``target_parameters`` on stacked experts: W + s B A is not made in the graph that holds the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefuse
from moefuse.passes.match import lowrank
from tests.cpu.replay_case import light
from tests.cpu.test_lora_rows import close
from tests.zoo.tiny import build, major, tokens

__all__ = ["light"]
peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = pytest.mark.skipif(major() == "4", reason="transformers 4 has a module for each expert")

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]
"""Two with [E, out, in] and one with [E, in, out], interleaved and with biases."""


def adapted(family: str, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    how = {"r": 4, "target_parameters": parameters, "target_modules": [], "init_lora_weights": False, **config}
    return peft.get_peft_model(build(family), peft.LoraConfig(**how))  # type: ignore[no-any-return]


def output(model: nn.Module) -> Tensor:
    return model(tokens()).logits  # type: ignore[no-any-return]


def ranks() -> set[tuple[int, ...]]:
    return {f.spec.lora for f in moefuse.last_report().fused}


@pytest.mark.usefixtures("light")
def test_training() -> None:
    """Values and gradients of the factors, in a whole model; the base has none. (Each family's layers: ``test_peft_one_graph.py``.)"""
    model = adapted("gpt_oss").train()

    def numbers() -> list[Tensor]:
        model.zero_grad()
        out = output(model)
        out.float().square().mean().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = numbers()
    model.compile(backend="moefuse", fullgraph=True)
    close(numbers(), expected, 4e-6)
    assert len(expected) > 4
    assert ranks() == {(4,)}


class Block(nn.Module):
    """The experts of one layer, beside a router, with adapters."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = build("qwen3_moe")
        model.set_experts_implementation(implementation)  # type: ignore[operator]
        self.mlp = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)  # type: ignore[no-any-return]


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(("implementation", "beside"), [("grouped_mm", True), ("grouped_mm", False), ("batched_mm", True)])
def test_autocast(implementation: str, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT makes the sum in a block without autocast, and grouped_mm has no rule of autocast: a proof has both modes, or it cannot run.

    Weights stay in float32. ``beside``: whether terms stay beside the products, or the sum is made as the program has it.
    """
    if not beside:
        monkeypatch.setattr(lowrank, "MOST_ROWS", {"cpu": 0})
    how = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []}
    model = peft.get_peft_model(Block(implementation), peft.LoraConfig(r=4, init_lora_weights=False, **how)).train()
    x = torch.randn(1, 9, 64)

    def numbers() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = numbers()
    model.compile(backend="moefuse")
    # Behind a sum in the graph AOTAutograd's backward rounds to bfloat16, with any backend; behind batched_mm forward does.
    close(numbers(), expected, 2e-2 if implementation == "batched_mm" else 4e-6 if beside else 4e-3)
    report = moefuse.last_report()
    assert not report.skipped, report
    assert {f.spec.lora for f in report.fused} == {(4,) if beside else ()}
    dtypes = "float32" if implementation == "grouped_mm" else "float32 weights, computed in bfloat16"
    assert {f.spec.dtypes for f in report.fused} == {dtypes}
