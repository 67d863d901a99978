"""Experts of six public models on a GPU: moefuse, transformers' implementations, F.grouped_mm and the hardware's ceilings in one run.

    python benchmarks/layer.py --out benchmarks/results/layer-h200.json
    python benchmarks/layer.py --shapes qwen3 --tokens 1,64 --only moefuse,hf_grouped_c,ub_read
    python benchmarks/layer.py --shapes mixtral --only moefuse,moefuse_apart,loop --once
    python benchmarks/layer.py --show benchmarks/results/layer-h200{,-few,-specialised}.json --plot docs/layer-h200.svg

Correctness comes first: an implementation that is further than 2 % from float32 on sampled tokens is not timed. Times are microseconds per
call, the median over CUDA-graph replays with rotating inputs; what cannot be captured is timed with events. All implementations of a point
take turns. Ceilings: ``ub_read`` streams the weights of the chosen experts once, ``ub_dense`` is two dense GEMMs of the same FLOPs.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402
import layer_report  # noqa: E402

OURS, CEILINGS = "moefuse", ("ub_read", "ub_dense")
NAMES = (
    OURS, *CEILINGS, "torch_grouped", "hf_eager", "hf_grouped", "hf_grouped_c", "hf_batched", "hf_batched_c", "hf_batched_ma",
    "triton_kernels",
)  # fmt: skip
APART = ("moefuse_apart", "loop")
"""Experts in Parameters of their own: our op, and an eager loop over them. Measured where ``--only`` names them."""
SETS = {1: 16, 8: 8, 64: 4, 512: 3}
LEAST_TURNS = 9
Lists = tuple[list[Tensor], ...]
Call = Callable[[Tensor, Tensor, Tensor], Any]


# Implementations ----------------------------------------------------------------------------------------------------------------------


def transformers_experts(s: gs.Shape, lists: Lists, implementation: str) -> torch.nn.Module:
    """transformers' module over the same weights."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    w_in, _, w_out, b_in, _, b_out = lists
    with torch.device("meta"):
        if s.oai:
            config = GptOssConfig(num_local_experts=s.experts, hidden_size=s.hidden, intermediate_size=s.inter, num_experts_per_tok=s.top_k)
        else:
            sizes = {"num_experts": s.experts, "hidden_size": s.hidden, "moe_intermediate_size": s.inter, "num_experts_per_tok": s.top_k}
            config = Qwen3MoeConfig(**sizes)
        config._experts_implementation = implementation
        module: torch.nn.Module = (GptOssExperts if s.oai else Qwen3MoeExperts)(config)
    names = {"gate_up_proj": w_in[0], "down_proj": w_out[0]}
    if s.oai:
        names = {"gate_up_proj": w_in[0].transpose(1, 2), "down_proj": w_out[0].transpose(1, 2)}
        names |= {"gate_up_proj_bias": b_in[0], "down_proj_bias": b_out[0]}
    for name, tensor in names.items():
        setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    return module.eval()


class Loop(torch.nn.Module):
    """The same experts as modules in a list and a loop over them, as in transformers 4 and in many people's own code."""

    def __init__(self, s: gs.Shape, lists: Lists) -> None:
        super().__init__()
        w_in, _, w_out, *_ = lists
        self.gate, self.up = (torch.nn.ParameterList(w[first:][: s.inter].detach().clone() for w in w_in[0]) for first in (0, s.inter))
        self.down = torch.nn.ParameterList(w.detach().clone() for w in w_out[0])

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, len(self.down)).permute(2, 1, 0)
        for e in range(len(self.down)):
            slot, token = torch.where(mask[e])
            rows = x[token]
            a = torch.nn.functional.silu(rows @ self.gate[e].t()) * (rows @ self.up[e].t())
            out.index_add_(0, token, a @ self.down[e].t() * weights[token, slot, None])
        return out


