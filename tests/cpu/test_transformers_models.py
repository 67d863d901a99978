"""Unmodified transformers models through ``torch.compile(backend="moefuse")``: every layer is fused, nothing is skipped, numbers agree.

Most of the matrix runs in a light mode: a backend that applies moefuse's rewrite and runs the rewritten graph without Inductor. It shows
what the recogniser does in a fraction of the time. A handful of cases take the whole way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

pytest.importorskip("transformers.integrations.moe")

import transformers

import moefuse
from moefuse.passes import driver
from moefuse.report.entries import Fused, Skipped
from tests.strategies import THOROUGH
from tests.zoo import tiny
from tests.zoo.budget import assert_gradients_within_budget, assert_within_budget, cast, output_and_gradients

FAMILIES = [
    "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "phimoe", "glm4_moe", "llama4",
    "aria", "minimax_m3_vl", "muse_spark", "nemotron_h",
]  # fmt: skip
FEW = ["mixtral", "qwen3_moe", "gpt_oss"]
IMPLEMENTATIONS = ["grouped_mm", "batched_mm"]
MORE = [("qwen3_moe", None), ("gpt_oss", None), ("deepseek_v3", None)] if THOROUGH else []
"""What goes the whole way in a search only: Inductor takes half a minute each."""
# Random numbers in training would make two runs incomparable.
NO_NOISE: dict[str, dict[str, Any]] = {"phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}}


class Light:
    """A torch.compile backend that fuses and does not compile."""

    def __init__(self) -> None:
        self.fused: list[Fused] = []
        self.skipped: list[Skipped] = []
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        result = driver.fuse(gm, example_inputs, moefuse.Options())
        self.fused += result.fused
        self.skipped += result.skipped
        self.graphs += 1
        return gm.forward


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inference_cases() -> Iterator[Any]:
    """Every family in its default form in both dtypes and with gathered weights; the rest of the product for a few of them."""
    for name in FAMILIES:
        few, registry = name in FEW, tiny.FAMILIES[name].registry
        for choice in (None, *(IMPLEMENTATIONS if registry else ())):
            for dtype in ("float32", "bfloat16"):
                if few or choice is None or (choice == "batched_mm" and dtype == "float32"):
                    yield pytest.param(name, choice, getattr(torch, dtype), id=f"{name}-{choice or 'default'}-{dtype}")


def training_cases() -> Iterator[Any]:
    """Every family with and without gradient checkpointing; low precision for a few."""
    for name, checkpointing in itertools.product(FAMILIES, (False, True)):
        for dtype in ("float32", *(("bfloat16",) if name in FEW else ())):
            yield pytest.param(
                name, checkpointing, getattr(torch, dtype), id=f"{name}-{'checkpointed' if checkpointing else 'plain'}-{dtype}"
            )


def model_and_exact(name: str, choice: str | None, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """A model, and a copy of it in double precision that runs transformers' loop."""
    if TorchVersion(transformers.__version__) < tiny.FAMILIES[name].since:
        pytest.skip(f"transformers {transformers.__version__} has the loop that Dynamo breaks at; needs {tiny.FAMILIES[name].since}")
    model = cast(tiny.build(name, experts_implementation=choice, **changes), dtype)
    exact = cast(copy.deepcopy(model), torch.float64)
    if tiny.FAMILIES[name].registry:
        exact.set_experts_implementation("eager")
    return model, exact


def assert_everything_fused(name: str, fused: list[Any], skipped: list[Any]) -> None:
    assert [(s.code, s.message, s.location) for s in skipped] == []
    assert len(fused) == tiny.FAMILIES[name].layers


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "choice", "dtype"), list(inference_cases()))
def test_inference(name: str, choice: str | None, dtype: torch.dtype) -> None:
    model, exact = model_and_exact(name, choice, dtype)
    light, ids = Light(), tiny.tokens(2, 12)
    with torch.no_grad():
        got = tiny.hidden(torch.compile(model, backend=light), ids)
        assert_everything_fused(name, light.fused, light.skipped)
        assert_within_budget(got, tiny.hidden(model, ids), tiny.hidden(exact, ids))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "checkpointing", "dtype"), list(training_cases()))
