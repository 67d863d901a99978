"""TRL's trainers with their defaults, which are gradient checkpointing and a router loss: losses of the trainer without compilation.

TRL computes log-probabilities in chunks, by a function that Dynamo leaves (``out=`` of a strided tensor), so there are two graphs.
"""

from __future__ import annotations

import runpy
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moefuse
from tests.cpu.test_trainers import COMPILED, LENGTHS, Run, arguments, cheap, collects, finished, fused
from tests.zoo import tiny

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers", minversion="5.0")

__all__ = ["cheap"]
GRAPHS = 8
"""Two of the model (a length, all lengths), and some of what TRL does around its chunks."""


def words(at: int, length: int) -> str:
    return " ".join(f"t{i}" for i in tiny.tokens(1, length, seed=at)[0].tolist())


def tokenizer() -> Any:
    """A word for each id of a tiny model."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(tiny.VOCAB)}, unk_token="t3"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2", "unk_token": "t3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    # datasets pickles all that a function reaches to name its cache, and there is none to find here.
    monkeypatch.setattr("datasets.fingerprint.Hasher.hash", lambda *_: uuid.uuid4().hex)

    def trained(kind: str, rows: list[dict[str, str]], more: dict[str, Any], **args: Any) -> Run:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = tiny.build("qwen3_moe").train()
        config = getattr(trl, f"{kind}Config")(**{**arguments(tmp_path), **args})
        assert config.gradient_checkpointing
        data = datasets.Dataset.from_list(rows)
        trainer = getattr(trl, f"{kind}Trainer")(model=model, args=config, processing_class=tokenizer(), train_dataset=data, **more)
        assert trainer.aux_loss_enabled
        return finished(trainer, model)

    return trained


@collects
@pytest.mark.parametrize("how", [{}, {"packing": True, "max_length": 32}], ids=["lengths that vary", "packed"])
def test_supervised(how: dict[str, Any], run: Callable[..., Run]) -> None:
    rows = [{"text": words(at, length)} for at, length in enumerate(LENGTHS * 3)]
    wanted = run("SFT", rows, {}, max_steps=4, **how)
    run("SFT", rows, {}, max_steps=4, **how, **COMPILED).close(wanted, rtol=1e-5)
    fused(graphs=GRAPHS, breaks=2)


@collects
def test_policy(run: Callable[..., Run]) -> None:
    """GRPO: rollouts in eager, a step on what they gave; it asks for router logits by an argument of each call."""
    rows = [{"prompt": words(at, 4 + at % 3)} for at in range(16)]
    more = {"reward_funcs": lambda completions, **_: [float(len(set(text))) for text in completions]}
    how: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6}
    wanted = run("GRPO", rows, more, **how)
    run("GRPO", rows, more, **how, **COMPILED).close(wanted, rtol=1e-4)
    fused(graphs=GRAPHS, breaks=2)


def test_reentrant_checkpoints(run: Callable[..., Run]) -> None:
    """Not fused, and the line to change is named."""
    rows = [{"text": words(at, 8)} for at in range(8)]
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    wanted = run("SFT", rows, {}, **how)
    run("SFT", rows, {}, **how, **COMPILED).close(wanted)
    report = moefuse.last_report()
    assert report is not None
    assert all("{'use_reentrant': False}" in skipped.message for skipped in report.skipped)
    assert report.layers == (0, tiny.LAYERS)


@pytest.mark.filterwarnings("ignore")
def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sft.py", "--steps", "4"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples/sft.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "fused 2 of 2 MoE layers" in out, out
