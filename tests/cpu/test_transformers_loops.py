"""Expert loops of transformers, version 4 or 5 with ``experts_implementation="eager"``: one graph, every layer fused, eager's numbers.

Light: capture and rewrite as the backend does them, and no Inductor. Every run takes one family for each way to write such a loop
(:data:`IDIOMS`), and one the whole way; ``HYPOTHESIS_PROFILE=deep`` takes all families.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

pytest.importorskip("transformers")

import transformers

import moefuse
from moefuse.report.entries import Fused
from moefuse.report.report import FusionReport
from tests.cpu.capture_case import Seen, capturing
from tests.strategies import THOROUGH
from tests.zoo import tiny
from tests.zoo.budget import Gradients, Wide, assert_gradients_within_budget, assert_within_budget, output_and_gradients

OLD = tiny.major() == "4"
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(OLD and TorchVersion(torch.__version__) < (2, 12), reason="Dynamo of torch 2.11 breaks at experts[row]"),
]

IDIOMS = {
    "4": {
        "mixtral": "self.experts[row] of a ModuleList, for row in nonzero()",
        "qwen3_omni_talker": "the same with a gated shared expert",
        "olmoe": "for e in range(E), nothing skipped",
        "deepseek_v3": "for e in range(E), if indices.numel() > 0, sum in the weights' dtype",
        "dbrx": "for e in range(E), if rows.shape[0] == 0: continue; flat weights in chunks",
        "longcat_flash": "nn.Identity behind the experts",
        "ernie4_5_moe": "router without autocast",
        "gpt_oss": "stacked, interleaved, biases, a class for the unused",
        "granitemoe": "counts.tolist(), torch.split, torch.cat",
        "aria": "sorted slots, bounds out of a cumsum, out[start:end] =",
        "deepseek_v2": "for e, n in enumerate(counts), a list of outputs",
        "qwen3_vl_moe": "W[row] with a row of shape [1]; another program in eval",
    },
    "5": {
        "mixtral": "stacked weights, rows of shape [1]",
        "deepseek_v3": "groups, a shared expert",
        "gpt_oss": "interleaved, clamped, biases, stored in-out",
        "aria": "stored in-out",
        "dbrx": "flat weights, a class for the unused that is not skipped",
        "nemotron_h": "not gated, row.item(), a class that is not skipped",
        "step3p7": "clamped behind the activation",
        "muse_spark": "a norm behind each expert",
        "beam": "the activation in float32",
        "deepseek_v4": "ids out of a table",
        "zaya": "a class for tokens without expert",
        "inkling": "stacked shared experts beside the loop",
        "gemma4": "router and experts see two norms, a weight per expert",
        "phimoe": "two rounds of masked argmax",
        "longcat_flash": "int(row.item()), experts without weights",
        "nllb_moe": "a mask read as ids",
        "switch_transformers": "experts by name, tokens above the capacity have none",
    },
}


def captured(name: str) -> bool:
    """Whether loops over experts are all that breaks the family's graph in this release."""
    version = transformers.__version__
    return any(version.startswith(first[0]) and TorchVersion(version) >= first for first in tiny.FAMILIES[name].loops)


def cases() -> Iterator[Any]:
    for name in tiny.FAMILIES:
        if captured(name):
            few = name in IDIOMS[tiny.major()]
            yield pytest.param(name, marks=() if few or THOROUGH else pytest.mark.skip(reason="HYPOTHESIS_PROFILE=deep runs all families"))


def build(name: str) -> nn.Module:
    try:
        eager = "eager" if tiny.major() == "5" and tiny.FAMILIES[name].registry else None
        return tiny.build(name, experts_implementation=eager)  # type: ignore[no-any-return]
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} has no {tiny.FAMILIES[name].model}")


def run(model: nn.Module, called: Callable[..., Any], inputs: dict[str, Any]) -> tuple[Tensor, Gradients]:
    """Output and gradients; an expert without tokens has none in eager and zeros behind a fused op."""
    out, grads = output_and_gradients(model, lambda: tiny.hidden(called, **inputs))  # type: ignore[arg-type]
    return out, {name: grads.get(name, torch.zeros_like(p)) for name, p in model.named_parameters() if p.requires_grad}


def assert_one_graph(name: str, report: FusionReport, graphs: int) -> None:
    assert [(s.code, s.message, s.location) for s in report.skipped] == []
    assert (graphs, dict(counters["graph_break"]), report.graph_breaks) == (1, {}, [])
    assert len(report.fused) == tiny.FAMILIES[name].layers
    assert all(fused.error is not None and fused.error <= 1 for fused in report.fused)


def assert_experts_matter(fused: list[Fused], grads: Gradients) -> None:
    """A layer whose experts do not reach the output would agree with anything."""
    for layer in fused:
        assert any(f"{layer.module}." in name and bool(grad.any()) for name, grad in grads.items()), layer.module


class Exact:
    """A copy of a model in double precision."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).double()

    def __call__(self, **inputs: Any) -> Any:
        with Wide():
            return self.model(**{key: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for key, v in inputs.items()})


def compare(model: nn.Module, compiled: Callable[..., Any], inputs: dict[str, Any]) -> Gradients:
    """Output and gradients are within the budget. Returns eager's gradients."""
    exact = Exact(model)
    eager, reference, got = run(model, model, inputs), run(exact.model, exact, inputs), run(model, compiled, inputs)
    assert_within_budget(got[0], eager[0], reference[0], factor=2.0)
    assert_gradients_within_budget(got[1], eager[1], reference[1], factor=2.0)
    return eager[1]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", list(cases()))
def test_training(name: str) -> None:
    model, seen = build(name).train(), Seen()
    grads = compare(model, torch.compile(model, backend=capturing(seen)), tiny.inputs(name))
    assert_one_graph(name, seen.report, len(seen.graphs))
    assert_experts_matter(seen.report.fused, grads)


@pytest.mark.parametrize("name", list(cases()))
def test_inference(name: str) -> None:
    """Under no_grad, and with other tokens in the second call: other experts have none."""
    if OLD and name == "qwen3_vl_moe":
        pytest.skip("in eval this is no loop: every expert on every token")
    if not THOROUGH and name not in ("mixtral", "deepseek_v4", "dbrx"):
        pytest.skip("HYPOTHESIS_PROFILE=deep runs all families")
    model, seen = build(name), Seen()
    compiled, exact = torch.compile(model, backend=capturing(seen)), Exact(model)
    with torch.no_grad():
        for seed in range(2):
            inputs = tiny.inputs(name, seed=seed)
            got, eager, reference = (tiny.hidden(called, **inputs) for called in (compiled, model, exact))  # type: ignore[arg-type]
            assert_within_budget(got, eager, reference, factor=2.0)
    assert_one_graph(name, seen.report, len(seen.graphs))


@pytest.mark.usefixtures("fresh_dynamo" if THOROUGH else "no_code")
@pytest.mark.parametrize("name", ["mixtral", *(("dbrx", "gpt_oss") if THOROUGH else ())])
def test_whole_way(name: str) -> None:
    """The registered backend, Inductor included; its code only where there is time (test_transformers_models.py always has such code)."""
    model = build(name).train()
    compare(model, torch.compile(model, backend="moefuse"), tiny.inputs(name))
    report = moefuse.last_report()
    assert report is not None
    assert_one_graph(name, report, report.graph_count)
