"""A router's choice on a GPU: ``moefuse::topk`` against ``torch.topk``, alone and in a compiled router.

    python benchmarks/router_gpu.py --seconds 120 --out benchmarks/results/router-h200.json

Checks first: values and ids must be those of ``torch.topk`` on scores without ties. Then microseconds: "alone" is a call in a CUDA graph;
"router" is projection, softmax, choice and renormalisation compiled by Inductor ("fused": all but the projection by ``moefuse::route``), as
a graph and called from Python ("host": the time until the call returns). "launches" are the kernels of one call of that router.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent.parent)]

from moefuse.ops.recipe import Recipe  # noqa: E402  (moefuse.ops registers the ops)

SIZES = [(128, 8), (64, 6), (256, 8), (512, 10), (8, 2)]
TOKENS = [1, 16, 64, 512, 4096, 16384]
HIDDEN = 2048
KINDS: dict[str, Callable[[Tensor, int], Any]] = {"torch": torch.topk, "moefuse": torch.ops.moefuse.topk}
ROUTERS = [*KINDS, "fused"]


def check(tokens: int, experts: int, k: int) -> None:
    scores = torch.rand(tokens, experts, device="cuda").argsort(-1).float()
    for got, want in zip(torch.ops.moefuse.topk(scores, k), torch.topk(scores, k), strict=True):
        assert torch.equal(got, want), f"T={tokens} E={experts} K={k}"


def in_a_graph(call: Callable[[], object], repeat: int = 20) -> Callable[[], float]:
    """A timer: microseconds per call, replayed in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            call()

    def us() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeat

    us()
    return us


def from_python(call: Callable[[], object], repeat: int = 50) -> Callable[[], float]:
    """A timer: microseconds until a call returns."""

    def us() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - start) * 1e6 / repeat

    us()
    return us


def router(name: str, k: int) -> Callable[[Tensor, Tensor], Any]:
    recipe, choose = Recipe(k, "softmax", renormalise=True), KINDS.get(name, torch.topk)

    def whole(x: Tensor, w: Tensor) -> Any:
        return torch.ops.moefuse.route(torch.nn.functional.linear(x, w), None, *recipe.arguments, x.dtype)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = choose(torch.nn.functional.linear(x, w).float().softmax(-1), k)
        return (values / values.sum(-1, keepdim=True)).to(x.dtype), ids

    return torch.compile(whole if name == "fused" else f, fullgraph=True, dynamic=False)


def launches(call: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@torch.no_grad()
def measure(tokens: int, experts: int, k: int, whole: bool) -> dict[str, Any]:
    """Medians of five turns of each timer."""
    scores = torch.randn(tokens, experts, device="cuda").softmax(-1)
    row: dict[str, Any] = {"T": tokens, "E": experts, "K": k, "us": {}}
    timers = {f"alone {name}": in_a_graph(lambda choose=choose: choose(scores, k)) for name, choose in KINDS.items()}
    if whole:
        x, w = (torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in (tokens, experts))
        for name in ROUTERS:
            torch._dynamo.reset()
            compiled = router(name, k)
            compiled(x, w)
            call = lambda compiled=compiled: compiled(x, w)  # noqa: E731
            row[f"launches {name}"] = launches(call)
            timers[f"router {name}"], timers[f"host {name}"] = in_a_graph(call), from_python(call)
    turns: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(5):
        for name, us in timers.items():
            turns[name].append(us())
    row["us"] = {name: round(statistics.median(values), 2) for name, values in turns.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    for experts, k in SIZES:
        for tokens in TOKENS[:5]:
            check(tokens, experts, k)
    print("values and ids are those of torch.topk", flush=True)
    rows: list[dict[str, Any]] = []
    for (experts, k), tokens in itertools.product(SIZES, TOKENS):
        if time.perf_counter() > until:
            break
        rows.append(measure(tokens, experts, k, whole=(experts, k) == SIZES[0] and tokens in (1, 64, 4096)))
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    for row in rows:
        times = [f"{name} {us:.1f}" for name, us in row["us"].items()]
        counts = [f"launches {name} {len(row[f'launches {name}'])}" for name in ROUTERS if f"launches {name}" in row]
        print(f"T={row['T']:<6} E={row['E']:<4} K={row['K']:<3}", *times, *counts, sep="  ")


if __name__ == "__main__":
    main()
