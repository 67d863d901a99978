"""Forward and backward of one layer of experts on a GPU: transformers' grouped_mm compiled by moefuse, and by Inductor alone.

    python benchmarks/train_gpu.py --out benchmarks/results/train-h200.json
    python benchmarks/train_gpu.py --shapes qwen3 --only moefuse,moefuse_own,moefuse_library
    python benchmarks/train_gpu.py --shapes mixtral --only moefuse_own --profile
    python benchmarks/train_gpu.py --shapes qwen3 --dtype float32 --only moefuse,hf_grouped

Gradients of the tokens, the routing weights and all expert weights. Correctness comes first: what is further than 2 % from float32, in the
output and the token gradients of sampled tokens, their routing weights' gradients, or the weight gradients of one expert, is not timed.
Times are microseconds per step, the median over CUDA-graph replays with rotating inputs; what cannot be captured is timed with events. All
implementations of a shape take turns. "us_launched" is the same without a graph, so with the host's work where that takes longer.

"moefuse_own" and "moefuse_library" force whose products are used (``kernels/triton/provide/products.py``). "loop" is a loop over a list of
experts, eager, because Inductor cannot make one graph of it, and "moefuse_loop" the same loop compiled by moefuse. "hf_grouped" is not
compiled: in float32 transformers keeps ``grouped_mm`` away from Inductor, which has no gradient of what stands in for it.
"moefuse_uncopied" keeps the caller's tokens for backward, not a copy that nobody else writes to: what ``moefuse::own`` takes. "dense" is a
bound: the six products of as many rows with one expert's weights, by torch, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402
import layer  # noqa: E402
import layer_report  # noqa: E402

import moefuse  # noqa: E402
from moefuse.runtime import providers  # noqa: E402

NAMES = ("moefuse", "moefuse_own", "moefuse_library", "hf_grouped_c", "moefuse_loop", "loop", "dense")
EAGER = ("loop", "hf_grouped")
LIMIT = 0.02
Step = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]


def make(name: str, s: gs.Shape, lists: layer.Lists) -> Step:
    """(x, ids, weights, gradient of the output) -> output, and gradients of x, weights and all Parameters."""
    from moefuse.kernels.triton import config
    from moefuse.passes.lower import operands

    loop, ours = "loop" in name, name.startswith("moefuse")
    module = layer.Loop(s, lists) if loop else layer.transformers_experts(s, lists, "grouped_mm")
    module.train().requires_grad_(True)
    tokens = operands.Operands.tokens if name == "moefuse_uncopied" else operands.Operands.kept_tokens
    preferred = {"moefuse_own": "own", "moefuse_library": "library"}.get(name)
    call: Any = module
    if name not in EAGER:
        call = torch.compile(module, dynamic=False, backend="moefuse" if ours else "inductor")
    parameters, fused = list(module.parameters()), False

    def step(x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
        nonlocal fused
        if preferred != config.PRODUCTS:
            config.PRODUCTS = preferred
            providers.forget_records()
        with mock.patch.object(operands.Operands, "kept_tokens", tokens):
            out = call(x, ids, weights)
        if ours and not fused:
            report = moefuse.last_report()
            if report is None or len(report.fused) != 1:
                raise RuntimeError(f"not fused: {report}")
            fused = True
        return [out.detach(), *torch.autograd.grad(out, [x, weights, *parameters], grad)]

    return step


def dense(s: gs.Shape, tokens: int, dtype: torch.dtype) -> Step:
    """The products of a step as those of one expert that has all rows."""
    rows, width = tokens * s.top_k, 2 * s.inter
    x, h, a, d_y = (torch.randn(rows, n, dtype=dtype, device="cuda") for n in (s.hidden, width, s.inter, s.hidden))
    w_in, w_out = (torch.randn(n, k, dtype=dtype, device="cuda") * k**-0.5 for n, k in ((width, s.hidden), (s.hidden, s.inter)))

    def step(*_: Tensor) -> list[Tensor]:
        return [x @ w_in.t(), a @ w_out.t(), d_y @ w_out, d_y.t() @ a, h @ w_in, h.t() @ x]

    return step


def of_expert(found: list[Tensor], expert: int) -> list[Tensor]:
    """Output, gradients of x and weights, and those of one expert's two projections."""
    out, d_x, d_weights, *rest = found
    if rest[0].dim() == 3:
        return [out, d_x, d_weights, *(d[expert] for d in rest if d.dim() == 3)]
    gate, up, down = (rest[i * len(rest) // 3 + expert] for i in range(3))
    return [out, d_x, d_weights, torch.cat((gate, up)), down]


class Timed:
    """One implementation at one shape; has what ``layer.take_turns`` asks for."""

    def __init__(self, name: str, step: Step, sets: list[tuple[Tensor, ...]]) -> None:
        self.name, self.step, self.sets = name, step, sets
        self.times: list[float] = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for inputs in sets:
                step(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(*sets[0])
        torch.cuda.synchronize()
        self.peak_mib = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.launched = round(statistics.median(self.once() for _ in range(5)), 1)

    def capture(self) -> None:
        """Record one step per input set."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for inputs in self.sets:
                    self.step(*inputs)
        except RuntimeError:
            torch.cuda.synchronize()
            return
        self.graph = graph

    def once(self) -> float:
        """Microseconds per step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for inputs in self.sets:
                self.step(*inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / len(self.sets)


def exact(s: gs.Shape, lists: layer.Lists, inputs: tuple[Tensor, ...], rows: list[int], expert: int) -> list[Tensor]:
    """In float32: output, gradient of x, gradient of weights of tokens ``rows``; gradients of w_in and w_out of one expert."""
    x, ids, weights, grad = (t.detach() for t in inputs)
    w_in, w_out = lists[0][0].detach(), lists[2][0].detach()

    def one(token: Tensor, scale: Tensor, a: Tensor, b: Tensor, e: int) -> Tensor:
        if s.oai:
            h = token @ a.t() + lists[3][0][e].detach().float()
            gate, up = h[:, 0::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1) @ b.t() + lists[5][0][e].detach().float()) * scale[:, None]
        gate, up = (token @ a.t()).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up @ b.t() * scale[:, None]

    with torch.enable_grad():
        out, d_x, d_weights = [], [], []
        for t in rows:
            token, scale = x[t : t + 1].float().requires_grad_(), weights[t].float().requires_grad_()
            parts = [one(token, scale[k : k + 1], w_in[e].float(), w_out[e].float(), e) for k, e in enumerate(ids[t].tolist())]
            total = torch.stack(parts).sum(0)
            found = torch.autograd.grad(total, (token, scale), grad[t : t + 1].float())
            out.append(total.detach())
            d_x.append(found[0])
            d_weights.append(found[1])
        token, slot = torch.where(ids == expert)
        a, b = (w[expert].float().requires_grad_() for w in (w_in, w_out))
        y = one(x[token].float(), weights[token, slot].float(), a, b, expert)
        d_in, d_out = torch.autograd.grad(y, (a, b), grad[token].float())
    return [torch.cat(out), torch.cat(d_x), torch.stack(d_weights), d_in, d_out]


def errors(found: list[Tensor], want: list[Tensor], rows: list[int], expert: int, in_out: bool) -> dict[str, float]:
    """Relative error of each result. ``in_out``: how Parameters are stored, and so their gradients."""
    out, d_x, d_weights, d_in, d_out = of_expert(found, expert)
    got = (out[rows], d_x[rows], d_weights[rows], d_in, d_out)
    names = ("out", "d_x", "d_weights", "d_w_in", "d_w_out")
    if in_out:
        got = (*got[:3], d_in.t(), d_out.t())
    return {name: round(gs.relative_error(g, w), 5) for name, g, w in zip(names, got, want, strict=True)}


def kernels_of(it: Timed, steps: int = 4) -> dict[str, float]:
    """Microseconds per step of each kernel by name, the longest first."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiled:
        for i in range(steps):
            it.step(*it.sets[i % len(it.sets)])
        torch.cuda.synchronize()
    times = {e.key[:60]: round(e.self_device_time_total / steps, 1) for e in profiled.key_averages() if e.self_device_time_total > 0}
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def measure(
    shape: str, tokens: int, names: list[str], seconds: float, deadline: float, profile: bool = False, dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Any]]:
    """All implementations at one shape, in turns."""
    s = gs.SHAPES[shape]
    torch.manual_seed(tokens)
    lists = gs.weights_of(s, dtype=dtype)
    for w in (*lists[0], *lists[2]):
        w.requires_grad_()
    sets: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        x, ids, weights = gs.inputs_of(s, tokens, dtype=dtype)
        sets.append((x.requires_grad_(), ids, weights.requires_grad_(), torch.randn_like(x)))
    rows, expert = list(range(0, tokens, max(tokens // 8, 1)))[:8], 1
    want = exact(s, lists, sets[0], rows, expert)
    timed: list[tuple[Timed, dict[str, Any]]] = []
    results = []
    for name in names:
        entry: dict[str, Any] = {"shape": shape, "T": tokens, "impl": name}
        if time.perf_counter() > deadline:
            results.append({**entry, "failed": "no time left"})
            continue
        try:
            torch._dynamo.reset()
            step = dense(s, tokens, dtype) if name == "dense" else make(name, s, lists)
            entry["errors"] = {"none": 0.0} if name == "dense" else errors(step(*sets[0]), want, rows, expert, s.oai)
            if not all(value < LIMIT for value in entry["errors"].values()):
                raise RuntimeError(f"errors {entry['errors']}")
            it = Timed(name, step, sets)
            entry["peak_mib"] = it.peak_mib
            entry["us_launched"] = it.launched
            if profile:
                entry["kernels_us"] = kernels_of(it)
            if name not in EAGER:  # they wait for the host, and a capture that fails leaves the random generator unusable
                it.capture()
            entry["graph"] = it.graph is not None
            timed.append((it, entry))
        except Exception as error:
            results.append({**entry, "failed": str(error).strip().split("\n")[0][:200]})
            print(shape, tokens, name, "FAILED", traceback.format_exc(limit=-3)[-500:], flush=True)
    if timed:
        layer.take_turns([it for it, _ in timed], seconds)
    for it, entry in timed:
        results.append({**entry, "us": round(statistics.median(it.times[1:]), 1), "turns": len(it.times) - 1})
    return results


def table(results: list[dict[str, Any]]) -> str:
    """One line per result, with the stored peer's time."""
    path = Path(__file__).parent / "results" / "peers-h200.json"
    stored = json.loads(path.read_text())["forward_backward"]
    titles = ("us", "launched", "peak MiB", "worst error", "stored hf_grouped_c")
    lines = [f"{'shape':10} {'T':>6} {'implementation':16}" + "".join(f"{title:>20}" for title in titles)]
    for r in results:
        peer = stored.get(r["shape"], {}).get(str(r["T"]), {}).get("hf_grouped_c", float("nan"))
        values = (r["us"], r["us_launched"], r["peak_mib"], max(r["errors"].values()), peer) if "us" in r else (r["failed"][:60],)
        lines.append(f"{r['shape']:10} {r['T']:6} {r['impl']:16}" + "".join(f"{value:>20}" for value in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="qwen3,mixtral")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", help="of tokens and weights")
    parser.add_argument("--only", default=",".join(NAMES), help="implementations")
    parser.add_argument("--seconds", type=float, default=1.5, help="of timing per shape")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds in all")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel too")
    parser.add_argument("--commit", help="where the checkout is not a repository")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    deadline = time.perf_counter() + args.budget - 5
    unit = "microseconds per forward and backward, median of CUDA-graph replays with rotating inputs, in turns"
    data: dict[str, Any] = {**layer.environment(args.commit), "dtype": args.dtype, "unit": unit, "results": []}
    for shape in args.shapes.split(","):
        data["results"] += measure(
            shape, args.tokens, args.only.split(","), args.seconds, deadline, args.profile, getattr(torch, args.dtype)
        )
        torch.cuda.empty_cache()
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            layer_report.write(args.out, data)
    for r in data["results"]:
        for name, us in list(r.get("kernels_us", {}).items())[:16]:
            print(f"{r['shape']:10} {r['impl']:16} {us:10.1f} {name}")
    print(table(data["results"]))


if __name__ == "__main__":
    main()
