"""``plan.balance`` on several GPUs: Qwen3-30B-A3B's block, whose experts are chosen by Zipf's law, before and after, in turns.

    torchrun --nproc-per-node 2 benchmarks/balanced.py --out benchmarks/results/balanced-h200x2.json
    torchrun --nproc-per-node 2 benchmarks/balanced.py --device cpu --tiny     # smoke test

128 experts, 8 a token, T tokens on each rank; expert 0 is the hottest, so that no placement is worse than the linear one. ``linear``: as
it was. ``balanced``: behind ``plan.balance``, with what ``moefuse.load_of`` counted of other tokens; its CUDA graph was recorded before.
``uniform``: as it was, with tokens that choose all experts alike: the limit where rows take the time; of few tokens, though, more experts
are read then. ``rows``: of the busiest rank, over the mean; ``travel``: rows that travel for each token; ``read``: the most experts with
tokens on a rank. Figures are the slowest rank's; ``gb_s``: what the rank that sends most sends, by the time for which weights move.

The router is the block's own. A token's first feature is 1, or 0 for uniform ones; the next are Gumbel's noise, one for each expert; the
rest is normal. The gate takes its own noise for each expert, and the logarithm of Zipf's law from the first feature, so that its top-k is
Gumbel's of that law (``benchmarks/balance.py`` draws the same, and is compared with). A score is a sum of two products, rounded once: it is
the same whoever adds. Tokens whose last expert is as good as the next one are left out, for routers may differ about these.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _ranks import PER_GRAPH, head, in_turns, leave, start, summary  # noqa: E402
from _timing import by_line, captured, short  # noqa: E402
from balance import chosen, traffic  # noqa: E402
from parallel import block  # noqa: E402

import moefuse  # noqa: E402
from moefuse.parallel import moves  # noqa: E402
from moefuse.parallel.placement import Placement  # noqa: E402

TOKENS = (16, 512, 4096)
POWER = 1.2
FLAT = 0.25
"""Scores times this: the same experts, with weights that are more alike, so that a wrong one of any of them shows."""
CALLS = 4
"""In which the load is counted."""
SAMPLE = 1 << 16
"""Tokens by which what is chosen is compared with the law."""


def by_law(weight: Tensor) -> None:
    """Have a gate [E, H] choose by the law, from features of tokens."""
    experts = len(weight)
    weight.zero_()
    weight[:, 0] = -POWER * torch.arange(1, experts + 1, dtype=torch.float64).log()
    weight[:, 1 : 1 + experts].fill_diagonal_(1)
    weight.mul_(FLAT)


def drawn(count: int, weight: Tensor, top: int, law: bool, seed: int) -> tuple[Tensor, Tensor]:
    """(tokens [1, T, H], the experts [T, K] on the CPU) for a gate; the seed is apart for each rank."""
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    experts, width = weight.shape
    x = torch.randn(count + count // 2 + 16, width, generator=generator)
    x[:, 0] = float(law)
    x[:, 1 : 1 + experts] = -torch.empty(len(x), experts).exponential_(generator=generator).log()
    x = x.to(weight)
    best = nn.functional.linear(x, weight).topk(top + 1)
    clear = (best.values[:, -2] > best.values[:, -1]).nonzero()[:count, 0]
    assert len(clear) == count, "too many tokens were left out"
    return x[clear][None], best.indices[clear, :top].cpu()


def off_law(weight: Tensor, top: int) -> float:
    """How far what a gate chooses is from the law, relatively: the worst of sums over experts 0, 1-2, 3-6, 7-14, .."""
    worst, experts = 0.0, len(weight)
    for law in (True, False):
        _, ids = drawn(SAMPLE, weight[:, : 1 + experts], top, law, 1)
        wanted = chosen(SAMPLE, experts, POWER if law else 0.0, 2)[:, :top]
        found, exact = (one.flatten().bincount(minlength=experts).double() for one in (ids, wanted))
        octaves = (torch.arange(experts) + 1).log2().floor().long()
        sums = torch.zeros(2, int(octaves[-1]) + 1, dtype=torch.float64).index_add_(1, octaves, torch.stack([found, exact]))
        worst = max(worst, float((sums[0] / sums[1] - 1).abs().max()))
    return worst


def slowest(*values: float) -> list[float]:
    """The most of each on any rank."""
    table = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return table.tolist()


def now(device: torch.device) -> float:
    """Microseconds, when the device is ready."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() * 1e6


def repeated(run: Callable[[Tensor], Any], x: Tensor) -> tuple[Callable[[], object], int, list[Tensor]]:
    """(``run(x)``, in a CUDA graph if it can be; how often; what the last one gave)."""
    last: list[Tensor] = []

    def call() -> None:
        last[:] = [run(x)]

    return (captured(call, PER_GRAPH), PER_GRAPH, last) if x.is_cuda else (call, 1, last)


def spread(whole: nn.Module, mesh: DeviceMesh, tokens: int) -> tuple[Any, Callable[[Tensor], Any]]:
    """(plan, the compiled block) of a copy."""
    model = copy.deepcopy(whole)
    plan = moefuse.parallelize(model, mesh, max_tokens=tokens, transport="symm" if mesh.device_type == "cuda" else "allgather")
    return plan, torch.compile(model, backend="moefuse", dynamic=False, options={"strict": True})


