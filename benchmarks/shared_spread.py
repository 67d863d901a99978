"""Shared experts beside a spread layer: Qwen1.5-MoE's block on two or more GPUs of one host, in CUDA graphs.

    torchrun --nproc-per-node 2 benchmarks/shared_spread.py --out benchmarks/results/shared-spread-h200x2.json

60 experts of width 1408, 4 a token, H = 2048, and one of width 5632 that every token takes, in bfloat16. ``overlap``: it runs on a side
stream from in front of the router to the sum, across both transfers; ``in order``: the same work on one stream, which has to give the same
bits; ``inductor``: shared experts are left to Inductor, as without the option. ``alone``: all experts on each rank. Microseconds are the
slowest rank's, all ways in turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _ranks import PER_GRAPH, head, in_turns, leave, say, start, summary  # noqa: E402
from _timing import by_line, captured  # noqa: E402

import moefuse  # noqa: E402

SIZES = {"num_experts": 60, "num_experts_per_tok": 4, "hidden_size": 2048, "moe_intermediate_size": 1408}
WAYS = {"inductor": (0, "1"), "in order": (1 << 30, "0"), "overlap": (1 << 30, "1")}
"""The option, and whether the environment allows it."""


def block(device: torch.device) -> nn.Module:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=5632)
    config._experts_implementation = "grouped_mm"  # as transformers sets it for a whole model
    torch.manual_seed(0)
    with device:
        made: nn.Module = Qwen2MoeSparseMoeBlock(config).bfloat16()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    return made.eval()


def called(model: nn.Module, x: Tensor, overlap: int) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    run = torch.compile(model, backend="moefuse", dynamic=False, options={"strict": True, "overlap": overlap})

    def call() -> Tensor:
        out = run(x)
        return out[0] if isinstance(out, tuple) else out

    call()
    return call


@torch.no_grad()
def measured(whole: nn.Module, mesh: Any, tokens: int, device: torch.device, rounds: int) -> dict[str, Any]:
    x = torch.randn(1, tokens, 2048, device=device, generator=torch.Generator(device).manual_seed(dist.get_rank())).bfloat16()
    graphs, held = {}, []  # graphs read weights where they are
    for kind in ("alone", "spread"):
        model, outs = copy.deepcopy(whole), []
        held.append(model)
        if kind == "spread":
            moefuse.parallelize(model, mesh, max_tokens=tokens, transport="symm")
        for name, (overlap, allowed) in WAYS.items():
            os.environ["MOEFUSE_OVERLAP"] = allowed
            call = called(model, x, overlap)
            graphs[f"{kind}, {name}"] = captured(call, PER_GRAPH), PER_GRAPH
            once = torch.cuda.CUDAGraph()
            with torch.cuda.graph(once):
                out = call()
            out.fill_(float("nan"))
            once.replay()
            outs.append(out.clone())
        assert torch.equal(*outs[1:]), f"{kind} {tokens}"
        error = (outs[0].float() - outs[1].float()).norm() / outs[0].float().norm()
        assert error < 0.02, f"{kind} {tokens}: {error}"
    return {name: summary(t) for name, t in in_turns(graphs, rounds=rounds).items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 512])
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    _, world, device = start("cuda")
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("ep",))["ep"]
    whole, results = block(device), list[dict[str, Any]]()
    for tokens in args.tokens:
        results.append({"T": tokens, "us": measured(whole, mesh, tokens, device, args.rounds)})
        say(tokens, {name: round(t["median"], 1) for name, t in results[-1]["us"].items()})
    if args.out and dist.get_rank() == 0:
        info = head("us per call, the slowest rank's", "torchrun --nproc-per-node 2 benchmarks/shared_spread.py", args.commit)
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
