"""``experts`` around ``F.grouped_mm``: on the CPU, where torch has it too, with our kernels in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.ops_case import Case
from tests.triton.test_interpreted import call as own_call, tiles

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]
SMALL = Case(tokens=9, hidden=24, inter=16, hidden_out=32, experts=4, top_k=3, bias=False, dtype=torch.float32)
BODIES = [
    {},
    {"up_first": True},
    {"transposed": True},
    {"gating": "interleaved", "activation": "swiglu_oai"},
    {"gating": "plain", "activation": "relu2"},
    {"weight_on_input": True},
    {"low_id": -4, "high_id": 1},
    {"out_dtype": torch.float64},
]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.provide import library as grouped_mm

    monkeypatch.setattr(grouped_mm, "DEVICES", ("cpu",))
    monkeypatch.setattr(grouped_mm, "DTYPES", (torch.float32,))


@pytest.mark.parametrize("changes", BODIES, ids=str)
@pytest.mark.parametrize("form", ["all", "down"])
def test_equals_our_own_kernels(form: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in tokens without a valid id, and in what the library leaves unwritten, changes nothing."""
    from moefuse.kernels.triton.host import plan
    from moefuse.kernels.triton.provide import experts as provider, library as grouped_mm

    case = SMALL.with_(**changes)
    args = case.args()
    want = own_call(case, tiles(), args)
    monkeypatch.setattr(plan.Plan, "_choose", lambda self: tiles())
    monkeypatch.setattr(grouped_mm, "form_for", lambda *a: form)
    library = torch.nn.functional.grouped_mm

    def poisoned(a: Any, b: Any, offs: Any) -> torch.Tensor:
        out = library(a, b, offs=offs)
        out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", poisoned)
    torch.testing.assert_close(provider.experts(case.call(args)), want, rtol=1e-5, atol=1e-5)
    assert type(provider.plan_of(case.call(args))).__name__ == "LibraryPlan"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"separate": True}, "several tensors"),
        ({"gating": "separate"}, "several tensors"),
        ({"bias": True}, "biases"),
        ({"hidden": 21}, "16 bytes"),
        ({"tokens": 0}, "no tokens"),
        ({"dtype": torch.float16}, "float16"),
    ],
    ids=str,
)
def test_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    from moefuse.kernels.triton.provide import library as grouped_mm

    case = SMALL.with_(**changes)
    assert reason in grouped_mm.supports(case.call())
    assert grouped_mm.supports(SMALL.call()) is None


def test_the_table_decides_by_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton import config
    from moefuse.kernels.triton.provide import library as grouped_mm
    from moefuse.tuning.problem import Problem

    problem = {
        "tokens": 16384,
        "top_k": 2,
        "experts": 8,
        "hidden": 4096,
        "inter": 14336,
        "out": 4096,
        "gating": "merged",
        "dtype": "bfloat16",
    }
    entries = [
        {"problem": problem, "us": 19000.0, "grouped_mm": {"all": 17100.0, "down": 17300.0}, "config": {}},
        {"problem": {**problem, "tokens": 64}, "us": 650.0, "config": {}},
        {"problem": {**problem, "tokens": 1024}, "us": 2000.0, "grouped_mm": {"all": 2100.0}, "config": {}},
    ]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "A_device.json").write_text(json.dumps({"entries": entries}))
    monkeypatch.setattr(config, "__file__", str(tmp_path / "config.py"))
    grouped_mm._measured.cache_clear()
    try:
        answers = {
            tokens: grouped_mm.preferred(Problem(**{**problem, "tokens": tokens}), "A device") for tokens in (16384, 9000, 1024, 64, 1)
        }
        assert answers == {16384: "all", 9000: "all", 1024: None, 64: None, 1: None}
        assert grouped_mm.preferred(Problem(**problem), "A device") is not None
        assert grouped_mm.preferred(Problem(**{**problem, "gating": "plain"}), "A device") is None
        assert grouped_mm.preferred(Problem(**problem), "unknown") is None
    finally:
        grouped_mm._measured.cache_clear()
