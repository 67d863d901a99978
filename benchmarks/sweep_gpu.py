"""Search the configurations of the benchmark's layers on this GPU, longer than ``moefuse.warmup`` does, for the table that ships.

    python benchmarks/sweep_gpu.py --out FOLDER [--shapes a,b] [--tokens 1,8] [--points a/1,b/8] [--budget SECONDS] [--programs]
    python benchmarks/gpu_table.py FOLDER/sweep.json

The search is that of ``kernels/triton/tune/``: candidates compiled by many processes, whole calls timed over several routings, the winner
compared with the reference. ``--programs`` also times transformers' grouped program, compiled by Inductor, for the table's ``peer_us``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402
from gpu_table import problem_of  # noqa: E402

from moefuse.kernels.triton.tune import candidates  # noqa: E402
from moefuse.kernels.triton.tune.call import Call, Kind, make  # noqa: E402
from moefuse.kernels.triton.tune.compiling import Workers  # noqa: E402
from moefuse.kernels.triton.tune.search import Outcome, Search  # noqa: E402
from moefuse.kernels.triton.tune.timing import graph_time, pair_time  # noqa: E402

ROUNDS = 12


def kind_of(s: gs.Shape) -> Kind:
    """What a call of the shape's layer is besides its sizes."""
    o = gs.options(s)
    arg0, arg1, *_ = (*o["activation_args"], 0.0, 0.0)
    return Kind(o["activation"], (arg0, arg1), biases=(s.oai, False, s.oai))


def point(shape: str, tokens: int, lists: Any, deadline: float, compiler: Any) -> tuple[Call, Outcome]:
    """The search at one point. It begins with what the table has for the point, or else near it."""
    call = make(problem_of(shape, tokens), kind_of(gs.SHAPES[shape]), "cuda", lists)
    return call, Search(call, graph_time, compiler, deadline).run(rounds=ROUNDS)


def entry(call: Call, outcome: Outcome) -> dict[str, Any]:
    """What ``gpu_table.py`` reads, and the best times of each height of tiles."""
    if outcome.config is None:
        return {"failed": outcome.failed}
    plan, given = call.plan(outcome.config), call.calls[0]
    for _ in range(2):
        plan.run(given)
    torch.cuda.synchronize()
    loops = 200
    start = time.perf_counter()
    for _ in range(loops):
        plan.run(given)
    host = (time.perf_counter() - start) * 1e6 / loops
    torch.cuda.synchronize()
    heights: dict[int, float] = {}
    for config, us in outcome.times:
        heights[config.bm] = min(us, heights.get(config.bm, us))
    return {
        "us": round(outcome.us, 2),
        "before_us": round(outcome.before_us, 2),
        "host_us": round(host, 1),
        "config": outcome.config.to_json(),
        "tried": outcome.tried,
        "failed": outcome.failed,
        "heights": heights,
    }


def program_us(call: Call, s: gs.Shape) -> float | None:
    """Microseconds of grouped products around the activation as transformers writes them, compiled by Inductor."""
    w_in, _, w_out, b_in, _, b_out = call.lists
    if s.oai or b_in or b_out:
        return None

    def program(x: Any, ids: Any, weights: Any) -> Any:
        order = ids.flatten().argsort()
        ends = torch.histc(ids.flatten().float(), bins=s.experts, min=0, max=s.experts - 1).cumsum(0).to(torch.int32)
        rows = x[order // s.top_k]
        gate, up = torch._grouped_mm(rows, w_in[0].transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_out[0].transpose(1, 2), offs=ends)
        y = y * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return y[back].view(len(x), s.top_k, -1).sum(1).to(x.dtype)

    compiled = torch.compile(program, dynamic=False)
    before, _ = pair_time(lambda: compiled(*call.sets[0]), lambda: None)
    return before


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--shapes", default=",".join(gs.SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, gs.TOKENS)))
    parser.add_argument("--points", help="shape/T,shape/T,... instead of all shapes at all numbers of tokens")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--jobs", type=int, help="compiling processes")
    parser.add_argument("--programs", action="store_true", help="time the compiled grouped program too")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    begin = time.monotonic()
    points = list(itertools.product(args.shapes.split(","), [int(t) for t in args.tokens.split(",")]))
    if args.points:
        points = [(p.split("/")[0], int(p.split("/")[1])) for p in args.points.split(",")]
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "points": {}}
    os.makedirs(args.out, exist_ok=True)
    path = Path(args.out) / "sweep.json"
    weights: tuple[str, Any] = ("", None)
    with Workers(args.jobs) as compiler, torch.no_grad():
        for i, (shape, tokens) in enumerate(points):
            if weights[0] != shape:
                weights = ("", None)
                torch.cuda.empty_cache()
                weights = (shape, gs.weights_of(gs.SHAPES[shape]))
            now = time.monotonic()
            try:
                call, outcome = point(shape, tokens, weights[1], now + (begin + args.budget - now) / (len(points) - i), compiler)
                best = entry(call, outcome)
                if args.programs and "us" in best:
                    best["peer_us"] = program_us(call, gs.SHAPES[shape])
            except Exception:
                print("FAILED", shape, tokens, traceback.format_exc()[-800:], flush=True)
                continue
            results["points"][f"{shape}/{tokens}"] = best
            path.write_text(json.dumps(results))
    report(results)
    print(f"{time.monotonic() - begin:.0f} s in all, {candidates.NEAR} entries of the table to begin with")


def report(results: dict[str, Any]) -> None:
    print("shape T us before best_peer ceiling peer/us ceiling/us program host tried bm pdl | up | down")
    for name, best in results["points"].items():
        shape, t = name.split("/")
        peer, ceiling = gs.best_peer(shape, int(t))
        if "config" not in best:
            print(shape, t, "nothing worked:", best["failed"])
            continue
        c = best["config"]
        print(
            f"{shape:9}{t:>6} {best['us']:9.1f} {best['before_us']:9.1f} {peer:9.1f} {ceiling:9.1f} {peer / best['us']:5.2f} "
            f"{ceiling / best['us']:5.2f} {best.get('peer_us') or 0:9.1f} {best['host_us']:6.1f} {best['tried']:4} {c['bm']:4} "
            f"{int(c['pdl'])} | {short(c['up'])} | {short(c['down'])}"
        )


def short(part: dict[str, Any]) -> str:
    """The settings of one kernel in a few characters: numbers with their names, and what is switched on."""
    numbers = " ".join(f"{k}{v}" for k, v in part.items() if not isinstance(v, bool | str) and v not in (0, 1))
    return " ".join([numbers, *(k for k, v in part.items() if v is True)])


if __name__ == "__main__":
    main()
