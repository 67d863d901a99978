"""Fully sharded data parallelism (FSDP2): parameters are put together before a layer runs, so its experts are plain tensors and are fused.

FSDP1 is not here: with more than one process Dynamo stops at the second step, with ``backend="eager"`` as well (torch 2.13: `attempting to
assign a gradient of size ...`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import moefuse
from moefuse import _torch_private
from tests.conftest import without_code
from tests.cpu.test_ddp import LAYERS, Model, alone, batches, gradients  # noqa: F401
from tests.dist.conftest import groups, two  # noqa: F401
from tests.dist.workers import Workers

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")


def one_of_two(rank: int) -> None:
    """A process with half of the parameters and half of the batch: three steps as of one process with all."""
    torch._dynamo.reset()
    _torch_private.compile_fx = without_code
    sharded, whole = Model(), Model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    sharded.compile(backend="moefuse")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (sharded, whole)]
    for _ in range(3):
        gradients(sharded, batches()[rank])
        gradients(whole, batches().flatten(0, 1))
        for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            got = p.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(got, q.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(moefuse.last_report().fused) == LAYERS


def test_steps_of_two_processes_are_those_of_one(two: Workers) -> None:  # noqa: F811
    two.run(one_of_two)


@pytest.mark.usefixtures("alone", "as_traced")
@pytest.mark.every_value
@pytest.mark.parametrize("each", [False, True], ids=["the model", "each layer"])
@pytest.mark.parametrize("options", [{"strict": True}, {"expect": LAYERS}], ids=["strict", "expect"])
def test_layers_that_share_code_are_all_told_as_fused(each: bool, options: dict[str, object]) -> None:
    """While a layer runs, other tensors stand for its parameters than between calls; its code is compiled once for all layers."""
    model, x = Model(), batches()[0]
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for compiled in model.layers if each else [model]:
        compiled.compile(backend="moefuse", options={"expect": 1} if each and "expect" in options else options)
    gradients(model, x)
    report = moefuse.last_report()
    assert not report.skipped, report
    assert report.layers == ((1, 1) if each else (LAYERS, LAYERS)), report


@pytest.mark.usefixtures("alone", "as_traced")
def test_explained_before_its_first_call() -> None:
    """FSDP has whole Parameters since, by its own notes; the model has shards again, and so have they, where a tried size raised too."""
    model, x = Model(), batches()[0]
    fully_shard(model)
    model.compile(backend="moefuse")
    assert len(moefuse.explain(model, x).fused) == LAYERS
    with torch.no_grad():
        again = model(x)
        torch.testing.assert_close(again, model(x))
    assert len(moefuse.last_report().fused) == LAYERS
