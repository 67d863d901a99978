"""Transfers of a spread layer beside what needs none of them, against the same in order: one layer on two or more GPUs of one host.

    torchrun --nproc-per-node 2 benchmarks/beside.py --out benchmarks/results/beside-h200x2.json
    torchrun --nproc-per-node 2 benchmarks/beside.py --train --out benchmarks/results/beside-train-h200x2.json

128 experts, 8 a token, H = 2048, in bfloat16; I = 768 is Qwen3-30B-A3B's layer, and I = 128 has on two GPUs the ratio of wire to work that
seven have with I = 768. ``work``: the experts of a rank for as many rows, with nothing that travels. ``exposed``: what transfers take
beside ``work``, of what they take in order. Outputs are compared bit for bit before anything is timed. Microseconds are the slowest
rank's: in CUDA graphs, all in turns, and launched from records, under Inductor. ``--train``:
forward, and gradients of tokens, routing weights and weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _ranks import PER_GRAPH, head, in_turns, leave, say, start, summary  # noqa: E402
from _timing import by_line, captured  # noqa: E402

import moefuse.ops  # noqa: E402, F401
from moefuse.parallel.meshes import register  # noqa: E402
from moefuse.runtime import providers  # noqa: E402
from moefuse.runtime.groups import Terms  # noqa: E402
from moefuse.runtime.transports import beside  # noqa: E402

H, E, K = 2048, 128, 8
POINTS = ((128, 1024), (128, 2048), (128, 4096), (128, 16384), (768, 1024), (768, 2048), (768, 4096), (768, 16384))
"""(I, T): width of an expert, tokens of each rank."""
NEVER = 1 << 40


class Layer:
    """A rank's experts and tokens."""

    def __init__(self, inter: int, tokens: int, mesh: str, rank: int, world: int, device: torch.device, train: bool = False) -> None:
        source = torch.Generator(device).manual_seed(rank)
        self.slots, self.rank, self.world = E // world, rank, world
        self.w_in = torch.randn(self.slots, 2 * inter, H, device=device, dtype=torch.bfloat16, generator=source) * 0.02
        self.w_out = torch.randn(self.slots, H, inter, device=device, dtype=torch.bfloat16, generator=source) * 0.02
        self.x = torch.randn(tokens, H, device=device, dtype=torch.bfloat16, generator=source)
        self.ids = torch.rand(tokens, E, device=device, generator=source).topk(K).indices.int()
        self.weights = torch.rand(tokens, K, device=device, generator=source).bfloat16()
        self.how: dict[str, Any] = {"place": torch.arange(E, dtype=torch.int32, device=device), "slots": self.slots}
        self.how["terms"] = Terms(mesh, "symm", "distinct", tokens).text
        self.train, self.grad = train, torch.randn(tokens, H, device=device, dtype=torch.bfloat16, generator=source)
        for t in (self.x, self.weights, self.w_in, self.w_out) if train else ():
            t.requires_grad_()
        self.op: Callable[..., Tensor] = torch.compile(torch.ops.moefuse.ep_experts.default, dynamic=False)

    def run(self, op: Any, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor, **how: Any) -> tuple[Tensor, ...]:
        """What a step makes."""
        out = op(x, ids, weights, [self.w_in], [], [self.w_out], [], [], [], **how)
        if not self.train:
            return (out,)
        return (out.detach(), *torch.autograd.grad(out, [x, weights, self.w_in, self.w_out], grad))

    def from_bytes(self, least: int) -> Callable[[], tuple[Tensor, ...]]:
        """Transfers are beside from so many bytes on."""

        def call() -> tuple[Tensor, ...]:
            if least != beside.LEAST:
                providers.forget_records()
            beside.LEAST = least
            return self.run(self.op, self.x, self.ids, self.weights, self.grad, **self.how, layer="a layer")

        return call

    def work(self) -> Callable[[], tuple[Tensor, ...]]:
        """As many rows as all ranks send."""
        x, weights, grad = (t.detach().repeat(self.world, 1).requires_grad_(self.train) for t in (self.x, self.weights, self.grad))
        local = self.ids.repeat(self.world, 1) - self.rank * self.slots
        local = torch.where((local >= 0) & (local < self.slots), local, -1).int()
        return lambda: self.run(torch.ops.moefuse.experts.default, x, local, weights, grad.detach())


def checked(layer: Layer, calls: dict[str, Callable[[], tuple[Tensor, ...]]]) -> None:
    """All ways give the same for other tokens in each of several calls."""
    found = {}
    for name, call in calls.items():
        source, outs = torch.Generator(layer.x.device).manual_seed(layer.rank), list[Tensor]()
        for _ in range(4 if layer.train else 20):
            with torch.no_grad():
                layer.x.copy_(torch.randn(layer.x.shape, device=layer.x.device, generator=source))
            outs += call()
        found[name] = outs
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


def measured(layer: Layer, rounds: int) -> dict[str, Any]:
    ways = {"beside": layer.from_bytes(1), "in order": layer.from_bytes(NEVER)}
    checked(layer, ways)
    launched = {f"{name}, launched": in_turns({name: (call, 1)}, rounds=rounds)[name] for name, call in ways.items()}
    graphs = {name: (captured(call, PER_GRAPH), PER_GRAPH) for name, call in {**ways, "work": layer.work()}.items()}
    times = in_turns(graphs, rounds=rounds)
    found = {name: summary(t) for name, t in {**times, **launched}.items()}
    takes = {name: found[name]["median"] for name in times}
    return {"us": found, "exposed": (takes["beside"] - takes["work"]) / (takes["in order"] - takes["work"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 2048, 4096, 16384])
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rank, world, device = start("cuda")
    mesh = register(init_device_mesh("cuda", (world,), mesh_dim_names=("ep",))["ep"])
    results: list[dict[str, Any]] = []
    for inter, tokens in [point for point in POINTS if point[1] in args.tokens]:
        torch.cuda.empty_cache()
        with torch.set_grad_enabled(args.train):
            layer = Layer(inter, tokens, mesh, rank, world, device, args.train)
            results.append({"I": inter, "T": tokens, **measured(layer, args.rounds)})
        us = {name: round(t["median"], 1) for name, t in results[-1]["us"].items()}
        say(inter, tokens, us, f"exposed {results[-1]['exposed']:.2f}")
    if args.out and dist.get_rank() == 0:
        info = head(
            "us per call, the slowest rank's", f"torchrun --nproc-per-node 2 benchmarks/beside.py{' --train' * args.train}", args.commit
        )
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
