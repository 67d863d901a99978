"""``plan.balance(copies=1)`` on several GPUs: a layer in which one expert has more to do than a rank has on average, before and after.

    torchrun --nproc-per-node 2 benchmarks/copies.py --out benchmarks/results/copies-h200x2.json
    torchrun --nproc-per-node 2 benchmarks/copies.py --device cpu --tiny     # smoke test

16 experts, one a token (H = 5120, I = 8192, as Llama 4 Scout has them), chosen by Zipf's law of power 2: the hottest has 63 % of all
tokens, which no placement on two ranks divides; with less power that is so on four ranks, with two of eight experts on eight.
``linear``: as it was; ``moved``: ``plan.balance``; ``copied``: with one copy; ``uniform``: tokens that choose all experts alike. All are
launched, for CUDA graphs read no copies. ``rows``: of the busiest rank, over the mean. Figures are the slowest rank's; a layer's input is
made as in ``benchmarks/balanced.py``.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import balanced  # noqa: E402
import parallel  # noqa: E402
from _ranks import head, in_turns, leave, start  # noqa: E402
from _timing import by_line  # noqa: E402
from balance import owners  # noqa: E402

SHAPE = {"num_experts": 16, "num_experts_per_tok": 1, "hidden_size": 5120, "moe_intermediate_size": 8192}
POWER = 2.0


def busiest(layer: Any, ids: torch.Tensor) -> float:
    """Rows of the busiest rank over the mean, of the ids [T, K] that each rank has."""
    owner = owners(layer.placement)[ids]
    owner[torch.isin(ids, torch.tensor(layer.copied, dtype=ids.dtype))] = dist.get_rank()
    rows = owner.flatten().bincount(minlength=dist.get_world_size()).double()
    dist.all_reduce(rows)
    return float(rows.max() / rows.mean())


@torch.no_grad()
def measured(whole: Any, mesh: DeviceMesh, tokens: int, rounds: int) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    weight, top = whole.gate.weight, whole.gate.top_k
    (x, ids), (even, even_ids) = (balanced.drawn(tokens, weight, top, law, 3) for law in (True, False))
    plans, calls, errors, last = {}, {}, {}, {}
    for name in ("linear", "moved", "copied", "uniform"):
        plan, run = balanced.spread(whole, mesh, tokens)
        if name in ("moved", "copied"):
            load = balanced.load_of(run, weight, tokens, top)
            plan = plan.balance(load, copies=int(name == "copied"))
        given = even if name == "uniform" else x
        plans[name], last[name] = plan, [run(given)]
        errors[name] = balanced.checked(f"{name} {tokens}", last[name], whole(given))
        calls[name] = ((lambda run=run, given=given: run(given)), 1)
    times, found = in_turns(calls, rounds=rounds), []
    for name, one in balanced.over_linear(times, errors, tokens):
        (layer,) = plans[name].layers
        found.append(one | {"rows": busiest(layer, even_ids if name == "uniform" else ids), "copied": layer.copied})
    return found


def main() -> None:
    args = balanced.arguments(__doc__)
    _, world, device = start(args.device)
    balanced.POWER = POWER
    parallel.FULL = SHAPE
    parallel.TINY = SHAPE | {"hidden_size": 64, "moe_intermediate_size": 32}
    whole: Any = parallel.block(args.tiny, device)
    with torch.no_grad():
        balanced.by_law(whole.gate.weight)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))["ep"]
    results = []
    for tokens in args.tokens:
        some = measured(whole, mesh, tokens, args.rounds)
        balanced.say(*some)
        results += some
        gc.collect()
    if args.out and dist.get_rank() == 0:
        info = head("us of a launched call, the slowest rank's", "torchrun benchmarks/copies.py", args.commit)
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
