"""Low-rank adapters on a layer's experts: forward, and forward with backward, of one Qwen3-30B-A3B layer in bfloat16 with frozen experts.

    python benchmarks/lora_gpu.py --out benchmarks/results/lora-h200.json
    python benchmarks/lora_gpu.py --device cpu --tiny          # smoke test

``terms``: the terms beside the products (``moefuse::experts_extended``); ``materialised``: moefuse with the weights summed, as before these
kernels; ``inductor``: the same program under Inductor alone; ``split``: terms beside the products by hand, as Unsloth does it, under
Inductor; ``frozen``: moefuse without adapters, which is what they cost nothing over.
Adapters are float32, of rank 16, as PEFT makes them. Each is checked against float64 weights on a sample of tokens first.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _timing import by_line, environment, interleaved, paired_ratio, summary  # noqa: E402

import moefuse.passes.match.templates as templates  # noqa: E402
from tests.gpu.stacked_lora import Split, Stacked  # noqa: E402

LAYER = {"experts": 128, "hidden": 2048, "inner": 768, "rank": 16, "top_k": 8}
TINY = {"experts": 8, "hidden": 64, "inner": 32, "rank": 8, "top_k": 2}
GRAPHED = 10
NAMES = ("terms", "materialised", "inductor", "split", "frozen")


class Frozen(Stacked):
    """Without adapters."""

    def weight(self, name: str) -> Tensor:
        found: Tensor = getattr(self, name)
        return found


@contextlib.contextmanager
def summed() -> Iterator[None]:
    """No device takes weights apart."""
    before, templates.WITH_TERMS = templates.WITH_TERMS, ()
    try:
        yield
    finally:
        templates.WITH_TERMS = before


def layer(args: argparse.Namespace, kind: type[Stacked]) -> Stacked:
    torch.manual_seed(0)
    made = kind(**(TINY if args.tiny else LAYER)).to(args.device)
    for name in ("router.weight", "gate_up", "down"):
        parameter = made.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    return made


class Run:
    """One candidate: compiled, with what is timed of it."""

    def __init__(self, args: argparse.Namespace, name: str, x: Tensor, training: bool) -> None:
        self.model = layer(args, {"frozen": Frozen, "split": Split}.get(name, Stacked))
        self.x = x.clone().requires_grad_(training)
        # Other options, or Dynamo would take what it compiled for the first of two equal models.
        options: dict[str, Any] | None = {"expect": 1} if name == "materialised" else None
        self.run: Any = torch.compile(self.model, backend="inductor" if name in ("inductor", "split") else "moefuse", options=options)
        self.training, self.cuda = training, args.device == "cuda"
        with summed() if name == "materialised" else contextlib.nullcontext():
            for _ in range(3):
                self()

    def __call__(self) -> None:
        self.step()
        if self.cuda:
            torch.cuda.synchronize()

    def step(self) -> Tensor:
        """Gradients are freed at once: what is measured is the layer."""
        with torch.set_grad_enabled(self.training):
            out: Tensor = self.run(self.x)
        if self.training:
            out.backward(torch.ones_like(out))
            self.x.grad = None
            self.model.zero_grad()
        return out.detach()

    def error(self) -> float:
        """Of some tokens' outputs, relative, against weights with terms in float64."""
        out, model, some = self.step(), self.model, slice(0, 16)
        with torch.no_grad():
            weights, ids = model.router(self.x[some]).softmax(-1, dtype=torch.float32).topk(model.top_k)
            exact = torch.zeros(ids.shape[0], out.shape[1], dtype=torch.float64, device=out.device)
            for t, k in ((t, k) for t in range(ids.shape[0]) for k in range(model.top_k)):
                gate_up, down = (self.weight(name, int(ids[t, k])) for name in ("gate_up", "down"))
                gate, up = (gate_up @ self.x[t].double()).chunk(2)
                exact[t] += weights[t, k].double() * (down @ (torch.nn.functional.silu(gate) * up))
        return float((out[some].double() - exact).norm() / exact.norm())

    def weight(self, name: str, e: int) -> Tensor:
        w, (a, b) = getattr(self.model, name)[e].double(), self.model.factors(name)
        return w if isinstance(self.model, Frozen) else w + 0.5 * b[e].double() @ a[e].double()

    def replay(self) -> Callable[[], object] | None:
        """Inference without the host: a CUDA graph of a step, ten times over, so that the launch of a graph counts for little."""
        if self.training or not self.cuda:
            return None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(GRAPHED):
                self.step()

        def run() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return run

    def peak(self) -> float:
        """MiB above what is there before a step."""
        if not self.cuda:
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def measured(args: argparse.Namespace, tokens: int, training: bool) -> list[dict[str, Any]]:
    hidden = (TINY if args.tiny else LAYER)["hidden"]
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(args.device, torch.bfloat16)
    torch._dynamo.reset()
    runs = {name: Run(args, name, x, training) for name in NAMES}
    errors = {name: run.error() for name, run in runs.items()}
    peaks = {name: run.peak() for name, run in runs.items()}
    calls: dict[str, Callable[[], object]] = dict(runs)
    times = interleaved(calls, rounds=args.rounds)
    graphs = {name: graph for name, run in runs.items() if (graph := run.replay()) is not None}
    alone = interleaved(graphs, rounds=args.rounds) if graphs else {}
    rows = []
    for name in NAMES:
        row = {"tokens": tokens, "training": training, "impl": name, "error": errors[name], "peak_mib": peaks[name]}
        row |= {"ms": summary(times[name]), "times_terms": paired_ratio(times[name], times["terms"])["median"]}
        if alone:
            row["graph_ms"] = summary([ms / GRAPHED for ms in alone[name]])
        shown = {k: round(row[k]["median"], 4) for k in ("ms", "graph_ms") if k in row}
        print({k: v for k, v in row.items() if k not in shown} | shown, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 4096])
    parser.add_argument("--training", type=int, nargs="*", default=[4096])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    points = [(tokens, False) for tokens in args.tokens] + [(tokens, True) for tokens in args.training]
    rows: list[dict[str, Any]] = []
    for tokens, training in points:
        rows += measured(args, tokens, training)
        if args.out is not None:
            args.out.write_text(by_line(environment(), "results", rows))


if __name__ == "__main__":
    main()
