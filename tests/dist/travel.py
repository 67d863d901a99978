"""Several tensors with a row for each token, sent together: what arrives, and where gradients go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import moefuse.ops  # noqa: F401
from moefuse.parallel.meshes import register
from moefuse.runtime.groups import Terms
from tests.dist import scenes

E = 4


def together(rank: int, transport: str, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Dispatch rows of four dtypes that all hold the number of their token; (token, what its rows add up to) of all that arrived.

    Gradients are checked on the way: a token's are the sum of those that it got on each rank with an expert of it.
    """
    same = transport == "all_reduce"
    name = register(scenes.mesh())
    terms = Terms(name, transport, "replicated" if same else "sequence").text  # type: ignore[arg-type]
    first = 0 if same else sum(counts[:rank])
    number = torch.arange(first, first + counts[rank])
    ids = ids_of(number)
    x = number[:, None].expand(-1, 8).float().requires_grad_()
    scales = number[:, None].expand(-1, 3).double().requires_grad_()
    eight = number[:, None].expand(-1, 5).float().to(torch.float8_e4m3fn)
    place = torch.arange(E, dtype=torch.int32)
    out: Any = torch.ops.moefuse.ep_dispatch.default([x, scales, number, eight], ids, place, E // len(counts), terms, "travel")
    here = (out[4] >= 0).any(1)
    assert [part.dtype for part in out[:4]] == [x.dtype, scales.dtype, number.dtype, eight.dtype]
    ((out[0] * here[:, None]).sum() * (rank + 1) + (out[1] * here[:, None]).sum() * 10 * (rank + 1)).backward()
    factor = torch.stack([needs(ids, r, len(counts)) * (r + 1) for r in range(len(counts))]).sum(0)[:, None]
    assert torch.equal(x.grad, factor.expand(-1, 8).float())
    assert torch.equal(scales.grad, 10 * factor.expand(-1, 3).double())
    apart: list[Tensor] = [part[here].double().reshape(int(here.sum()), -1) for part in out[:4]]
    return [(int(n), int(sum(part[i].sum() for part in apart))) for i, n in enumerate(apart[2][:, 0])]


def needs(ids: Tensor, rank: int, world: int) -> Tensor:
    """[T]: which tokens have an expert of a rank."""
    return ((ids // (E // world) == rank) & (ids < E)).any(1)


def ids_of(number: Tensor) -> Tensor:
    """[T, 2]: every fifth token has no legal expert, every third the same one twice, and others those of one rank or of two."""
    ids = torch.stack([number % E, torch.where(number % 3 == 0, number % E, (number + 1) % E)], 1)
    return torch.where(number[:, None] % 5 == 4, torch.tensor([-1, E]), ids)
