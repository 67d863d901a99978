"""Gradients of expert weights on a GPU: our kernels with other tile sizes, gathering and from sorted rows, and torch's grouped_mm.

    python benchmarks/wgrad_gpu.py --out benchmarks/results/wgrad-h200.json
    python benchmarks/wgrad_gpu.py --only "mixtral in;qwen3 out"

The sizes of both projections of several models at 4096 tokens. What is further than 1 % from float32 for one expert is reported as wrong.
Microseconds per call: the least of three runs of calls in a row. "separate" writes to E tensors, so the host's work is in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import layer  # noqa: E402
from _timing import by_line  # noqa: E402

from moefuse.kernels.triton.host import sorted_rows, wgrad  # noqa: E402
from moefuse.kernels.triton.host.sorted_rows import Sorted  # noqa: E402
from moefuse.kernels.triton.provide import library  # noqa: E402
from moefuse.tuning.problem import Tiles  # noqa: E402

SIZES = {
    "mixtral in": (8, 8192, 28672, 4096),
    "mixtral out": (8, 8192, 4096, 14336),
    "gptoss in": (32, 16384, 5760, 2880),
    "qwen3 in": (128, 32768, 1536, 2048),
    "qwen3 out": (128, 32768, 2048, 768),
    "qwen3 in, 1024 tokens": (128, 8192, 1536, 2048),
    "qwen3 in, 512 tokens": (128, 4096, 1536, 2048),
    "small": (64, 32768, 512, 256),
}
"""Experts, rows, features and inputs."""

TILES = {
    f"{bn}x{bk}x{br}, {warps} warps, {stages} stages": (bn, Tiles(bk, br, warps, stages, 8))
    for bn, bk, br, warps, stages in (
        (128, 128, 32, 4, 5),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 32, 8, 5),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 4),
    )
}


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Of one call, the least of three runs."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return min(times)


def measure(name: str) -> Iterator[dict[str, Any]]:
    """All ways at one size."""
    experts, rows, n, k = SIZES[name]
    torch.manual_seed(0)
    order, offsets = sorted_rows.sort(torch.randint(0, experts, (rows, 1), device="cuda"), experts)
    it = Sorted(order, offsets, rows, experts, 1)
    g, x = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (n, k))
    stacked = [torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16)]
    separate = [torch.empty(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(experts)]
    first, last = offsets[1:3].tolist()
    want = g[first:last].float().t() @ x[first:last].float()
    flops, ends, chosen = 2 * rows * n * k, offsets[1:].to(torch.int32), wgrad.grad_tiles

    tokens = torch.empty_like(x)
    tokens[order] = x

    ways: dict[str, tuple[Any, Callable[[], list[Tensor]]]] = {
        "gathering": (None, lambda: wgrad.weight_grads(stacked, g, tokens, it, x_tokens=True)),
        "rows by pointers": (None, lambda: wgrad.weight_grads(stacked, g, x, it)),
        "grouped_mm": (None, lambda: [library.weight_grad(stacked[0], g, x, ends)]),
        **{label: (tiles, lambda: wgrad.weight_grads(stacked, g, x, it)) for label, tiles in TILES.items()},
        "separate": (chosen(g, x, it), lambda: wgrad.weight_grads(separate, g, x, it)),
        "as chosen": (chosen(g, x, it), lambda: wgrad.weight_grads(stacked, g, x, it)),
    }
    for label, (tiles, call) in ways.items():
        wgrad.grad_tiles = lambda *_, tiles=tiles: tiles  # type: ignore[assignment, misc]
        found = call()
        one = found[1] if len(found) > 1 else found[0][1]
        error = float((one.float() - want).norm() / want.norm())
        us = microseconds(call, max(3, min(40, int(2e13 / flops)))) if error < 0.01 else float("nan")
        yield {"size": name, "way": label, "us": round(us, 1), "tflops": round(flops / us / 1e6, 1), "error": round(error, 5)}
    wgrad.grad_tiles = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=";".join(SIZES), help="sizes, with ; between them")
    parser.add_argument("--commit", help="where the checkout is not a repository")
    args = parser.parse_args()
    head, results = layer.environment(args.commit) | {"unit": "microseconds per call"}, []
    for name in args.only.split(";"):
        for result in measure(name):
            results.append(result)
            print(f"{name:24} {result['way']:32} {result['us']:9} us {result['tflops']:7} TFLOPS", flush=True)
        if args.out:
            args.out.write_text(by_line(head, "results", results))


if __name__ == "__main__":
    main()
