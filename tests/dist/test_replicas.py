"""A mesh of two dimensions: experts over "ep", data parallelism over "dp" (and over both for the rest)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.dist import layers, replicas
from tests.dist.layers import H, I
from tests.dist.replicas import Case
from tests.dist.workers import Workers

safetensors = pytest.importorskip("safetensors.torch")

CASES = {
    # Each case says why it is there.
    "averaged by moefuse, DDP for the rest": Case("ddp", kind=layers.Listed, settings={"foreach": True}),
    "sums": Case("by hand", how={"grads": "sum"}, sums=4),
    "a part of a sequence": Case("by hand", how={"tokens": "sequence", "transport": "all_to_all"}, sums=2),
    "the same tokens on ranks with other experts": Case("by hand", how={"tokens": "replicated"}),
    "HSDP on the same mesh": Case("hsdp", settings={"fused": True}),
    "HSDP, a list, kept after forward": Case("hsdp", kind=layers.Listed, settings={"foreach": True}, fsdp={"reshard_after_forward": False}),
    "FSDP of the experts": Case("efsdp", experts=4, settings={"fused": True}),
    "FSDP of the experts, kept after forward": Case(
        "efsdp", experts=4, fsdp={"reshard_after_forward": False}, how={"placement": "round_robin"}
    ),
    "FSDP of the experts, with a remainder": Case("efsdp", experts=5, how={"transport": "all_to_all"}),
    "a mesh for each Parameter, a list": Case("efsdp, each", kind=layers.Listed, settings={"foreach": True}),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(four: Workers, name: str) -> None:
    case = CASES[name]
    every = four.run(replicas.trained, case)
    for found in every:
        assert found.outs <= 1e-5, found
        assert max(found.grads.values()) <= 5e-6, found
        assert found.norms <= 1e-6, found
        assert found.torchs <= 1e-6 or name != "HSDP on the same mesh", found
        assert found.fused == found.dispatches == 2, found
        assert not found.said, found
    if case.kind is replicas.Apart and case.experts != 5:
        whole = 2 * 3 * case.experts * H * I  # elements of all experts of both layers
        assert sum(found.held for found in every) == whole * (1 if case.around == "efsdp" else 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("around", ["hsdp", "efsdp"])
def test_mixed_precision(four: Workers, around: str) -> None:
    """Computed in bfloat16: about as exact as one process in bfloat16; a rounding of each rank's partial sum, of results and gradients."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for mine, theirs, fused in four.run(replicas.mixed, Case(around, fsdp={"mp_policy": policy})):
        assert mine <= 1.1 * theirs + 4 * 2.0**-8
        assert fused == 2


def test_a_copy_averages_too(four: Workers) -> None:
    """Copies of Parameters have no hooks; and what a backward pass left that failed is not averaged by the next one, or kept from it."""
    assert max(four.run(replicas.copied)) <= 5e-6


RESTORED = {
    # Each case says why it is there.
    "averaged by moefuse": Case("by hand"),
    "a list": Case("by hand", kind=layers.Listed),
    "empty slots in shards of FSDP": Case("efsdp", experts=5, how={"placement": "round_robin"}),
    "a remainder in shards of FSDP": Case("efsdp", experts=5),
    "a list in shards of FSDP": Case("efsdp, each", kind=layers.Listed),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", RESTORED)
def test_from_the_meta_device(four: Workers, name: str, tmp_path: Path) -> None:
    """Each rank reads what it has of what FSDP shards, too; gradients of what was loaded are averaged."""
    case = RESTORED[name]
    torch.manual_seed(0)
    safetensors.save_file(replicas.Model(case.kind, case.experts).state_dict(), tmp_path / "one.safetensors")
    for loaded, again, grads in four.run(replicas.restored, case, str(tmp_path / "one.safetensors")):
        assert (loaded, again) == (0, 0)
        assert grads <= 5e-6


def test_replicas_that_nobody_averages(four: Workers) -> None:
    """Said once, in the first backward pass, on every rank."""
    for said, off in four.run(replicas.alone):
        assert said == [
            "experts are spread over 2 of 4 ranks, and nothing averages their gradients with those of other ranks that have the same: call "
            "moefuse.parallelize(model, mesh, experts=('dp', 'ep')) with a mesh of that dimension, too, or let fully_shard shard them over "
            "it; ranks of a pipeline, which have other layers, may ignore this"
        ]
        assert off > 1e-3