def grouped(s: gs.Shape, lists: Lists) -> Call:
    """Sort, gather, F.grouped_mm, activation, F.grouped_mm, weighted sum: plain torch, compiled."""
    w_in, _, w_out, b_in, _, b_out = lists

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        expert = flat[order]
        ends = torch.searchsorted(expert, torch.arange(1, s.experts + 1, device=x.device), out_int32=True)
        h = F.grouped_mm(x[order // s.top_k], w_in[0].transpose(1, 2), offs=ends)
        if s.oai:
            h = h + b_in[0][expert]
            gate, up = h[:, 0::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
            a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            gate, up = h.chunk(2, -1)
            a = F.silu(gate) * up
        y = F.grouped_mm(a, w_out[0].transpose(1, 2), offs=ends)
        if s.oai:
            y = y + b_out[0][expert]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=x.device)
        rows = y[inverse].view(-1, s.top_k, s.hidden)
        return (rows.float() * weights[:, :, None].float()).sum(1).to(x.dtype)

    return torch.compile(call, dynamic=False)


def reading(lists: Lists) -> Call:
    """Every weight of every chosen expert goes through a register once."""
    from read_kernel import read_experts

    w_in, _, w_out, *_ = lists
    cache: dict[int, Tensor] = {}

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> None:
        touched = cache.get(ids.data_ptr())
        if touched is None:
            touched = cache[ids.data_ptr()] = ids.unique().to(torch.int32)
        for w in (w_in[0], w_out[0]):
            read_experts(w, touched)

    return call


def dense(s: gs.Shape, lists: Lists, tokens: int) -> Call:
    """Two GEMMs with T*K rows."""
    w_in, _, w_out, *_ = lists
    slots = tokens * s.top_k
    rows, inner = (
        torch.randn(slots, s.hidden, device="cuda").to(torch.bfloat16),
        torch.randn(slots, s.inter, device="cuda").to(torch.bfloat16),
    )

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> None:
        F.linear(rows, w_in[0][0])
        F.linear(inner, w_out[0][0])

    return call


def make(name: str, s: gs.Shape, lists: Lists, tokens: int) -> Call | None:
    """The implementation, or None where it makes no sense (gathered weights for many slots)."""
    if name == OURS:
        import moefuse.ops  # noqa: F401

        options = gs.options(s)
        return lambda x, ids, weights: torch.ops.moefuse.experts(x, ids, weights, *lists, **options)
    if name in APART:
        loop = Loop(s, lists).requires_grad_(False)
        if name == "loop":
            return loop
        apart = (list(loop.gate), list(loop.up), list(loop.down), [], [], [])
        return lambda x, ids, weights: torch.ops.moefuse.experts(x, ids, weights, *apart, activation="silu", gating="separate")
    if name == "ub_read":
        return reading(lists)
    if name == "ub_dense":
        return dense(s, lists, tokens)
    if name == "torch_grouped":
        return grouped(s, lists)
    if name == "triton_kernels":
        from peer_triton_kernels import triton_kernels_layer

        return triton_kernels_layer(s, lists)
    if name.startswith("hf_batched") and tokens > 8:
        return None
    implementation = {"hf_e": "eager", "hf_g": "grouped_mm", "hf_b": "batched_mm"}[name[:4]]
    module = transformers_experts(s, lists, implementation)
    if name.endswith("_c"):
        return torch.compile(module, dynamic=False)
    return torch.compile(module, dynamic=False, mode="max-autotune-no-cudagraphs") if name.endswith("_ma") else module


# Measuring ----------------------------------------------------------------------------------------------------------------------------


class Timed:
    """One implementation at one point: captured if it can be, checked against float32."""

    def __init__(self, name: str, call: Call, sets: list[tuple[Tensor, ...]]) -> None:
        self.name, self.call, self.sets = name, call, sets
        self.times: list[float] = []
        for inputs in sets[:2]:
            self.out = call(*inputs)
        self.out = call(*sets[0])
        self.graph: torch.cuda.CUDAGraph | None = None
        if name in ("hf_eager", "loop"):
            return
        for inputs in sets:
            call(*inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for inputs in sets:
                call(*inputs)

    def once(self) -> float:
        """Microseconds per call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sets = self.sets if self.graph is not None else self.sets[:2]
        start.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for inputs in sets:
                self.call(*inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / len(sets)

    def peak(self) -> float:
        """MiB that one call takes at its peak beyond what is there before and the graph keeps."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.call(*self.sets[0])
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (1 << 20)

    def host(self, calls: int = 40) -> float:
        """Microseconds of the host per call, without CUDA graphs: median of single calls on an idle device."""
        times = []
        for i in range(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.call(*self.sets[i % len(self.sets)])
            times.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times)


def take_turns(timed: list[Timed], seconds: float) -> None:
    """Time each once per turn. The order is shuffled: who comes before decides the clock and the cache that one finds."""
    started, order = time.perf_counter(), random.Random(0)
    for turn in range(60):
        if turn >= LEAST_TURNS and time.perf_counter() - started > seconds:
            break
        for it in order.sample(timed, len(timed)):
            # The reference loop takes milliseconds and waits for the device: a few turns are enough.
            if it.graph is not None or turn < 3:
                it.times.append(it.once())


def measure(shape: str, tokens: int, lists: Lists, names: list[str], skew: str, seconds: float) -> list[dict[str, Any]]:
    """All implementations of one point, in turns."""
    s = gs.SHAPES[shape]
    torch.manual_seed(tokens)
    sets = [gs.inputs_of(s, tokens, skew=skew) for _ in range(SETS.get(tokens, 2))]
    rows = list(range(0, tokens, max(tokens // 8, 1)))[:8]
    exact = gs.exact(*sets[0], lists, s, rows)
    timed, results = [], []
    for name in names:
        entry: dict[str, Any] = {"shape": shape, "T": tokens, "impl": name}
        if skew != "uniform":
            entry["skew"] = skew
        try:
            torch._dynamo.reset()
            call = make(name, s, lists, tokens)
            if call is None:
                continue
            it = Timed(name, call, sets)
            if name not in CEILINGS:
                entry["error"] = round(gs.relative_error(it.out[rows], exact), 5)
                if not entry["error"] < 0.02:
                    raise RuntimeError(f"error {entry['error']}")
            timed.append((it, entry))
        except Exception as error:
            results.append({**entry, "failed": str(error).strip().split("\n")[0][:200]})
            print(shape, tokens, name, "FAILED", traceback.format_exc(limit=-3)[-500:], flush=True)
    if timed:
        take_turns([it for it, _ in timed], seconds)
    for it, entry in timed:
        results.append({**entry, "us": round(statistics.median(it.times[1:]), 2), "turns": len(it.times) - 1})
        if it.name.startswith(OURS) or it.name == "hf_grouped_c":
            results[-1]["host_us"] = round(it.host(), 1)
            results[-1]["peak_mib"] = round(it.peak(), 2)
    return results


def environment(commit: str | None) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "transformers"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            continue
    if commit is None:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        commit = done.stdout.strip()
    unit = "microseconds per call, median of CUDA-graph replays with rotating inputs, all implementations of a point in turns"
    return {"gpu": torch.cuda.get_device_name(), "versions": versions, "commit": commit, "dtype": "bfloat16", "unit": unit}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Ours and the ceilings at every point first, then the other implementations, with ours again, while the budget lasts."""
    begin = time.perf_counter()
    data: dict[str, Any] = {**environment(args.commit), "results": []}
    shapes, tokens = args.shapes.split(","), [int(t) for t in args.tokens.split(",")]
    wanted = args.only.split(",")
    first = [n for n in wanted if n in (OURS, *CEILINGS)]
    for names in (first, wanted) if first != wanted and not args.once else (wanted,):
        for shape in shapes:
            if time.perf_counter() - begin > args.budget:
                break
            lists = gs.weights_of(gs.SHAPES[shape])
            for t in tokens:
                if time.perf_counter() - begin > args.budget:
                    break
                try:
                    found = measure(shape, t, lists, names, args.skew, args.seconds)
                except Exception:
                    print(shape, t, "FAILED", traceback.format_exc(limit=-3)[-500:], flush=True)
                    continue
                done = {(r["shape"], r["T"], r["impl"]) for r in found}
                data["results"] = [r for r in data["results"] if (r["shape"], r["T"], r["impl"]) not in done] + found
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    layer_report.write(args.out, data)
                torch.cuda.empty_cache()
            del lists
            torch.cuda.empty_cache()
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default=",".join(gs.SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, gs.TOKENS)))
    parser.add_argument("--only", default=",".join(NAMES), help="implementations")
    parser.add_argument("--skew", default="uniform", choices=("uniform", "half", "zipf"))
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing per point")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds in all")
    parser.add_argument("--once", action="store_true", help="all at each point at once, without a first pass for ours and the ceilings")
    parser.add_argument("--commit", help="where the checkout is not a repository")
    parser.add_argument("--show", type=Path, nargs="+", help="print the table of results, the newest last, instead of measuring")
    parser.add_argument("--plot", type=Path, help="write the figure (SVG) of the result")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.show:
        data = layer_report.newest([json.loads(file.read_text()) for file in args.show])
    else:
        with torch.inference_mode():
            data = run(args)
    print(layer_report.table(data))
    if args.plot:
        args.plot.write_text(layer_report.figure(data))


if __name__ == "__main__":
    main()