def test_training(name: str, checkpointing: bool, dtype: torch.dtype) -> None:
    model, exact = model_and_exact(name, None, dtype, **NO_NOISE.get(name, {}))
    model.train()
    exact.train()
    ids = tiny.tokens(2, 12)
    eager = output_and_gradients(model, lambda: tiny.hidden(model, ids))
    reference = output_and_gradients(exact, lambda: tiny.hidden(exact, ids))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    light = Light()
    compiled = torch.compile(model, backend=light)
    got = output_and_gradients(model, lambda: tiny.hidden(compiled, ids))
    assert_everything_fused(name, light.fused, light.skipped)
    assert_within_budget(got[0], eager[0], reference[0])
    assert_gradients_within_budget(got[1], eager[1], reference[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "choice"), [("mixtral", "batched_mm"), *MORE])
def test_whole_way(name: str, choice: str | None) -> None:
    """The registered backend, Inductor included: report, output and gradients."""
    model, exact = model_and_exact(name, choice, torch.float32)
    ids = tiny.tokens(2, 12)
    compiled = torch.compile(model, backend="moefuse", fullgraph=True)
    got, eager, reference = (
        output_and_gradients(owner, lambda m=called: tiny.hidden(m, ids))
        for owner, called in ((model, compiled), (model, model), (exact, exact))
    )
    report = moefuse.last_report()
    assert report is not None
    assert_everything_fused(name, report.fused, report.skipped)
    assert report.graph_count == 1
    assert [fused.error is None or fused.error <= 1 for fused in report.fused] == [True] * len(report.fused)
    assert_within_budget(got[0], eager[0], reference[0], factor=2.0)
    assert_gradients_within_budget(got[1], eager[1], reference[1], factor=2.0)


@pytest.mark.thorough
def test_whole_way_in_bfloat16_inference() -> None:
    model, exact = model_and_exact("qwen3_moe", None, torch.bfloat16)
    ids = tiny.tokens(2, 12)
    with torch.no_grad():
        got = tiny.hidden(torch.compile(model, backend="moefuse"), ids)
        assert_within_budget(got, tiny.hidden(model, ids), tiny.hidden(exact, ids), factor=2.0)
    report = moefuse.last_report()
    assert report is not None
    assert_everything_fused("qwen3_moe", report.fused, report.skipped)


def test_report_names_the_users_module_and_line() -> None:
    model = tiny.build("mixtral")
    light = Light()
    with torch.no_grad():
        tiny.hidden(torch.compile(model, backend=light), tiny.tokens())
    assert [fused.module for fused in light.fused] == [f"model.layers.{layer}.mlp.experts" for layer in range(tiny.LAYERS)]
    spec = light.fused[0].spec
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate) == (tiny.EXPERTS, tiny.TOP_K, tiny.HIDDEN, 96)
    assert (spec.activation, spec.gating, spec.layout) == ("silu", "merged", ("out-in", "out-in"))
    assert all("moe.py:" in fused.location for fused in light.fused)


def graphs_compiled(backend: Any, shapes: list[tuple[int, int]]) -> int:
    """How many graphs Dynamo makes while one model sees these input shapes in turn."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, exact = model_and_exact("qwen3_moe", None, torch.float32, num_hidden_layers=1)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for shape in shapes:
            ids = tiny.tokens(*shape)
            assert_within_budget(tiny.hidden(compiled, ids), tiny.hidden(model, ids), tiny.hidden(exact, ids))
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("as_traced")
def test_no_more_recompiles_than_inductor() -> None:
    shapes = [(1, 1), (2, 8), (3, 33)]
    assert graphs_compiled("moefuse", shapes) <= graphs_compiled("eager", shapes)


def test_model_compile_and_generate() -> None:
    """``model.compile`` in place: ``generate`` runs the compiled model and gives the tokens of the eager one."""
    model = tiny.build("qwen3_moe")
    ids = tiny.tokens(2, 5)
    arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    expected = model.generate(ids, **arguments)
    light = Light()
    model.compile(backend=light)
    assert torch.equal(model.generate(ids, **arguments), expected)
    assert len(light.fused) == light.graphs * tiny.LAYERS
