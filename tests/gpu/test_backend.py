"""Whole models on CUDA through ``torch.compile(backend="moefuse")``: fused, right, and without a wait for the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.integrations.moe")

import moefuse
from tests.zoo import tiny
from tests.zoo.budget import assert_within_budget, cast

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4"]


def model_and_exact(name: str, choice: str | None) -> tuple[Any, Any]:
    model = cast(tiny.build(name, experts_implementation=choice), torch.bfloat16).cuda()
    exact = cast(copy.deepcopy(model), torch.float64)
    if tiny.FAMILIES[name].registry:
        exact.set_experts_implementation("eager")
    return model, exact


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_is_fused_and_right(name: str) -> None:
    model, exact = model_and_exact(name, None)
    ids = tiny.tokens(2, 12).cuda()
    with torch.no_grad():
        compiled = torch.compile(model, backend="moefuse")
        got = logits(compiled, ids)
        report = moefuse.last_report()
        assert report is not None
        assert [(s.code, s.message) for s in report.skipped] == []
        assert len(report.fused) == tiny.FAMILIES[name].layers
        assert_within_budget(got, logits(model, ids), logits(exact, ids))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_generate_with_a_static_cache(mode: str | None) -> None:
    """transformers compiles decoding itself, through batched_mm; the tokens are those of eager."""
    from transformers import CompileConfig

    model, _ = model_and_exact("qwen3_moe", "grouped_mm")
    model = model.float()
    ids = tiny.tokens(2, 8).cuda()
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        plain = model.generate(ids, **how)
        config = CompileConfig(backend="moefuse", mode=mode) if mode else CompileConfig(backend="moefuse")
        fused = model.generate(ids, cache_implementation="static", compile_config=config, **how)
    assert torch.equal(plain, fused)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == tiny.FAMILIES["qwen3_moe"].layers