def load_of(run: Any, weight: Tensor, tokens: int, top: int) -> dict[str, Tensor]:
    """What the block's own router chooses of other tokens than those that are timed; as it was drawn."""
    batches = [drawn(tokens, weight, top, True, 10 + call) for call in range(CALLS)]
    with moefuse.load_of(run) as load:
        for x, _ in batches:
            run(x)
    (counted,) = load.values()
    assert torch.equal(counted, torch.stack([ids.flatten().bincount(minlength=counted.shape[1]) for _, ids in batches]))
    return load


def rebalanced(plan: Any, load: dict[str, Tensor], device: torch.device) -> tuple[Any, dict[str, Any]]:
    """(The plan behind ``balance``, how long that took, and what was sent)."""
    moving, move = [0.0], moves.move

    def timed(change: moves.Change) -> None:
        begin = now(device)
        move(change)
        moving.append(now(device) - begin)

    parameters = [p.to_local() for p in plan.parameters]
    size = sum(p[0].numel() * p.dtype.itemsize for p in parameters)
    dist.barrier()
    begin = now(device)
    with mock.patch.object(moves, "move", timed):
        after = plan.balance(load)
    took, moved = slowest(now(device) - begin, sum(moving))
    gone = [len(set(a) - set(b)) for a, b in zip(plan.layers[0].placement.ranks, after.layers[0].placement.ranks, strict=True)]
    found = {"what": "balance", "us": took, "moving_us": moved, "moved": sum(gone), "mb": sum(gone) * size / 1e6}
    return after, found | {"gb_s": max(gone) * size / moved / 1e3 if moved else 0.0}


def unevenness(placement: Placement, ids: Tensor, tokens: int) -> dict[str, float]:
    """Of the ids [T, K] that each rank has."""
    every = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(every, ids)
    found, hit = traffic(placement, torch.cat(every), tokens), set(torch.cat(every).flatten().tolist())
    return {"rows": found["rows"], "travel": found["travel"], "read": max(len(hit & set(held)) for held in placement.ranks)}


def checked(name: str, last: list[Tensor], wanted: Tensor) -> float:
    """The relative difference from the block with all experts."""
    (error,) = slowest(((last[0] - wanted).float().norm() / wanted.float().norm()).item())
    assert error < (0.02 if wanted.dtype == torch.bfloat16 else 1e-5), f"{name}: {error}"
    return error


@torch.no_grad()
def measured(whole: Any, mesh: DeviceMesh, device: torch.device, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The three at a number of tokens, and what ``balance`` took."""
    torch._dynamo.reset()
    weight, top = whole.gate.weight, whole.gate.top_k
    (x, ids), (even, even_ids) = (drawn(tokens, weight, top, law, 3) for law in (True, False))
    (before, linear), (plan, run) = (spread(whole, mesh, tokens) for _ in range(2))
    calls = {"linear": repeated(linear, x), "balanced": repeated(run, x), "uniform": repeated(linear, even)}
    after, balance = rebalanced(plan, load_of(run, weight, tokens, top), device)
    errors = {}
    for name, (call, _, last) in calls.items():
        call()
        errors[name] = checked(f"{name} {tokens}", last, whole(even if name == "uniform" else x))
    times = in_turns({name: (call, count) for name, (call, count, _) in calls.items()}, rounds=rounds)
    found: list[dict[str, Any]] = [{**balance, "T": tokens}]
    for name, one in over_linear(times, errors, tokens):
        placement = (after if name == "balanced" else before).layers[0].placement
        found.append(one | unevenness(placement, even_ids if name == "uniform" else ids, tokens))
    return found


def over_linear(times: dict[str, list[float]], errors: dict[str, float], tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is written down of each candidate."""
    for name, us in times.items():
        ratio = summary([a / b for a, b in zip(times["linear"], us, strict=True)])["median"]
        yield name, {"what": "layer", "T": tokens, "impl": name, "us": summary(us), "over_linear": ratio, "off": errors[name]}


def say(*rows: dict[str, Any]) -> None:
    """Print on the first rank."""
    for row in rows if dist.get_rank() == 0 else ():
        print(json.dumps(short(row)), flush=True)


def first_balance(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Of a small block, so that connections and kernels are there when others are timed."""
    plan = moefuse.parallelize(block(True, device), mesh)
    placement = plan.layers[0].placement
    load = torch.full((placement.experts,), 10**6)
    load[list(placement.ranks[0])] = 10**7
    _, found = rebalanced(plan, {plan.layers[0].name: load}, device)
    return {**found, "what": "first balance, of a small block"}


def arguments(about: str | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__)
    _, world, device = start(args.device)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))["ep"]
    whole: Any = block(args.tiny, device)
    with torch.no_grad():
        by_law(whole.gate.weight)
        (off,) = slowest(off_law(whole.gate.weight, whole.gate.top_k))
    assert off < 0.1, f"what is chosen is {off:.3f} off Zipf's law"
    results = [{"what": "law", "zipf": POWER, "off": off}, first_balance(mesh, device)]
    say(*results)
    for tokens in args.tokens:
        some = measured(whole, mesh, device, tokens, args.rounds)
        say(*some)
        results += some
        gc.collect()
    if args.out and dist.get_rank() == 0:
        info = head("us, the slowest rank's; layer: per call in a CUDA graph", "torchrun benchmarks/balanced.py", args.commit)
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
