"""What capturing an expert loop costs: against the number of experts E and layers L, and on a whole model.

    python benchmarks/capture.py --experts 8 32 128 512 --layers 1 4 16 --out benchmarks/results/capture.json
    python benchmarks/capture.py --model-layers 48 --model-experts 128 --out benchmarks/results/capture-model.json

The first form measures Dynamo and moefuse's rewrite, without Inductor, for L layers of tiny experts with random weights that only share
their dimensions: the loop over ``mask.nonzero()`` with stacked weights (``weight[e]``) and with a list of modules (``experts[e]``). Every
cell is a process of its own. The second form measures the whole first call (Inductor and C++ compiler included, fresh caches) of a tiny
transformers model with its default grouped_mm experts, and with the eager loop, both through moefuse; the two alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import by_line, environment, paired_ratio, summary
from torch import Tensor, nn

HIDDEN, INNER, TOP_K, TOKENS = 16, 8, 2, 12
KINDS = ("stacked", "list")
PATHS = ("grouped_mm", "eager")


class Stacked(nn.Module):
    """Weights of all experts in two parameters."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, INNER, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / 4)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, len(self.up)).permute(2, 1, 0)
        for row in mask.sum(dim=(-1, -2)).greater(0).nonzero():
            e = row[0]
            slot, token = torch.where(mask[e])
            inner = F.silu(F.linear(x[token], self.up[e]))
            out.index_add_(0, token, F.linear(inner, self.down[e]) * weights[token, slot, None])
        return out


class Mlp(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class Listed(nn.Module):
    """One module for each expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, len(self.experts)).permute(2, 1, 0)
        for row in mask.sum(dim=(-1, -2)).greater(0).nonzero():
            expert = self.experts[row]
            slot, token = torch.where(mask[row].squeeze(0))
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Net(nn.Module):
    """L layers, each with its router."""

    def __init__(self, kind: str, experts: int, layers: int) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(HIDDEN, experts, bias=False) for _ in range(layers))
        self.layers = nn.ModuleList((Stacked if kind == "stacked" else Listed)(experts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for router, layer in zip(self.routers, self.layers, strict=True):
            weights, ids = torch.topk(router(x).softmax(-1), TOP_K)
            x = x + layer(x, ids, weights)
        return x


def trace(kind: str, experts: int, layers: int) -> dict[str, Any]:
    """One cell, in this process: seconds of the first call and of the part in it that is moefuse's rewrite."""
    from moefuse import Options
    from moefuse.capture import entry
    from moefuse.pipeline import rewrite

    seen: dict[str, Any] = {"rewrite_s": 0.0, "graphs": 0, "fused": 0, "nodes": 0}

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        start = time.perf_counter()
        try:
            seen["nodes"] = max(seen["nodes"], len(gm.graph.nodes))
            report = rewrite.rewrite(gm, example_inputs, Options(), entry.frame())
        finally:
            seen["rewrite_s"] += time.perf_counter() - start
        seen["graphs"] += 1
        seen["fused"] += len(report.fused)
        return gm.forward

    entry.enable(backend, lambda _: Options(), lambda *_: None)
    torch.compile(Net(kind, 4, 1), backend=backend)(torch.randn(TOKENS, HIDDEN))  # pays what is paid once for the process
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(kind, experts, layers)
    x = torch.randn(TOKENS, HIDDEN)
    expected = net(x)
    seen.update(rewrite_s=0.0, graphs=0, fused=0, nodes=0)
    compiled = torch.compile(net, backend=backend)
    start = time.perf_counter()
    got = compiled(x)
    seconds = time.perf_counter() - start
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return {"seconds": seconds, "per_layer_s": seconds / layers} | seen


def model_call(path: str, layers: int, experts: int) -> dict[str, Any]:
    """The whole first call of a transformers model, in this process."""
    import logging
    import warnings

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import moefuse

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, hidden_size=32, moe_intermediate_size=16, intermediate_size=32, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, num_experts=experts, num_experts_per_tok=4, vocab_size=128, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._experts_implementation = path
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    ids = torch.randint(3, 128, (1, 16))
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="moefuse")
        start = time.perf_counter()
        got = compiled(ids, use_cache=False).logits
        seconds = time.perf_counter() - start
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    report = moefuse.last_report()
    return {"seconds": seconds, "fused": len(report.fused) if report else 0, "graphs": report.graph_count if report else 0}


def child(command: list[str], kernels: str) -> dict[str, Any]:
    """One measurement in a process with empty Inductor caches; ``kernels`` keeps moefuse's own compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "MOEFUSE_CACHE_DIR": kernels}
        done = subprocess.run([sys.executable, __file__, *command], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def grid(args: argparse.Namespace, kernels: str) -> dict[str, Any]:
    """Every cell of the first form."""
    rows = []
    print(f"{'weights':8s} {'L':>3s} {'E':>4s} {'seconds':>8s} {'per layer':>9s} {'rewrite':>8s} {'nodes':>6s} graphs fused")
    for kind in args.kinds:
        for layers in args.layers:
            for experts in args.experts:
                found = child(["--cell", kind, str(experts), str(layers)], kernels)
                rows.append({"weights": kind, "experts": experts, "layers": layers} | found)
                print(
                    f"{kind:8s} {layers:3d} {experts:4d} {found['seconds']:8.2f} {found['per_layer_s']:9.3f} {found['rewrite_s']:8.2f} "
                    f"{found['nodes']:6d} {found['graphs']:6d} {found['fused']:5d}",
                    flush=True,
                )
    return {"unit": "s", "tokens": TOKENS, "cells": rows}


def whole(args: argparse.Namespace, kernels: str) -> dict[str, Any]:
    """The second form."""
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    for turn in range(args.repeats):
        for path in PATHS if turn % 2 == 0 else PATHS[::-1]:
            found = child(["--model", path, str(args.model_layers), str(args.model_experts)], kernels)
            if (found["fused"], found["graphs"]) != (args.model_layers, 1):
                raise SystemExit(f"{path}: moefuse fused {found['fused']} of {args.model_layers} layers in {found['graphs']} graphs")
            seconds[path].append(found["seconds"])
            print(f"{path:12s} first call {found['seconds']:6.2f} s", flush=True)
    ratio = paired_ratio(seconds["eager"], seconds["grouped_mm"])
    print(f"eager loop / grouped_mm: {ratio['median']:.2f}x (median of {args.repeats} pairs)")
    settings = {"layers": args.model_layers, "experts": args.model_experts}
    return {"unit": "s"} | settings | {"seconds": {p: summary(v) for p, v in seconds.items()}, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--model-layers", type=int, default=0, help="measure a whole model of that many layers instead")
    parser.add_argument("--model-experts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="pairs of whole-model calls")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--cell", nargs=3, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--model", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(trace(args.cell[0], int(args.cell[1]), int(args.cell[2]))))
        return
    if args.model:
        print(json.dumps(model_call(args.model[0], int(args.model[1]), int(args.model[2]))))
        return
    with tempfile.TemporaryDirectory() as kernels:
        found = whole(args, kernels) if args.model_layers else grid(args, kernels)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        cells = found.pop("cells", [])
        args.out.write_text(by_line(environment() | found, "cells", cells))


if __name__ == "__main__":
    main()
