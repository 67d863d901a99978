"""Inference with large experts on a GPU: our own products against torch's grouped_mm, for both or for the second alone.

    python benchmarks/grouped_mm_gpu.py --out benchmarks/results/grouped-mm-h200.json
    python benchmarks/grouped_mm_gpu.py --out result.json --into-table      (adds the times to the shipped table's entries)

"own" is what the table or the rules choose among our kernels, "all" both products by the library, "down" the second one. Correctness
comes first: what is further than 2 % from float32 on sampled tokens is not timed. Times are microseconds per call, the median over
CUDA-graph replays with rotating inputs, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402
import layer  # noqa: E402
import layer_report  # noqa: E402

POINTS = "mixtral/16384,mixtral/4096,mixtral/512,deepseek/16384,deepseek/4096,qwen2moe/16384,olmoe/16384,qwen3/16384,qwen3/4096"
TABLES = Path(__file__).parent.parent / "kernels" / "triton" / "tables"


def make(form: str, s: gs.Shape, lists: layer.Lists, inputs: tuple[Tensor, ...]) -> layer.Call:
    """One form, as the provider would run it."""
    from moefuse.kernels.triton.host.plan import Plan
    from moefuse.kernels.triton.provide.library import LibraryPlan
    from moefuse.ops.meaning.call import ExpertsCall

    def call(*tensors: Tensor) -> Any:
        return ExpertsCall.of(*tensors, *lists, **gs.options(s))

    plan: Any = Plan(call(*inputs)) if form == "own" else LibraryPlan(call(*inputs), form)
    return lambda x, ids, weights: plan.run(call(x, ids, weights))


def measure(shape: str, tokens: int, lists: layer.Lists, seconds: float) -> dict[str, Any]:
    """Every form at one point."""
    s = gs.SHAPES[shape]
    torch.manual_seed(tokens)
    sets = [gs.inputs_of(s, tokens) for _ in range(2)]
    rows = list(range(0, tokens, max(tokens // 8, 1)))[:8]
    want = gs.exact(*sets[0], lists, s, rows)
    result: dict[str, Any] = {"shape": shape, "T": tokens, "us": {}, "errors": {}}
    timed = []
    for form in ("own", "all", "down"):
        try:
            it = layer.Timed(form, make(form, s, lists, sets[0]), sets)
            result["errors"][form] = round(gs.relative_error(it.out[rows], want), 5)
            if not result["errors"][form] < 0.02:
                raise RuntimeError(f"error {result['errors'][form]}")
            timed.append(it)
        except Exception as error:
            result.setdefault("failed", {})[form] = str(error).strip().split("\n")[0][:200]
            print(shape, tokens, form, "FAILED", traceback.format_exc(limit=-3)[-500:], flush=True)
    if timed:
        layer.take_turns(timed, seconds)
    result["us"] = {it.name: round(statistics.median(it.times[1:]), 1) for it in timed}
    return result


def into_table(gpu: str, results: list[dict[str, Any]]) -> None:
    """Write the library's times beside the configuration of the same problem, scaled to the entry's own time."""
    from gpu_table import problem_of

    from moefuse.tuning.problem import Problem

    path = TABLES / f"{gpu.replace(' ', '_').replace('/', '_')}.json"
    lines = path.read_text().splitlines()
    found = {problem_of(r["shape"], r["T"]): r["us"] for r in results if len(r["us"]) > 1 and "own" in r["us"]}
    for i, line in enumerate(lines):
        if not line.strip().startswith('{"problem"'):
            continue
        entry = json.loads(line.strip().rstrip(","))
        times = found.get(Problem(**entry["problem"]))
        if times is not None:
            scale = entry["us"] / times["own"]
            entry["grouped_mm"] = {form: round(us * scale, 1) for form, us in times.items() if form != "own"}
            lines[i] = "  " + json.dumps(entry) + ("," if line.rstrip().endswith(",") else "")
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing per point")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds in all")
    parser.add_argument("--commit", help="where the checkout is not a repository")
    parser.add_argument("--into-table", action="store_true", help="add the times to the table that ships for this device")
    args = parser.parse_args()
    begin = time.perf_counter()
    data: dict[str, Any] = {**layer.environment(args.commit), "results": []}
    lists: layer.Lists | None = None
    last = ""
    with torch.inference_mode():
        for point in args.points.split(","):
            shape, tokens = point.split("/")
            if time.perf_counter() - begin > args.budget:
                print("no time left for", point)
                continue
            if shape != last or lists is None:
                lists = None
                torch.cuda.empty_cache()
                lists, last = gs.weights_of(gs.SHAPES[shape]), shape
            data["results"].append(measure(shape, int(tokens), lists, args.seconds))
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                layer_report.write(args.out, data)
    if args.into_table:
        into_table(data["gpu"], data["results"])
    print(f"{'shape':10} {'T':>6} {'own':>10} {'all':>10} {'down':>10}")
    for r in data["results"]:
        print(f"{r['shape']:10} {r['T']:6} " + " ".join(f"{r['us'].get(form, float('nan')):10.1f}" for form in ("own", "all", "down")))


if __name__ == "__main__":
    main()
