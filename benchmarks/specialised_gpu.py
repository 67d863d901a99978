"""Layers by warp-specialised kernels in several cuts, beside those of Triton that the table has, on a Hopper GPU.

    python benchmarks/specialised_gpu.py --out FOLDER [--points qwen3/4096,olmoe/16384] [--forms pingpong128,pingpong64,shared128]

Correctness comes first (``tune/check.py``): a configuration whose result is wrong is not timed. Times are microseconds per call, medians of
CUDA-graph replays over two routings, all configurations of a point in turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402
from gpu_table import problem_of  # noqa: E402
from sweep_gpu import kind_of  # noqa: E402

from moefuse.kernels.triton.config import fit, shipped, specialised_tiles  # noqa: E402
from moefuse.kernels.triton.host.layout import device_of  # noqa: E402
from moefuse.kernels.triton.tune.call import make  # noqa: E402
from moefuse.kernels.triton.tune.check import Truth  # noqa: E402
from moefuse.tuning.problem import Config, Problem  # noqa: E402

TURNS = 9


def split(form: str) -> tuple[str, int]:
    """pingpong128 as its form and its rows."""
    name = form.rstrip("0123456789")
    return name, int(form[len(name) :])


def configurations(p: Problem, forms: list[str], groups: list[int], launches: list[bool]) -> Iterator[tuple[str, Config]]:
    """Every pair of an up and a down kernel of one height, by name; first what runs without them."""
    device = device_of(torch.device("cuda", 0))
    yield "triton", shipped(p, device.name, device.hopper, device.shared, 2, False)
    for (up, bm), (down, height) in itertools.product(map(split, forms), repeat=2):
        if bm != height:
            continue
        both = [specialised_tiles(p, bm, form) for form in (up, down)]
        for group, pdl in itertools.product(groups, launches):
            config = replace(both[0], up=replace(both[0].up, group=group), down=replace(both[1].down, group=group), pdl=pdl)
            yield f"{up}/{down} {bm} g{group} {'pdl' if pdl else ''}", fit(p, config, device.shared, 2)


def point(shape: str, tokens: int, lists: Any, forms: list[str], groups: list[int], launches: list[bool]) -> dict[str, Any]:
    """Microseconds of every configuration at one point."""
    call = make(problem_of(shape, tokens), kind_of(gs.SHAPES[shape]), "cuda", lists)
    truth, graphs, wrong = Truth(call), {}, {}
    for name, config in configurations(call.problem, forms, groups, launches):
        try:
            plan = call.plan(config)
            runs: list[Callable[[], Any]] = [functools.partial(plan.run, each) for each in call.calls]
            for run in runs:
                out = run()
            problem = truth.problem(plan.run(call.calls[0]))
            again = plan.run(call.calls[0])
            if problem or not torch.equal(again, plan.run(call.calls[0])):
                wrong[name] = problem or "not equal from run to run"
                continue
            del out, again
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for run in runs:
                    run()
            graphs[name] = (graph, len(runs), config)
        except Exception as error:
            wrong[name] = str(error)[:200]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(TURNS):
        names = list(graphs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            graph, count, _ = graphs[name]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / count)
    us = {name: round(statistics.median(found[1:]), 1) for name, found in times.items()}
    return {"us": us, "configs": {name: config.to_json() for name, (_, _, config) in graphs.items()}, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--points", default=",".join(f"{s}/{t}" for s in gs.SHAPES for t in (4096, 16384)))
    parser.add_argument("--forms", default="pingpong128,pingpong64,shared128")
    parser.add_argument("--groups", default="8")
    parser.add_argument("--pdl", default="0", help="0, 1 or 0,1: without or with programmatic dependent launch")
    parser.add_argument("--budget", type=float, default=500.0)
    args = parser.parse_args()
    begin, results, held = time.monotonic(), {}, ("", None)
    launches = [bool(int(n)) for n in args.pdl.split(",")]
    groups = [int(g) for g in args.groups.split(",")]
    with torch.inference_mode():
        for shape, tokens in (p.split("/") for p in args.points.split(",")):
            if time.monotonic() - begin > args.budget:
                break
            if held[0] != shape:
                held = ("", None)
                torch.cuda.empty_cache()
                held = (shape, gs.weights_of(gs.SHAPES[shape]))
            found = results[f"{shape}/{tokens}"] = point(shape, int(tokens), held[1], args.forms.split(","), groups, launches)
            base = found["us"].get("triton", 0.0)
            best = sorted(found["us"].items(), key=lambda e: e[1])
            print(
                f"{shape:9}{tokens:>6} triton {base:8.1f} |", "; ".join(f"{n} {us:.1f} ({base / us:.3f})" for n, us in best[:6]), flush=True
            )
            for name, why in found["wrong"].items():
                print("   wrong:", name, why, flush=True)
            data = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "points": results}
            Path(args.out, "specialised.json").write_text(json.dumps(data))
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
