"""Training as libraries do it: losses and weights of the same trainer without compilation, layers that are fused, graphs that are made.

Graphs are traced as Inductor's are and run as they are: what Inductor makes of them is the matter of other tests.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import moefuse
from moefuse import _torch_private
from moefuse.capture.dynamo import points
from tests.cpu.test_ddp import free_port
from tests.zoo import tiny

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

LAYERS = 1
"""Where no test asks for more."""
LENGTHS = [5, 5, 9, 9, 12, 12, 7, 7, 6, 6, 8, 8, 11, 11, 13, 13]
REENTRANT, WITHOUT = ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": to}} for to in (True, False))


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """AOTAutograd without code generation."""
    aot = aot_autograd(fw_compiler=lambda graph, _: graph)
    monkeypatch.setattr(_torch_private, "compile_fx", lambda gm, inputs, *_, **__: aot(gm, inputs))
    counters.clear()


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        ids = tiny.tokens(1, self.lengths[at], seed=at)[0]
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest row."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {key: nn.utils.rnn.pad_sequence([row[key] for row in rows], True, value) for key, value in fill.items()}


@dataclass
class Run:
    """What a training run leaves: losses and norms of gradients of its steps, and weights."""

    steps: list[tuple[float, float]]
    weights: list[Tensor]

    def close(self, other: Run, rtol: float = 2e-6) -> None:
        torch.testing.assert_close(torch.tensor(self.steps), torch.tensor(other.steps), rtol=rtol, atol=0)
        for mine, its in zip(self.weights, other.weights, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=2e-6)


def finished(trainer: Any, weights: nn.Module) -> Run:
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run([(float(e["loss"]), float(e["grad_norm"])) for e in log], [p.detach().clone() for p in weights.parameters()])


def arguments(folder: Path) -> dict[str, Any]:
    """Of every trainer. Plain SGD: Adam divides by gradients, and so makes a rounding error of any size."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "dataloader_pin_memory": False}
    plain = {"use_cpu": True, "bf16": False, "seed": 0, "per_device_train_batch_size": 2, "max_steps": 3}
    return {"output_dir": str(folder), "optim": "sgd", "learning_rate": 0.05, **quiet, **plain}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    """A run of transformers' Trainer on a tiny model."""

    def run(
        *,
        name: str = "qwen3_moe",
        lengths: list[int] | None = None,
        prepare: Callable[[Any], object] = lambda _: None,
        config: dict[str, Any] | None = None,
        ema: list[Any] | None = None,
        **args: Any,
    ) -> Run:
        torch._dynamo.reset()
        model = tiny.build(name, **{"num_hidden_layers": LAYERS, **(config or {})}).train()
        prepare(model)
        data = Data(lengths or [8] * 32)
        chosen = transformers.TrainingArguments(**{**arguments(tmp_path), **args})
        callbacks = [] if ema is None else [Averaging(ema, model)]
        trainer = transformers.Trainer(model=model, args=chosen, train_dataset=data, data_collator=padded, callbacks=callbacks)
        return finished(trainer, model)

    return run


class Averaging(transformers.TrainerCallback):  # type: ignore[misc]
    """An exponential moving average of the weights, by torch's own class."""

    def __init__(self, out: list[Any], model: nn.Module) -> None:
        self.model, self.average = model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        out.append(self.average)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.average.update_parameters(self.model)


collects = pytest.mark.skipif(not points.has("checkpoints"), reason="this torch breaks graphs at checkpoints that collect")
COMPILED = {"torch_compile": True, "torch_compile_backend": "moefuse"}


def fused(graphs: int = 1, breaks: int = 0, layers: int = LAYERS) -> None:
    """All layers are, in so many graphs, and the report says nothing else."""
    report = moefuse.last_report()
    assert report is not None
    assert (report.layers, report.skipped) == ((layers, layers), [])
    assert counters["stats"]["unique_graphs"] <= graphs
    assert len(report.graph_breaks) == breaks


def freeze(part: str) -> Callable[[nn.Module], None]:
    def frozen(model: nn.Module) -> None:
        found = [p for name, p in model.named_parameters() if part in name]
        assert found
        for p in found:
            p.requires_grad_(False)

    return frozen


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("qwen3_moe", {"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param("qwen3_moe", REENTRANT, id="reentrant checkpoints"),
        pytest.param("mixtral", WITHOUT, id="checkpoints"),
        pytest.param("gpt_oss", WITHOUT, id="checkpoints, biases"),
        pytest.param("qwen3_moe", {"config": {"output_router_logits": True}}, id="router loss"),
        pytest.param("qwen3_moe", {"config": {"output_router_logits": True}, **WITHOUT}, id="router loss in checkpoints", marks=collects),
        pytest.param(
            "gpt_oss", {"config": {"output_router_logits": True}, **WITHOUT}, id="router loss in checkpoints, biases", marks=collects
        ),
        pytest.param("qwen3_moe", {"config": {"output_hidden_states": True}, **WITHOUT}, id="hidden states in checkpoints", marks=collects),
        pytest.param("qwen3_moe", {"prepare": freeze(".experts.")}, id="frozen experts"),
        pytest.param("qwen3_moe", {"prepare": freeze("mlp.gate.")}, id="frozen router"),
        pytest.param("qwen3_moe", {"prepare": freeze("layers.0."), "config": {"num_hidden_layers": 2}}, id="frozen layer"),
        pytest.param("qwen3_moe", {"prepare": freeze("gate_up_proj")}, id="half of the experts' weights frozen"),
        pytest.param("qwen3_moe", {"optim": "adamw_torch_fused", "learning_rate": 1e-4}, id="fused optimizer"),
    ],
)
def test_trainer(name: str, how: dict[str, Any], train: Callable[..., Run]) -> None:
    """One graph, all layers fused, the losses and weights of the trainer without compilation."""
    wanted = train(name=name, **how)
    train(name=name, **how, **COMPILED).close(wanted)
    fused(layers=how.get("config", {}).get("num_hidden_layers", LAYERS))


