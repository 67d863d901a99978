"""What is chosen on two GPUs of one host, and the way over several hosts by NCCL, for two GPUs that pose as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from moefuse.parallel.meshes import register
from moefuse.runtime import groups
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports import symm
from tests.dist import equal, layers, posing
from tests.dist.equal import Case
from tests.dist.workers import Workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def mesh() -> Any:
    return init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]


def chosen(rank: int, hosts: str, failing: int | None, **how: Any) -> str:
    """By ``auto``; on the rank ``failing`` no memory can be shared."""
    posing.on(rank, hosts)
    symm._buffers.clear()
    known = moefuse._torch_private.symmetric_memory
    if rank == failing:
        moefuse._torch_private.symmetric_memory = lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[assignment]
    try:
        return moefuse.parallelize(layers.Model(layers.Stacked, 4).cuda(), mesh(), **how).layers[0].terms[0].transport
    finally:
        moefuse._torch_private.symmetric_memory = known


CHOICES: dict[str, tuple[str, int | None, dict[str, Any], str]] = {
    "one host, a number of tokens": ("aa", None, {"max_tokens": 64}, "symm"),
    "again, with memory that is there": ("aa", None, {"max_tokens": 64}, "symm"),
    "none on a rank": ("aa", 1, {"max_tokens": 64}, "allgather"),
    "after that": ("aa", None, {"max_tokens": 64}, "symm"),
    "no number": ("aa", None, {}, "allgather"),
    "equal numbers": ("aa", None, {"max_tokens": "equal"}, "allgather"),
    "the same tokens": ("aa", None, {"max_tokens": 64, "tokens": "replicated"}, "all_reduce"),
    "a host each": ("ab", None, {"max_tokens": 100_000}, "all_to_all"),
    "a host each, few tokens": ("ab", None, {"max_tokens": 8}, "allgather"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_auto_takes(two: Workers, name: str) -> None:
    """All ranks the same, at once, whatever one of them lacks."""
    hosts, failing, how, wanted = CHOICES[name]
    assert two.run(_chosen, hosts, failing, how) == [wanted] * 2


def _chosen(rank: int, hosts: str, failing: int | None, how: dict[str, Any]) -> str:
    return chosen(rank, hosts, failing, **how)


def test_shared_memory_is_for_one_host(two: Workers) -> None:
    for text in two.run(refused):
        assert text == "transport='symm' is for ranks of one host, and the mesh has ranks of 2: use 'all_to_all'"


def refused(rank: int) -> str:
    posing.on(rank, "ab")
    try:
        moefuse.parallelize(layers.Model(layers.Stacked, 4).cuda(), mesh(), transport="symm", max_tokens=8)
    except moefuse.ParallelError as error:
        return str(error)
    return "nothing"


def test_auto_as_on_one_process(two: Workers) -> None:
    two.run(posing.on, "aa")
    for found in two.run(equal.run, Case(layers.Stacked, (5, 7), how={"max_tokens": 7}, device="cuda")):
        assert found.worst <= 2e-5, found
        assert "symm" in found.report.fused[0].parallel


@pytest.mark.parametrize("hosts", ["ab", "aa"])
@pytest.mark.parametrize("counts", [(40, 7), (0, 9), (0, 0)])
def test_rails(two: Workers, hosts: str, counts: tuple[int, int]) -> None:
    assert two.run(there_and_back, hosts, counts) == [True, True]


def there_and_back(rank: int, hosts: str, counts: tuple[int, int]) -> bool:
    """Each rank gives back a row as often as it has an expert of it; so do gradients."""
    posing.on(rank, hosts)
    terms = Terms(groups.group(register(mesh())).name, "rails", "sequence").text
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, 9, (counts[rank], 3), generator=generator).cuda()
    x = torch.randn(counts[rank], 16, generator=generator).bfloat16().cuda().requires_grad_()
    place = torch.arange(8, dtype=torch.int32, device="cuda")
    rows, local, *handle = torch.ops.moefuse.ep_dispatch.default([x], ids, place, 4, terms, "rails")
    y = rows * (local >= 0).sum(1, keepdim=True)
    out = torch.ops.moefuse.ep_combine.default(y, handle, len(x), terms, "rails")
    out.sum().backward()
    times = ((ids >= 0) & (ids < 8)).sum(1, keepdim=True).float()
    assert x.grad is not None
    return torch.allclose(out.float(), x.float() * times, rtol=0.02) and torch.equal(x.grad.float(), times.expand(-1, 16))
