"""A router's choice on a GPU: ``moefuse::topk`` against ``torch.topk``, alone and in a compiled router.

    python benchmarks/router_gpu.py --seconds 120 --out benchmarks/results/router-h200.json

Checks first: values and ids must be those of ``torch.topk`` on scores without ties. Then microseconds: "alone" is a call in a CUDA graph;
"router" is projection, softmax, choice and renormalisation compiled by Inductor ("fused": all but the projection by ``moefuse::route``,
"whole": the projection by ``moefuse::router_logits``), as a graph and called from Python ("host": the time until the call returns). "cast"
routers multiply in float32, as DeepSeek-V3's does. "launches" are the kernels of one call of a router.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _timing import by_line, captured  # noqa: E402
from layer import environment  # noqa: E402

from moefuse.ops.meaning.recipe import Recipe  # noqa: E402  (moefuse.ops registers the ops)

SIZES = [(128, 8), (64, 6), (256, 8), (512, 10), (8, 2)]
TOKENS = [1, 16, 64, 512, 4096, 16384]
KINDS: dict[str, Callable[[Tensor, int], Any]] = {"torch": torch.topk, "moefuse": torch.ops.moefuse.topk}
ROUTERS = [*KINDS, "fused", "whole"]
WHOLE = [(128, 8, 2048, False), (256, 8, 7168, True)]
"""E, K, H and whether both factors are cast, of whole routers."""


def check(tokens: int, experts: int, k: int) -> None:
    scores = torch.rand(tokens, experts, device="cuda").argsort(-1).float()
    for got, want in zip(torch.ops.moefuse.topk(scores, k), torch.topk(scores, k), strict=True):
        assert torch.equal(got, want), f"T={tokens} E={experts} K={k}"


def in_a_graph(call: Callable[[], object], repeat: int = 20) -> Callable[[], float]:
    """A timer: microseconds per call, replayed in one graph."""
    replay = captured(call, repeat)

    def us() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
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


def router(name: str, k: int, cast: bool) -> Callable[[Tensor, Tensor], Any]:
    recipe, choose = Recipe(k, "softmax", renormalise=True), KINDS.get(name, torch.topk)

    def logits(x: Tensor, w: Tensor) -> Tensor:
        if name == "whole":
            return torch.ops.moefuse.router_logits(x, w, None, torch.float32 if cast else x.dtype)  # type: ignore[no-any-return]
        return torch.nn.functional.linear(x.float(), w.float()) if cast else torch.nn.functional.linear(x, w)

    def one(x: Tensor, w: Tensor) -> Any:
        return torch.ops.moefuse.route(logits(x, w), None, *recipe.arguments, x.dtype)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = choose(logits(x, w).float().softmax(-1), k)
        return (values / values.sum(-1, keepdim=True)).to(x.dtype), ids

    return torch.compile(one if name in ("fused", "whole") else f, fullgraph=True, dynamic=False)


def launches(call: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def medians(timers: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Medians of five turns of each timer."""
    turns: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(5):
        for name, us in timers.items():
            turns[name].append(us())
    return {name: round(statistics.median(values), 2) for name, values in turns.items()}


@torch.no_grad()
def choices(tokens: int, experts: int, k: int) -> dict[str, Any]:
    """The choice alone."""
    scores = torch.randn(tokens, experts, device="cuda").softmax(-1)
    timers = {f"alone {name}": in_a_graph(lambda choose=choose: choose(scores, k)) for name, choose in KINDS.items()}
    return {"T": tokens, "E": experts, "K": k, "us": medians(timers)}


@torch.no_grad()
def routers(tokens: int, experts: int, k: int, hidden: int, cast: bool) -> dict[str, Any]:
    """Whole routers."""
    row: dict[str, Any] = {"T": tokens, "E": experts, "K": k, "H": hidden, "cast": cast}
    timers: dict[str, Callable[[], float]] = {}
    x, w = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (tokens, experts))
    for name in ROUTERS:
        torch._dynamo.reset()
        compiled = router(name, k, cast)
        compiled(x, w)
        call = lambda compiled=compiled: compiled(x, w)  # noqa: E731
        row[f"launches {name}"] = len(launches(call))
        timers[f"router {name}"], timers[f"host {name}"] = in_a_graph(call), from_python(call)
    return {**row, "us": medians(timers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    for experts, k in SIZES:
        for tokens in TOKENS[:5]:
            check(tokens, experts, k)
    print("values and ids are those of torch.topk", flush=True)
    calls = [functools.partial(routers, tokens, *sizes) for sizes in WHOLE for tokens in (1, 8, 64, 4096)]
    calls += [functools.partial(choices, tokens, *sizes) for sizes, tokens in itertools.product(SIZES, TOKENS)]
    rows: list[dict[str, Any]] = []
    for call in calls:
        if time.perf_counter() > until:
            break
        rows.append(call())
    if args.out:
        args.out.write_text(by_line({**environment(args.commit), "unit": "microseconds, medians of five turns"}, "rows", rows))
    for row in rows:
        times = [f"{name} {us:.1f}" for name, us in row["us"].items()]
        counts = [f"launches {name} {row[f'launches {name}']}" for name in ROUTERS if f"launches {name}" in row]
        print(f"T={row['T']:<6} E={row['E']:<4} K={row['K']:<3}", *times, *counts, sep="  ")


if __name__ == "__main__":
    main()
