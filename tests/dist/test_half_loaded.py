"""``moefuse.load`` writes all or nothing where it can know before, and says so where it cannot: one rank, on a fake group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import moefuse
from moefuse.parallel.files import Files
from moefuse.runtime import groups
from tests.dist import layers


@pytest.fixture
def model() -> Iterator[nn.Module]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    found = layers.Model(layers.Listed, 4)
    moefuse.parallelize(found, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"])
    yield found
    dist.destroy_process_group()
    groups._groups.clear()


def values(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def same(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


def test_another_shape_of_what_is_no_expert(model: nn.Module, tmp_path: Path) -> None:
    state = {key: torch.randn_like(value) for key, value in layers.Model(layers.Listed, 4).state_dict().items()}
    save_file({**state, "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    before = values(model)
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight: the checkpoint has \[3\], the model \[8\]"):
        moefuse.load(model, tmp_path)
    assert same(model, before)


def test_a_file_that_ends(model: nn.Module, tmp_path: Path) -> None:
    state = {key: torch.randn_like(value) for key, value in layers.Model(layers.Listed, 4).state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    part = Files.part

    def broken(self: Files, key: str, at: list[slice]) -> Tensor:
        if key.startswith("second"):
            raise OSError("the file ends here")
        return part(self, key, at)

    said = (
        "moefuse.load stopped in the middle of .*: some weights of Model are the checkpoint's on this rank, and some .*: the file ends here"
    )
    with mock.patch.object(Files, "part", broken), pytest.raises(RuntimeError, match=said):
        moefuse.load(model, tmp_path)
    moefuse.load(model, tmp_path)
