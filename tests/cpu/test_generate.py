"""transformers' generate with ``CompileConfig(backend="moefuse")``, which it compiles on accelerators only unless it is told otherwise."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import moefuse
from moefuse.report import history
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def generated(model: Any, **options: Any) -> torch.Tensor:
    ids = tiny.tokens(2, 5)
    fixed = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    return model.generate(ids, **fixed, **options)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_traced")
def test_with_the_switch_the_decode_step_is_fused() -> None:
    model = tiny.build("qwen3_moe", num_hidden_layers=1)
    config = CompileConfig(backend="moefuse", mode="default")
    config._compile_all_devices = True
    assert torch.equal(generated(model, compile_config=config), generated(model))
    report = moefuse.last_report()
    assert len(report.fused) == 1
    assert not report.skipped


def test_without_it_transformers_says_that_it_does_not_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """So moefuse need not; docs/libraries.md has the words."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    history.record(moefuse.FusionReport())
    with caplog.at_level(logging.WARNING):
        generated(tiny.build("qwen3_moe"), compile_config=CompileConfig(backend="moefuse"))
    assert any("unable to meet the criteria for compilation" in record.getMessage() for record in caplog.records)
    assert moefuse.last_report().graph_count == 0
