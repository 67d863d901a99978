"""What a user tries in the first week: weights that change in every way, names and files that stay, checkpoints with a nearly tied router.

`docs/design/acceptance.md` has the whole list, with the tests of it that stand elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moefuse
from tests.cpu.test_ddp import Layer, Model, batches
from tests.zoo import tiny

LAYERS, EXPERTS = 1, 4


def stepped(model: nn.Module) -> None:
    """One step of fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    model.zero_grad()


def copied(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.copy_(p.data.flip(0))


def other() -> Model:
    model = Model(LAYERS, EXPERTS)
    copied(model)
    return model


def loaded(model: nn.Module) -> None:
    model.load_state_dict(other().state_dict())


def assigned(model: nn.Module) -> None:
    model.load_state_dict(other().state_dict(), assign=True)


def averaged(model: nn.Module) -> None:
    """The mean of two models swapped in, as for an evaluation with EMA weights."""
    mean = AveragedModel(model)
    mean.update_parameters(Model(LAYERS, EXPERTS))
    mean.update_parameters(other())
    with torch.no_grad():
        for p, q in zip(model.parameters(), mean.module.parameters(), strict=True):
            p.copy_(q)


def swapped(model: nn.Module) -> None:
    """One expert's Linear is another module now."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.experts[3].up = nn.Linear(layer.experts[3].up.in_features, layer.experts[3].up.out_features)  # type: ignore[union-attr, index]


@pytest.mark.code_elsewhere
@pytest.mark.usefixtures("fresh_dynamo")
def test_weights_are_never_stale() -> None:
    """One compiled model through all of them in turn."""
    model, plain, x = Model(LAYERS, EXPERTS), Model(LAYERS, EXPERTS), batches()[0]
    model.compile(backend="moefuse", options={"expect": LAYERS})
    changes: tuple[Callable[[Any], None], ...] = (stepped, copied, loaded, assigned, averaged, swapped)
    last = model(x)
    for change in changes:
        torch.manual_seed(3)
        change(model)
        torch.manual_seed(3)
        change(plain)
        got = model(x)
        torch.testing.assert_close(got, plain(x), rtol=1e-4, atol=1e-4, msg=lambda text, change=change: f"{change.__name__}: {text}")
        assert change is assigned or not torch.allclose(got, last, atol=1e-3), change.__name__
        last = got


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_a_compiled_model_is_the_same_model(tmp_path: Path) -> None:
    """Keys, saved files, identity and addresses of parameters: as before it was compiled and called."""
    model = tiny.build("qwen3_moe")
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    model.compile(backend="moefuse")
    with torch.no_grad():
        tiny.hidden(model, tiny.tokens())
    assert len(moefuse.last_report().fused) == tiny.FAMILIES["qwen3_moe"].layers
    model.save_pretrained(tmp_path / "after")
    assert digests(tmp_path / "after") == digests(tmp_path / "before")
    assert list(model.state_dict()) == keys
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_saved_model_does_not_need_moefuse(tmp_path: Path) -> None:
    """`experts_implementation="moefuse"` is not written down: whoever loads the model chooses."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="moefuse").eval()
    model.save_pretrained(tmp_path)
    assert "moefuse" not in (tmp_path / "config.json").read_text()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for implementation in ("eager", "moefuse"):
            again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=implementation).eval()
            torch.testing.assert_close(again(ids).logits, expected, rtol=1e-4, atol=1e-5)


class NearlyTied(nn.Module):
    """All experts have the same score but for the last bits: what is chosen hangs on how the score is rounded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Layer(EXPERTS)
        with torch.no_grad():
            self.layer.router.weight.copy_(self.layer.router.weight[:1].repeat(EXPERTS, 1))
            self.layer.router.weight.mul_(1 + torch.arange(EXPERTS)[:, None] * 2**-23)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.code_elsewhere
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_checkpoint_computes_the_same_choice_again() -> None:
    """Recomputed shapes do not depend on the choice, so `CheckpointError` cannot come, and gradients are those of what was chosen."""
    model, x = NearlyTied(), batches()[0]
    model.compile(backend="moefuse", options={"expect": 1})

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first = gradients()
    assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))
    assert all(grad.isfinite().all() for grad in first)
