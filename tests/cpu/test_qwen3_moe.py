"""One real model through every way in: explain, the backend with torch's caches, transformers' generate, the pass under Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import moefuse

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads, **tokens)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(7)[None]


def assert_both_layers_fused(report: moefuse.FusionReport | None, name: str = "model.layers.{}.mlp.experts") -> None:
    assert report is not None
    assert [fused.module for fused in report.fused] == [name.format(0), name.format(1)]
    assert report.skipped == []
    for fused in report.fused:
        assert (fused.spec.num_experts, fused.spec.top_k, fused.spec.hidden, fused.spec.intermediate) == (4, 2, 32, 16)


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("grad", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_explain(grad: bool, model: Any, ids: torch.Tensor) -> None:
    with torch.set_grad_enabled(grad):
        report = moefuse.explain(model, ids)
    assert_both_layers_fused(report)
    assert report.graph_count == 1
    assert all(fused.error is not None and fused.error <= 1 for fused in report.fused)


def test_the_second_compilation_comes_from_the_caches(model: Any) -> None:
    """Of the layers without attention, whose code takes long to compile."""
    from torch._inductor.utils import fresh_cache

    outputs, x = [], torch.randn(1, 7, 32)
    layers = torch.nn.Sequential(*(layer.mlp for layer in model.model.layers))
    with fresh_cache(), torch.no_grad():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            outputs.append(torch.compile(layers, backend="moefuse")(x))
            assert_both_layers_fused(moefuse.last_report(), "{}.experts")
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert counters["aot_autograd"]["autograd_cache_miss"] == 1 - hits
            assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
    assert torch.equal(*outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], layers(x))


@pytest.mark.usefixtures("no_code")
def test_generate_with_a_compile_config(model: Any, ids: torch.Tensor) -> None:
    """transformers passes ``mode="reduce-overhead"``, ``fullgraph`` and ``dynamic`` of its own."""
    from transformers.generation import CompileConfig

    arguments = {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **arguments)
    config = CompileConfig(backend="moefuse")
    config._compile_all_devices = True  # transformers compiles on accelerators only, but for this switch
    assert torch.equal(model.generate(ids, **arguments, cache_implementation="static", compile_config=config), expected)
    assert_both_layers_fused(moefuse.last_report())


@pytest.mark.usefixtures("no_inductor_code")
def test_the_pass_under_inductor(model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(ids).logits
        with torch._inductor.config.patch(pre_grad_custom_pass=moefuse.MoEFusionPass(), force_disable_caches=True):
            torch.testing.assert_close(torch.compile(model)(ids).logits, expected)
    assert_both_layers_fused(moefuse.last_report())


@pytest.mark.usefixtures("as_traced")
def test_strict_passes_when_everything_is_fused(model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(torch.compile(model, backend="moefuse", options={"strict": True})(ids).logits, expected)
