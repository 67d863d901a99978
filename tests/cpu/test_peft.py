"""Adapters of PEFT around and inside the experts of a compiled model: numbers follow what is switched, merged and trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moefuse
from tests.cpu.test_ddp import Model, batches

peft = pytest.importorskip("peft", reason="PEFT is not installed")

TARGETS = {"around": ["router"], "inside": ["gate", "up", "down"]}


def adapted(targets: list[str]) -> nn.Module:
    model = peft.get_peft_model(Model(1, 4), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model.eval()
    return model


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("fresh_dynamo", "no_code")
@pytest.mark.parametrize("where", TARGETS)
def test_adapters_that_are_switched_and_merged(where: str) -> None:
    model, x = adapted(TARGETS[where]), batches()[0]

    def run() -> Tensor:
        with torch.no_grad():
            return model(x)

    def states() -> list[Tensor]:
        out = [run()]
        with model.disable_adapter():
            out.append(run())
        model.merge_adapter()
        out.append(run())
        model.unmerge_adapter()
        return [*out, run()]

    expected = states()
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    model.compile(backend="moefuse")
    torch.testing.assert_close(states(), expected, rtol=1e-4, atol=1e-4)
    assert len(moefuse.last_report().fused) == 1


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("fresh_dynamo", "no_code")
@pytest.mark.parametrize("where", TARGETS)
def test_gradients_of_adapters(where: str) -> None:
    model, x = adapted(TARGETS[where]), batches()[0]

    def grads() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]

    expected = grads()
    model.compile(backend="moefuse")
    torch.testing.assert_close(grads(), expected, rtol=1e-4, atol=1e-5)
    assert len(moefuse.last_report().fused) == 1
