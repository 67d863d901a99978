"""``moefuse.warmup`` where there is nothing to tune, and what it refuses. Measuring is in tests/triton and tests/gpu."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moefuse
from moefuse.machine import cache_folder
from moefuse.tuning import sites
from moefuse.tuning.measure import targets
from moefuse.tuning.measure.report import Tuned, WarmupReport
from moefuse.tuning.problem import Problem

SPEC = moefuse.ExpertsSpec(8, 2, 64, 48, "bfloat16", "silu")
NOTHING = ["nothing to tune without a CUDA device: the kernels for the CPU choose by rules"]


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    monkeypatch.delenv("MOEFUSE_AUTOTUNE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sites.clear()


@pytest.mark.parametrize("what", [SPEC, [SPEC], nn.Linear(2, 2), lambda x: x], ids=["spec", "specs", "model", "function"])
def test_on_a_cpu(what: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = moefuse.warmup(what, [1, 8])
    assert (report.tuned, report.notes, report.device, report.path) == ([], NOTHING, "", "")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_AUTOTUNE", "0")
    assert moefuse.warmup(SPEC, [1]).notes == ["MOEFUSE_AUTOTUNE=0 forbids tuning"]


@pytest.mark.parametrize("what", [3, "model", None, [], [SPEC, 3], moefuse.ExpertsSpec], ids=str)
def test_neither_a_model_nor_specs(what: Any) -> None:
    with pytest.raises(TypeError, match=r"moefuse\.warmup needs a model, or one or more moefuse\.ExpertsSpec, got \w+"):
        moefuse.warmup(what, [1])


@pytest.mark.parametrize("change", [{"activation": "custom"}, {"gating": "x"}, {"top_k": 0}, {"dtype": "x"}, {"intermediate": 0}], ids=str)
def test_a_spec_of_no_fused_op(change: dict[str, Any]) -> None:
    import dataclasses

    with pytest.raises(ValueError, match="this spec is not one of a fused op, so there is nothing to tune"):
        moefuse.warmup(dataclasses.replace(SPEC, **change), [1])


LEGAL = r"tokens must be whole numbers from 1 to 16777216, e\.g\. tokens=\[1, 8, 512\], got "


@pytest.mark.parametrize(
    ("tokens", "got"), [([0], "0"), ([1, -3], "-3"), ([True], "True"), ([1.5], "1.5"), ([1 << 25], "33554432"), ([], "none")]
)
def test_illegal_tokens(tokens: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"{LEGAL}{got}$"):
        moefuse.warmup(SPEC, tokens)


def test_tokens_are_a_list() -> None:
    with pytest.raises(TypeError, match="tokens must be a list of whole numbers"):
        moefuse.warmup(SPEC, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, -1, math.inf, math.nan, True, "1"], ids=str)
def test_illegal_budgets(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget_s must be a positive number of seconds, got"):
        moefuse.warmup(SPEC, [1], budget_s=budget)


def test_a_model_that_has_not_run() -> None:
    found, notes = targets.of(nn.Linear(2, 2))
    assert found == []
    assert notes == [
        "no fused region on a CUDA device holds weights of this model: run the compiled model once, so that it is compiled, "
        "then call moefuse.warmup (moefuse.last_report() says what was fused); or give it moefuse.ExpertsSpec"
    ]


def test_a_spec_is_a_problem() -> None:
    spec = moefuse.ExpertsSpec(
        8, 2, 64, 48, "float16", "swiglu_oai", (1.7, 7.0), "interleaved", True, "per_expert", ("in-out", "out-in"), True, "input", 32
    )
    ((target,), notes) = targets.of(spec)
    assert notes == []
    assert target.problem == Problem(0, 2, 8, 64, 48, 32, "interleaved", "float16", True, False, True)
    assert target.kind == {
        "activation": "swiglu_oai",
        "args": (1.7, 7.0),
        "up_first": True,
        "on_input": True,
        "out_dtype": "",
        "biases": (True, False, True),
    }


def test_equal_specs_are_one_and_tokens_of_a_bucket_too() -> None:
    found, _ = targets.of([SPEC, moefuse.ExpertsSpec(8, 2, 64, 48, "bfloat16", "gelu"), SPEC])
    assert [t.names for t in found] == [["spec 0", "spec 2"], ["spec 1"]]
    assert [(p.tokens, asked) for p, asked in targets.buckets(found[0], [64, 33, 8, 65, 8])] == [(8, (8,)), (64, (33, 64)), (65, (65,))]


def test_the_report() -> None:
    config = {"bm": 16}
    report = WarmupReport(
        [
            Tuned("layers.*.mlp x2", SPEC, 8, (8,), 10.0, 12.5, config, "all", 40, "", {"sorted:0123456789ab": (9.0, 10.0)}, ("because",)),
            Tuned("layers.*.mlp x2", SPEC, 512, (512,), problem="not enough memory on the device"),
        ],
        "NVIDIA H200",
        "/cache/x.json",
        61.2,
        ["a note"],
    )
    assert str(report).splitlines() == [
        "moefuse: measured 1 of 2 in 61 s on NVIDIA H200",
        f"  tuned   T=8  layers.*.mlp x2  {SPEC}: 12.5 -> 10.0 us, 40 configurations, products by the library",
        "          program sorted:0123456789ab: 9.0 us, fused 10.0 us: stays as it is from the next compilation on",
        "          not compared: because",
        f"  failed  T=512  layers.*.mlp x2  {SPEC}: not enough memory on the device",
        "  note    a note",
    ]
    data = json.loads(report.to_json())
    assert set(data) == {"tuned", "device", "path", "seconds", "notes"}
    assert (data["tuned"][0]["us"], data["tuned"][1]["us"], data["tuned"][1]["before_us"]) == (10.0, None, None)
    assert data["tuned"][0]["programs"] == {"sorted:0123456789ab": [9.0, 10.0]}
