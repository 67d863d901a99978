"""Rows and bytes of the busiest of P ranks, before and after ``plan.balance``: top K of E experts by Zipf's law, in sorted order.

    python benchmarks/balance.py --json benchmarks/results/balance-simulated.json

Simulated, not measured: numbers of rows are counted, and times are by the rates in ``moefuse/parallel/links.json``. The load that
the planner has, and the tokens that are counted, are drawn apart. With many tokens also what else could be done behind that, in rows of the
busiest rank over the mean: a shared expert computed by each rank for its own tokens (``shared``) or by whichever of the ranks that have a
token anyway has least to do (``waterfill``; SGLang's name), and the eight hottest experts on all ranks (``copies``), computed where tokens
are, with all others balanced behind that.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch
from torch import Tensor

from moefuse.parallel.balance import balanced, moves, times, work_of
from moefuse.parallel.placement import Placement, linear

H, I, K = 2048, 768, 8  # noqa: E741  (the letters of moefuse.spec)
RANKS = (2, 4, 8, 16, 64, 128, 256, 1024)
TOKENS = (16, 512, 4096)
MANY, COPIES = 4096, 8
SAMPLE = 1 << 16
"""Tokens that are drawn; more ranks have as many on average."""


def chosen(tokens: int, experts: int, power: float, seed: int) -> Tensor:
    """[T, K] by Gumbel's top K of Zipf's law."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for some in torch.arange(tokens).split(1 << 14):
        noise = -torch.empty(len(some), experts, dtype=torch.float64).exponential_(generator=generator).log()
        parts.append((noise - power * torch.arange(1, experts + 1, dtype=torch.float64).log()).topk(K).indices)
    return torch.cat(parts)


def traffic(placement: Placement, ids: Tensor, tokens: int) -> dict[str, float]:
    """Of ids [N, K] of all ranks' tokens: rows of the busiest rank over the mean, rows that travel for each token, and the most MB that
    come to a rank that has ``tokens`` itself."""
    world = placement.world
    ranks = owners(placement)[ids].sort(1).values
    rows = ranks.flatten().bincount(minlength=world).double()
    first = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), ranks[:, 1:] != ranks[:, :-1]], 1)
    # Own tokens do not travel: one in P of those that a rank takes.
    come = ranks[first].bincount(minlength=world).double() * (1 - 1 / world)
    share = tokens * world / len(ids)
    return {
        "rows": float(rows.max() / rows.mean()),
        "travel": float(come.sum() / len(ids)),
        "busiest_mb": float(come.max()) * share * H * 2 / 1e6,
    }


def owners(placement: Placement) -> Tensor:
    """[E]: the rank of each expert."""
    owner = torch.empty(placement.experts, dtype=torch.int64)
    for rank, held in enumerate(placement.ranks):
        owner[list(held)] = rank
    return owner


def elsewhere(placement: Placement, of_others: Placement, ids: Tensor, hottest: Tensor) -> dict[str, float]:
    """Rows of the busiest rank over the mean, with a shared expert and with copies of the hottest, where ``of_others`` is balanced without
    them; token i of ids [N, K] is rank i mod P's."""
    world, (count, top_k) = placement.world, ids.shape
    ranks, own = owners(placement)[ids], torch.arange(count) % world
    rows = ranks.flatten().bincount(minlength=world).tolist()
    each = count / world
    filled = list(rows)
    for token, mine in zip(ranks.tolist(), own.tolist(), strict=True):
        filled[min((mine, *token), key=filled.__getitem__)] += 1
    copied = torch.where(torch.isin(ids, hottest), own[:, None], owners(of_others)[ids]).flatten().bincount(minlength=world)
    mean = count * top_k / world
    return {"shared": (max(rows) + each) / (mean + each), "waterfill": max(filled) / (mean + each), "copies": float(copied.max()) / mean}


def simulated(world: int, tokens: int, power: float) -> dict[str, object]:
    experts = max(128, 8 * world)
    seen, load = (chosen(min(tokens * world, SAMPLE), experts, power, seed) for seed in (0, 1))
    counts = load.flatten().bincount(minlength=experts) * (tokens * world / len(load))
    before = linear(experts, world)
    work = work_of(counts.long().tolist(), 1, 3 * H * I, 2)
    after = balanced(before, work)
    slowest = [max(times(place, work)) for place in (before, after)]
    found = {"ranks": world, "experts": experts, "tokens": tokens, "zipf": power, "moved": sum(map(len, moves(before, after)))}
    found |= {"before": traffic(before, seen, tokens), "after": traffic(after, seen, tokens), "us": [round(t, 1) for t in slowest]}
    if tokens >= MANY:
        hottest = counts.argsort(descending=True)[:COPIES]
        others = balanced(before, [0.0 if e in hottest.tolist() else takes for e, takes in enumerate(work)])
        found |= elsewhere(after, others, seen, hottest)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    args = parser.parse_args()
    results = []
    for power in (0.8, 1.2):
        for world in args.ranks:
            for tokens in TOKENS:
                results.append(simulated(world, tokens, power))
                one = results[-1]
                print(json.dumps(one))
    if args.json:
        what = {"what": "simulated", "date": str(datetime.date.today()), "command": "python benchmarks/balance.py", "K": K, "H": H, "I": I}
        lines = ",\n  ".join(json.dumps(one) for one in results)
        args.json.write_text(f'{json.dumps(what)[:-1]}, "results": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
