"""Loops over a few small experts on the CPU, where the cost of each call decides: moefuse beside eager and Inductor's code of the loop.

    python benchmarks/small_loops_cpu.py
    python benchmarks/small_loops_cpu.py --experts 2,8 --tokens 16,512 --hidden 64 --threads 2 --train

One ``nn.Linear`` for each expert, found by ``torch.where`` and added by an index. Ratios are the other's time over moefuse's, of rounds in
which all run: above 1, moefuse is faster.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from _timing import interleaved, paired_ratio, percentile
from torch import Tensor, nn


class Layer(nn.Module):
    """A router, and one projection for each expert."""

    def __init__(self, experts: int, top_k: int, hidden: int) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).topk(self.top_k)
        weights, out = weights.softmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(ids == i)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


def step(model: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> Callable[[], object]:
    """One call, with its backward pass if that is asked for."""

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = model(x)
            if train:
                out.sum().backward()

    return run


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=numbers, default=[2, 4, 8])
    parser.add_argument("--tokens", type=numbers, default=[16, 128])
    parser.add_argument("--hidden", type=numbers, default=[64])
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for hidden in options.hidden:
        for experts in options.experts:
            for tokens in options.tokens:
                torch._dynamo.reset()
                model, x = Layer(experts, options.top_k, hidden), torch.randn(tokens, hidden)
                compiled = {name: torch.compile(copy.deepcopy(model), backend=name) for name in ("inductor", "moefuse")}
                calls = {name: step(one, x, options.train) for name, one in {"eager": model, **compiled}.items()}
                times = interleaved(calls, rounds=options.rounds)
                shown = ", ".join(f"{name} {percentile(of, 0.5):.3f} ms" for name, of in times.items())
                ratios = {name: paired_ratio(times[name], times["moefuse"])["median"] for name in ("eager", "inductor")}
                beside = ", ".join(f"{name}/moefuse {ratio:.2f}" for name, ratio in ratios.items())
                print(f"E={experts} K={options.top_k} T={tokens} H={hidden}: {shown}; {beside}", flush=True)


if __name__ == "__main__":
    main()
