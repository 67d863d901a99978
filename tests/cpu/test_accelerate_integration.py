"""``"moefuse"`` where accelerate and transformers' Trainer take the name of a dynamo backend."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import Trainer, TrainingArguments

import moefuse
from moefuse.integrations import accelerate as integration
from tests.zoo import tiny


@pytest.fixture(autouse=True)
def _no_state(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Iterator[None]:
    """accelerate keeps what it was told in state of the process."""
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    yield
    forget()


def forget() -> None:
    """Take back what accelerate was told in this process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_the_member_is_one_like_others() -> None:
    member = DynamoBackend("MOEFUSE")
    assert (member.name, member.value, str(member), repr(member)) == ("MOEFUSE", "MOEFUSE", "MOEFUSE", "<DynamoBackend.MOEFUSE: 'MOEFUSE'>")
    assert isinstance(member, DynamoBackend)
    assert DynamoBackend(member) is DynamoBackend("MOEFUSE") is DynamoBackend.MOEFUSE is copy.deepcopy(member) is member
    assert all(pickle.loads(pickle.dumps(member, protocol)) is member for protocol in range(pickle.HIGHEST_PROTOCOL + 1))
    assert member != DynamoBackend.NO
    assert len({member, *DynamoBackend}) == len(DynamoBackend) + 1
    with pytest.raises(ValueError, match="'NONSENSE' is not a valid DynamoBackend"):
        DynamoBackend("NONSENSE")


def test_installing_and_taking_back() -> None:
    before = set(vars(DynamoBackend)) - {"_missing_", "MOEFUSE"}
    try:
        integration.uninstall()
        integration.uninstall()
        assert "MOEFUSE" not in DynamoBackend
        assert set(vars(DynamoBackend)) == before
    finally:
        integration.install()
        integration.install()
    assert "MOEFUSE" in DynamoBackend


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("way", ["name", "plugin", "environment"])
def test_accelerator(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "environment":
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "MOEFUSE")
        accelerator = Accelerator(cpu=True)
    elif way == "plugin":
        accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="moefuse", options={"strict": True, "exclude": "gate"}))
    else:
        accelerator = Accelerator(cpu=True, dynamo_backend="moefuse")
    plugin = accelerator.state.dynamo_plugin
    assert plugin.backend is DynamoBackend("MOEFUSE")
    assert pickle.loads(pickle.dumps(plugin)) == plugin
    assert plugin.to_dict()["backend"] == "moefuse"
    model = tiny.build("qwen3_moe")
    with torch.no_grad():
        expected = tiny.hidden(model, tiny.tokens())
        torch.testing.assert_close(tiny.hidden(accelerator.prepare(model), tiny.tokens()), expected)
    assert len(moefuse.last_report().fused) == tiny.FAMILIES["qwen3_moe"].layers


def losses(folder: Path, **arguments: Any) -> list[float]:
    given = {"use_cpu": True, **arguments}
    settings = TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1,
        save_strategy="no", learning_rate=1e-2, seed=0, disable_tqdm=True, **given,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tiny.tokens(8, 8)]
    trainer = Trainer(model=tiny.build("qwen3_moe"), args=settings, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.thorough
def test_trainer(tmp_path: Path) -> None:
    got = losses(tmp_path / "moefuse", torch_compile_backend="moefuse")
    report = moefuse.last_report()
    assert len(report.fused) == tiny.FAMILIES["qwen3_moe"].layers
    assert not report.skipped
    assert got == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
