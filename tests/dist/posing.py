"""What ranks do that say they are on several hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import moefuse
from moefuse.parallel.meshes import register
from moefuse.runtime import collectives, groups
from moefuse.runtime.groups import Terms
from tests.dist import equal, layers, scenes, travel


def on(rank: int, hosts: str) -> None:
    """Rank r is on the host ``hosts[r]``."""
    os.environ["MOEFUSE_HOST"] = hosts[rank]


def run(rank: int, hosts: str, case: equal.Case) -> tuple[equal.Found, list[str]]:
    """As on one process? And the transports that a plan has then."""
    on(rank, hosts)
    found = equal.run(rank, replace(case, how={"transport": "all_to_all", **case.how}))
    plan = moefuse.parallelize(layers.Model(layers.Stacked, 5), scenes.mesh(), transport="all_to_all")
    return found, [terms.transport for layer in plan.layers for terms in layer.terms]


def together(rank: int, hosts: str, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    on(rank, hosts)
    return travel.together(rank, "rails", counts)


def hosts_of(rank: int, hosts: str) -> tuple[int, ...]:
    """What all ranks know of the hosts of all."""
    on(rank, hosts)
    return groups.group(register(scenes.mesh())).hosts


def several_times(rank: int, hosts: str) -> list[bool]:
    """Whether equal calls give equal bits, in bfloat16: combined tokens and gradients."""
    on(rank, hosts)
    terms = Terms(register(scenes.mesh()), "rails", "sequence").text
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(20 + rank, 8, generator=generator).bfloat16()
    ids = torch.randint(0, 8, (20 + rank, 3), generator=generator)
    place = torch.arange(8, dtype=torch.int32)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        mine = x.clone().requires_grad_()
        rows, _, *handle = torch.ops.moefuse.ep_dispatch.default([mine], ids, place, 2, terms, "bits")
        out = torch.ops.moefuse.ep_combine.default(rows * (rank + 1.1), handle, len(x), terms, "bits")
        (out.float() ** 2).sum().backward()
        return out.detach(), mine.grad  # type: ignore[return-value]

    first = call()
    return [torch.equal(a, b) for _ in range(5) for a, b in zip(first, call(), strict=True)]


@dataclass
class Crossed:
    """Rows that left a host, of each all-to-all with splits; and how often a rank exchanged equal counts."""

    rows: list[int] = field(default_factory=list)
    exchanges: int = 0


def crossed(rank: int, hosts: str, tokens: int) -> tuple[Crossed, int, int]:
    """(what left this host in dispatch, combine and backward of both; (token, other host) pairs; (token, other rank) pairs)."""
    on(rank, hosts)
    group = groups.group(register(scenes.mesh()))
    terms = Terms(group.name, "rails", "sequence").text
    ids = torch.randint(0, 8, (tokens, 3), generator=torch.Generator().manual_seed(rank))
    place = torch.arange(8, dtype=torch.int32)
    found = Crossed()
    known: Any = dist.all_to_all_single

    def counted(every: Any, parts: Any, come: Any = None, go: Any = None, group: Any = group) -> None:
        if go is None:
            found.exchanges += 1
        else:
            found.rows.append(sum(n for r, n in enumerate(go) if hosts[r] != hosts[rank]))
        known(every, parts, come, go, group=group)

    x = torch.randn(tokens, 8).requires_grad_()
    collectives.dist.all_to_all_single = counted  # type: ignore[assignment]
    try:
        rows, _, *handle = torch.ops.moefuse.ep_dispatch.default([x], ids, place, 2, terms, "crossing")
        torch.ops.moefuse.ep_combine.default(rows, handle, tokens, terms, "crossing").sum().backward()
    finally:
        collectives.dist.all_to_all_single = known
    ranks = [{int(e) // 2 for e in row} for row in ids]
    far = [{hosts[r] for r in owners if hosts[r] != hosts[rank]} for owners in ranks]
    return found, sum(map(len, far)), sum(len([r for r in owners if hosts[r] != hosts[rank]]) for owners in ranks)