@pytest.mark.thorough
@collects
def test_lengths_that_vary(train: Callable[..., Run]) -> None:
    """A second graph for all other lengths; each step has another one."""
    how: dict[str, Any] = {"lengths": LENGTHS, "max_steps": 5, **WITHOUT, "config": {"output_router_logits": True}}
    wanted = train(**how)
    train(**how, **COMPILED).close(wanted, rtol=1e-5)
    fused(graphs=2)


def test_moving_average(train: Callable[..., Run]) -> None:
    """The average of the compiled model's weights is read from the Parameters that the optimizer changes."""
    averages: list[Any] = []
    train(ema=averages)
    train(ema=averages, **COMPILED)
    fused()
    wanted, mine = averages
    for a, b in zip(mine.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


def test_reentrant_checkpoints_and_a_router_loss(train: Callable[..., Run]) -> None:
    """In eager such a loss has no gradient. Nothing is fused, nothing is different, and the line to change is named."""
    how: dict[str, Any] = {"config": {"output_router_logits": True}, **REENTRANT}
    wanted = train(**how)
    train(**how, **COMPILED).close(wanted)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.skipped) == LAYERS
    assert all("`gradient_checkpointing_kwargs={'use_reentrant': False}`" in skipped.message for skipped in report.skipped)


@pytest.mark.thorough
def test_label_smoothing(train: Callable[..., Run]) -> None:
    """The Trainer knows a language model by the name of its class, and compiled by its own switch it has another one, with any backend:
    labels are not shifted then. ``model.compile`` keeps the class."""
    how: dict[str, Any] = {"label_smoothing_factor": 0.1}
    wanted = train(**how)
    train(**how, prepare=lambda model: model.compile(backend="moefuse")).close(wanted)
    fused()
    other = train(**how, torch_compile=True, torch_compile_backend="eager")
    train(**how, **COMPILED).close(other)
    fused(graphs=9)


def test_router_logits_that_a_call_asks_for() -> None:
    """By an argument, where the configuration does not: transformers' hooks are on the model before its first graph is traced."""
    model, ids = tiny.build("qwen3_moe", num_hidden_layers=LAYERS), tiny.tokens(2, 8)
    out = torch.compile(model, backend="moefuse")(input_ids=ids, output_router_logits=True, use_cache=False)
    wanted = model(input_ids=ids, output_router_logits=True, use_cache=False)
    for mine, its in zip(out.router_logits, wanted.router_logits, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=2e-6)
    fused()


class Losses(nn.Module):
    """A model whose call is its loss, with router logits out of checkpoints."""

    def __init__(self, checkpointed: bool = True, logits: bool = True, layers: int = LAYERS) -> None:
        super().__init__()
        self.model = tiny.build("qwen3_moe", output_router_logits=logits, num_hidden_layers=layers).train()
        if checkpointed:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1)


def sharded(model: Any) -> nn.Module:
    """FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.model.layers:
        fully_shard(layer)
    made: nn.Module = fully_shard(model)
    return made


def flattened(model: nn.Module) -> nn.Module:
    """FSDP1, with the original Parameters, which Dynamo needs."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def losses(model: nn.Module) -> list[float]:
    """Of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    out = []
    for step in range(3):
        loss = model(tiny.tokens(2, 8, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def compared(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> moefuse.FusionReport:
    wanted = losses(copy.deepcopy(model))
    found = losses(torch.compile(wrap(model), backend="moefuse"))  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    report = moefuse.last_report()
    assert report is not None
    return report


@collects
@pytest.mark.usefixtures("alone")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", [replicated, flattened])
@pytest.mark.parametrize("split", [True, False])
def test_wrapped(wrap: Callable[[nn.Module], nn.Module], split: bool) -> None:
    """``split``: DDP's graphs are cut at its buckets, as is the default."""
    with torch._dynamo.config.patch(optimize_ddp=split):
        report = compared(Losses(), wrap)
    assert (report.layers, report.skipped) == ((LAYERS, LAYERS), [])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("checkpointed", "logits"), [(False, True), (True, False)])
def test_sharded(checkpointed: bool, logits: bool) -> None:
    """FSDP2's hooks break the graph around each layer, and layers of one class share theirs."""
    report = compared(Losses(checkpointed, logits, layers=2), sharded)
    assert (sum(f.module.endswith("experts") for f in report.fused) > 0, report.skipped) == (True, [])


@pytest.mark.usefixtures("alone")
def test_sharded_with_a_router_loss_in_checkpoints() -> None:
    """The list of scores is older than the graph of a layer, so its checkpoint is eager's: said, for each layer."""
    report = compared(Losses(layers=2), sharded)
    assert [skipped.code for skipped in report.skipped] == ["nothing-found"] * 2
    # torch from 2.14 on names the list in a break of its own.
    assert re.search("the graph breaks (in what is around it .Unsupported method call|inside it)", report.skipped[0].message)
