"""DeepSpeed's ZeRO-3: parameters are empty between calls, and its hooks put them together in front of a module; whole layers are fused.

Not in the environment of all tests: ``make test-deepspeed``.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moefuse
from tests.cpu.test_ddp import LAYERS, Layer, Model, batches, free_port

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="make test-deepspeed has an environment with it")

STEPS, RATE = 3, 0.5
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}
LEAVES = {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}


def one_of_two(rank: int, port: int, folder: str, zero: dict[str, Any], leaves: bool) -> None:
    """Steps of half of the batch: the same weights as of one process with all of it."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_EXTENSIONS_DIR": folder}
    import deepspeed

    whole, x = Model(), batches()
    sharded = copy.deepcopy(whole)
    if leaves:
        deepspeed.utils.set_z3_leaf_modules(sharded, [Layer])
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=sharded, optimizer=torch.optim.SGD(sharded.parameters(), lr=RATE), config=config)
    engine.compile(backend="moefuse")
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    for _ in range(STEPS):
        # As behind embeddings: without it the first layer's backward finds its parameters gone, with aot_eager and Inductor as well.
        engine.backward(engine(x[rank].clone().requires_grad_()).square().mean())
        engine.step()
        whole(x.flatten(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p]):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    report = moefuse.last_report()
    if leaves:
        assert report.layers == (LAYERS, LAYERS), report
        assert not report.skipped, report
    else:
        assert {s.code for s in report.skipped} == {"nothing-found"}, report
        assert len(report.skipped) == LAYERS, report
    dist.destroy_process_group()


@pytest.mark.parametrize(("zero", "leaves"), [(LEAVES, True), (ZERO, False)], ids=["whole layers", "every linear by itself"])
def test_steps_of_two_processes_are_those_of_one(
    zero: dict[str, Any], leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose parameters come as a whole are fused; where a hook stands in front of every projection, that is told."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))))
    torch.multiprocessing.spawn(one_of_two, (free_port(), str(tmp_path), zero, leaves), nprocs=2)
