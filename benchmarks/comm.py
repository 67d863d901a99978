"""What the wires between ranks cost: torch's collectives, and moefuse's dispatch and combine over each transport.

    torchrun --nproc-per-node 2 benchmarks/comm.py --out benchmarks/results/comm-h200x2.json
    torchrun --nproc-per-node 2 benchmarks/comm.py --device cpu --rows 1 16     # smoke test

Rows of H = 2048 bfloat16 on each rank; results are checked before anything is timed. Microseconds per call, the slowest rank's: in a CUDA
graph (``graph``) and launched one after another (``launched``). ``limit``: bytes that a rank receives at 450 GB/s, NVLink 4 in one
direction. At the end the cost model (``moefuse/parallel/cost.py``) is fitted without two of the sizes, and predicts them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _ranks import PER_GRAPH, head, in_turns, leave, say, start, summary, told  # noqa: E402
from _timing import by_line, captured  # noqa: E402

import moefuse  # noqa: E402
import moefuse.ops  # noqa: E402, F401
from moefuse.parallel.cost import fitted, predicted  # noqa: E402
from moefuse.parallel.meshes import register  # noqa: E402
from moefuse.runtime.collectives import all_gather  # noqa: E402
from moefuse.runtime.groups import Group, Terms, group  # noqa: E402
from moefuse.runtime.transports import symm  # noqa: E402

H, E, K = 2048, 128, 8
ROWS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HELD_OUT = (512, 4096)
LIMIT = 450e3
"""Bytes per microsecond."""


def collectives(rows: int, world: int, device: torch.device) -> dict[str, tuple[Callable[[], Any], int]]:
    """(call, bytes that a rank receives) of each."""
    mine = torch.randn(rows, H, device=device).bfloat16()
    every = torch.empty(world * rows, H, device=device, dtype=mine.dtype)
    parts = torch.randn(world * rows, H, device=device).bfloat16()
    size = rows * H * 2
    all_gather(every, mine, dist.group.WORLD)
    assert torch.equal(every[dist.get_rank() * rows :][:rows], mine)
    found: dict[str, tuple[Callable[[], Any], int]] = {
        "all_gather": (lambda: all_gather(every, mine, dist.group.WORLD), (world - 1) * size),
        "all_to_all": (lambda: dist.all_to_all_single(every, parts), (world - 1) * size),
        "all_reduce": (lambda: dist.all_reduce(mine), 2 * (world - 1) * size // world),
    }
    if device.type != "cpu":
        found["reduce_scatter"] = (lambda: dist.reduce_scatter_tensor(mine, parts), (world - 1) * size)
    return found


def ours(rows: int, world: int, device: torch.device, mesh: str, transport: str) -> tuple[Callable[[], Any], int]:
    """Dispatch of tokens, routing weights and ids, and combine of what is sent back: checked, and the bytes that a rank receives."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(rows, H, generator=generator).bfloat16().to(device)
    weights = torch.rand(rows, K, generator=generator).to(device)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(rows)]).int().to(device)
    slots = E // world
    place = torch.arange(E, dtype=torch.int32, device=device)
    terms = Terms(mesh, transport, "distinct", rows).text  # type: ignore[arg-type]
    handles = {"allgather": 0}.get(transport, 2)

    def call(check: bool = False) -> Any:
        out = torch.ops.moefuse.ep_dispatch.default([x, weights], ids, place, slots, terms, "bench")
        y, handle = out[0], out[len(out) - handles :] if handles else []
        if check:
            # Every rank gives back the part of a token that its experts have of the whole.
            y = y * (out[2] >= 0).sum(-1, keepdim=True).to(y.dtype) / K
        return torch.ops.moefuse.ep_combine.default(y, handle, rows, terms, "bench")

    error = (call(True).float() - x.float()).abs().max().item()
    assert error <= 0.05, (transport, rows, error)
    return call, 2 * (world - 1) * rows * H * 2 + (world - 1) * rows * K * 8


def halves(rows: int, group: Group, device: torch.device) -> dict[str, tuple[Callable[[], Any], int]]:
    """A transfer through shared memory, and its parts: rows pushed to peers, and taken out of the buffer; between them is a barrier."""
    from moefuse.kernels.triton.provide import symm as kernels

    mine = torch.randn(rows, H, device=device).bfloat16()
    at, how = symm.transfer(group, device, rows, symm.regions([mine], group.size * rows))
    to = torch.full((rows,), -1, dtype=torch.int64, device=device)
    took = torch.ones(group.size * rows, dtype=torch.int32, device=device)
    (every,) = kernels.send((mine,), took, to, at, how)
    wanted = torch.empty_like(every)
    all_gather(wanted, mine, dist.group.WORLD)
    assert torch.equal(every, wanted)
    size = (group.size - 1) * rows * H * 2
    return {
        "symm send": (lambda: kernels.send((mine,), took, to, at, how), size),
        "symm push": (lambda: kernels.push_rows((mine,), to, at, how), size),
        "symm take": (lambda: kernels.take_rows((every,), took, at, how), size),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--transports", nargs="*", default=["allgather", "all_to_all", "symm"])
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    _, world, device = start(args.device)
    mesh = register(init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))["ep"])
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        calls = collectives(rows, world, device)
        if device.type == "cuda":
            with told("symm"):
                calls |= halves(rows, group(mesh), device)
        for name in [n for n in args.transports if device.type == "cuda" or n != "symm"]:
            with told(name):
                calls[f"moefuse {name}"] = ours(rows, world, device, mesh, name)
        how = {"launched": {name: (call, 1) for name, (call, _) in calls.items()}}
        if device.type == "cuda":
            waits = "moefuse all_to_all"  # for the host, so there is no graph of it
            how["graph"] = {name: (captured(call, PER_GRAPH), PER_GRAPH) for name, (call, _) in calls.items() if name != waits}
        for kind, candidates in how.items():
            for name, times in in_turns(candidates, rounds=15 if device.type == "cuda" else 3).items():
                size = calls[name][1]
                results.append({"what": name, "how": kind, "rows": rows, "bytes": size, "limit": size / LIMIT, "us": summary(times)})
        say(rows, {f"{r['what']} {r['how']}": round(r["us"]["median"], 1) for r in results if r["rows"] == rows})
    fits = [{"what": w, "how": h} for w, h in dict.fromkeys((r["what"], r["how"]) for r in results)]
    for fit in fits:
        points = {r["bytes"]: r["us"]["median"] for r in results if (r["what"], r["how"]) == (fit["what"], fit["how"])}
        held = {r["bytes"] for r in results if r["rows"] in HELD_OUT}
        known = {n: us for n, us in points.items() if n not in held}
        if len(known) < 3:
            continue
        fit["fit"] = fitted(known)
        fit["held_out"] = {n: {"us": us, "predicted": predicted(fit["fit"], n)} for n, us in points.items() if n in held}
        say(fit["what"], fit["how"], {n: f"{v['predicted'] / v['us']:.2f}" for n, v in fit["held_out"].items()})
    if args.out and dist.get_rank() == 0:
        info = head("us per call, the slowest rank's", "torchrun benchmarks/comm.py", args.commit) | {"model": fits}
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
