"""PEFT's ``target_parameters`` on stacked experts: W + s B A is not made in the graph that holds the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefuse
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
@pytest.mark.parametrize("family", FAMILIES)
def test_training(family: str) -> None:
    """Values and gradients of the factors; the base has none."""
    model = adapted(family).train()

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


@pytest.mark.usefixtures("light")
def test_switched_and_merged() -> None:
    """Disabled, merged and unmerged between calls, and rsLoRA, which only has another scale."""
    model = adapted("qwen3_moe", use_rslora=True).eval()

    @torch.no_grad()
    def states() -> list[Tensor]:
        out = [output(model)]
        with model.disable_adapter():
            out.append(output(model))
        model.merge_adapter()
        out.append(output(model))
        model.unmerge_adapter()
        return [*out, output(model)]

    expected = states()
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    model.compile(backend="moefuse", fullgraph=True)
    torch.testing.assert_close(states(), expected, rtol=1e-4, atol=1e-4)
