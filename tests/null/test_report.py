"""The text of a report, compared with tests/golden/report_*.txt, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefuse.report.entries import Fused, Skipped
from moefuse.report.grouping import module_names
from moefuse.report.report import FusionReport
from moefuse.spec import ExpertsSpec

GOLDEN = Path(__file__).parent.parent / "golden"
SPEC = ExpertsSpec(num_experts=8, top_k=2, hidden=64, intermediate=48, dtype="float32", activation="silu")
BIASED = ExpertsSpec(
    4,
    4,
    64,
    48,
    "bfloat16",
    "clamped_swiglu",
    (1.702, 7.0),
    gating="interleaved",
    layout=("in-out", "in-out"),
    bias=True,
    weight_on="input",
)
ESCAPES = "`h`, a value inside the experts, is also used outside them"


def fused(layer: int, error: float | None = 0.61, spec: ExpertsSpec = SPEC) -> Fused:
    return Fused(f"model.layers.{layer}.mlp", "/src/modeling_x.py:123", spec, "sorted", "fused", error)


def skipped(layer: int) -> Skipped:
    return Skipped("value-escapes", ESCAPES, f"model.layers.{layer}.mlp", "/src/my.py:17")


REPORTS = {
    "mixed": FusionReport([fused(0), fused(2, None, BIASED)], [skipped(1)], graph_count=1),
    "grouped": FusionReport(
        [fused(layer, error=0.1 + layer / 100) for layer in range(48)],
        [skipped(48), skipped(49)],
        graph_count=2,
        graph_breaks=["b at x.py:1"],
    ),
    "nothing": FusionReport(graph_count=1),
    "nothing_but_breaks": FusionReport(graph_count=3, graph_breaks=[f"reason {n} at my.py:{n}" for n in (1, 2, 2, 3)]),
    "many_breaks": FusionReport([fused(0)], graph_count=11, graph_breaks=[f"reason at my.py:{n}" for n in range(10)]),
    "function": FusionReport([Fused("", "", SPEC, "dense", "grouped", 0.5)], [Skipped("no-rule", "m", "", "")], graph_count=1),
    "empty": FusionReport(),
}


@pytest.mark.parametrize("name", REPORTS)
def test_text(name: str) -> None:
    assert f"{REPORTS[name]}\n" == (GOLDEN / f"report_{name}.txt").read_text()


def test_json_says_everything() -> None:
    data = json.loads(REPORTS["mixed"].to_json())
    assert set(data) == {"fused", "skipped", "graph_count", "graph_breaks", "notes"}
    assert data["fused"][0] == {
        "module": "model.layers.0.mlp",
        "location": "/src/modeling_x.py:123",
        "spec": {
            "num_experts": 8,
            "top_k": 2,
            "hidden": 64,
            "intermediate": 48,
            "dtype": "float32",
            "activation": "silu",
            "activation_args": [],
            "gating": "merged",
            "up_first": False,
            "weights": "stacked",
            "layout": ["out-in", "out-in"],
            "bias": False,
            "weight_on": "output",
            "hidden_out": 0,
            "compute": "",
            "lora": [],
            "dropout": [],
            "encoding": "",
        },
        "domain": "sorted",
        "tier": "fused",
        "error": 0.61,
        "shared": False,
        "workspace": None,
        "tokens": None,
        "parallel": "",
    }
    assert data["fused"][1]["error"] is None
    assert data["skipped"] == [
        {"code": "value-escapes", "message": ESCAPES, "module": "model.layers.1.mlp", "location": "/src/my.py:17"},
    ]


def test_two_dtypes() -> None:
    """Weights in float32 that are computed with in bfloat16: autocast."""
    spec = replace(SPEC, compute="bfloat16")
    assert "I=48 float32 weights, computed in bfloat16, silu" in str(spec)


def test_extend_adds_up() -> None:
    total = FusionReport([fused(0)], [skipped(1)], 1, ["a"])
    total.extend(FusionReport([fused(2)], [skipped(3)], 2, ["b"]))
    assert total == FusionReport([fused(0), fused(2)], [skipped(1), skipped(3)], 3, ["a", "b"])


def test_layers_that_differ_are_not_grouped() -> None:
    lines = str(FusionReport([fused(0), fused(1, spec=BIASED)], graph_count=1)).splitlines()
    assert len(lines) == 3


def test_one_module_called_twice_keeps_its_name() -> None:
    assert "model.layers.0.mlp x2 " in str(FusionReport([fused(0), fused(0)], graph_count=1))


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["mlp"], "mlp"),
        ([""], "(no module)"),
        (["mlp", "mlp"], "mlp x2"),
        (["layers.0.mlp", "layers.1.mlp"], "layers.*.mlp (2 layers)"),
        (["layers.0.mlp", "mtp.mlp", "layers.3.mlp"], "layers.*.mlp (2 layers), mtp.mlp"),
        (["a", "b", "c", "d", "d"], "a, b, c and 2 more"),
    ],
)
def test_one_name_for_layers(paths: list[str], name: str) -> None:
    """Layers that are tuned together need not stand in one stack, nor equally deep."""
    assert module_names(paths) == name


def test_the_root_has_the_name_of_its_class() -> None:
    assert module_names(["", ""], "MoE") == "(MoE) x2"
    assert module_names(["", "moe"], "Block") == "(Block), moe"
    report = FusionReport([Fused("", "/src/modeling_x.py:123", SPEC, "sorted", "fused")], root="MoE")
    assert "  fused   (MoE)  " in str(report)
    assert "(MoE)" in report.to_html()
