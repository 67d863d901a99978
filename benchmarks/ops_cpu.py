"""Paired timing of ``moefuse::experts`` on the CPU against the ways people write routed experts.

Every variant of a row runs in turn, round after round in a changing order, and the ratio is the median over rounds of
(other time / moefuse time) of the same round, so drift of the machine cancels. Above 1.00: moefuse is faster.

    python benchmarks/ops_cpu.py                         # a short grid
    python benchmarks/ops_cpu.py --grid full --dtype bfloat16 --json results.json

The other implementations are written here from the public description of each spelling:
loop (eager, one_hot and where, per expert), grouped (sort, torch._grouped_mm, compiled by Inductor), batched (gathered weights, bmm,
compiled by Inductor). ``op`` calls moefuse in eager mode; ``compiled`` inside torch.compile(backend="inductor").
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot, silu

import moefuse.ops  # noqa: F401  (registers torch.ops.moefuse)

Body = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def loop(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Eager loop over the experts that were hit."""
    out = torch.zeros_like(x)
    mask = one_hot(ids, w_in.shape[0]).permute(2, 1, 0)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        e = hit[0]
        slot, token = torch.where(mask[e])
        gate, up = linear(x[token], w_in[e]).chunk(2, dim=-1)
        y = linear(silu(gate) * up, w_out[e]) * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


@torch.library.custom_op("moefuse_bench::group_loop", mutates_args=())
def group_loop(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """What takes the place of torch._grouped_mm under Inductor for dtypes other than bfloat16: an opaque loop of mm(out=)."""
    out = rows.new_zeros((rows.shape[0], w.shape[2]))
    start = 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], w[e], out=out[start:end])
        start = end
    return out


@group_loop.register_fake
def _(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], w.shape[2]))


def _grouped_mm(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = torch._grouped_mm(rows, w, offs=ends) if rows.dtype == torch.bfloat16 else group_loop(rows, w, ends)
    return out


def grouped(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Sort, grouped GEMM, activation, grouped GEMM, unsort, sum."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat)
    ends = torch.histc(flat.float(), bins=w_in.shape[0], min=0, max=w_in.shape[0] - 1).cumsum(0).to(torch.int32)
    rows = x[order // ids.shape[1]]
    gate, up = _grouped_mm(rows, w_in.transpose(-2, -1), ends).chunk(2, dim=-1)
    y = _grouped_mm(silu(gate) * up, w_out.transpose(-2, -1), ends)
    y = y * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return y[back].view(x.shape[0], ids.shape[1], -1).sum(1).to(x.dtype)


def batched(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Gathered weights and bmm, one slot at a time."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(ids.shape[1], dim=0)
    gate, up = torch.bmm(w_in[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    y = torch.bmm(w_out[flat], (silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    y = y * weights.reshape(-1, 1)
    return y.view(x.shape[0], ids.shape[1], -1).sum(1).to(x.dtype)


def fused(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """moefuse."""
    out: Tensor = torch.ops.moefuse.experts(x, ids, weights, [w_in], [], [w_out], [], [], [])
    return out


def _time(f: Body, args: tuple[Tensor, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        f(*args)
    return (time.perf_counter() - start) / calls


def measure(variants: dict[str, Body], args: tuple[Tensor, ...], budget_s: float) -> dict[str, list[float]]:
    """Seconds per call, one entry per round and variant."""
    once = {}
    for name, f in variants.items():
        f(*args)
        once[name] = min(_time(f, args, 1) for _ in range(2))
    calls = {name: max(1, min(200, int(0.004 / t))) for name, t in once.items()}
    round_s = sum(once[n] * calls[n] for n in variants)
    rounds = max(5, min(60, int(budget_s / round_s)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            times[name].append(_time(variants[name], args, calls[name]))
    return times


def row(e: int, h: int, i: int, k: int, t: int, dtype: torch.dtype, budget_s: float, big_batched: int) -> dict[str, Any]:
    """Measure one size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    w_in = torch.randn(e, 2 * i, h, dtype=dtype) * h**-0.5
    w_out = torch.randn(e, h, i, dtype=dtype) * i**-0.5
    x = torch.randn(t, h, dtype=dtype)
    ids = torch.rand(t, e).topk(k, dim=-1).indices
    weights = torch.rand(t, k, dtype=dtype).softmax(-1)
    args = (x, ids, weights, w_in, w_out)
    compiled = lambda f: torch.compile(f, dynamic=False)  # noqa: E731
    variants: dict[str, Body] = {"op": fused, "compiled": compiled(fused), "loop": loop, "grouped": compiled(grouped)}
    if t * k * 3 * i * h * dtype.itemsize <= big_batched:
        variants["batched"] = compiled(batched)
    want = loop(*args).float()
    for name, f in variants.items():
        torch.testing.assert_close(f(*args).float(), want, atol=0.05, rtol=0.05, msg=lambda m, name=name: f"{name}: {m}")
    times = measure(variants, args, budget_s)
    ours = times["compiled"]
    out: dict[str, Any] = {"E": e, "H": h, "I": i, "K": k, "T": t, "dtype": str(dtype).removeprefix("torch.")}
    out["us"] = {name: statistics.median(v) * 1e6 for name, v in times.items()}
    out["ratio"] = {
        n: statistics.median(a / b for a, b in zip(v, ours, strict=True)) for n, v in times.items() if n not in ("op", "compiled")
    }
    out["ratio"]["loop/op"] = statistics.median(a / b for a, b in zip(times["loop"], times["op"], strict=True))
    return out


GRIDS: dict[str, list[tuple[int, int, int, int, int]]] = {
    "short": [
        *itertools.product((8,), (256,), (128,), (2,), (1, 8, 64, 512)),
        *itertools.product((64,), (1024,), (512,), (8,), (1, 8, 64, 512)),
        *itertools.product((128,), (512,), (256,), (8,), (1, 8, 64)),
        (8, 256, 128, 1, 1),
        (8, 2048, 1024, 2, 1),
        (8, 2048, 1024, 2, 64),
    ],
    "full": list(itertools.product((8, 64, 128), (256, 1024, 2048), (128, 512, 1024), (1, 2, 8), (1, 8, 64, 512))),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, default="short")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--budget", type=float, default=1.5, help="seconds of timed runs per row")
    parser.add_argument("--max-weights", type=int, default=3 << 30, help="skip sizes whose expert weights take more bytes")
    parser.add_argument("--max-gather", type=int, default=1 << 30, help="skip 'batched' where the gathered weights take more bytes")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.dtype}; ratio: other / moefuse compiled")
    print(f"{'E':>4}{'H':>6}{'I':>6}{'K':>3}{'T':>5}{'op us':>11}{'compiled us':>13}{'loop':>8}{'grouped':>9}{'batched':>9}{'loop/op':>9}")
    rows = []
    with torch.no_grad():
        for e, h, i, k, t in GRIDS[options.grid]:
            if e * 3 * i * h * dtype.itemsize > options.max_weights:
                continue
            r = row(e, h, i, k, t, dtype, options.budget, options.max_gather)
            rows.append(r)
            ratio = {n: f"{v:.2f}" for n, v in r["ratio"].items()}
            print(
                f"{e:>4}{h:>6}{i:>6}{k:>3}{t:>5}{r['us']['op']:>11.1f}{r['us']['compiled']:>13.1f}{ratio['loop']:>8}{ratio['grouped']:>9}"
                f"{ratio.get('batched', '-'):>9}{ratio['loop/op']:>9}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
