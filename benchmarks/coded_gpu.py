"""Quantised experts against the same experts in bfloat16, on a GPU.

    python benchmarks/coded_gpu.py --out FOLDER [--shapes qwen3] [--tokens 1,8,64,512,4096,16384] [--forms "mxfp4; fp8 blocks, tokens too"]

Correctness comes first: the result is compared with that of the unpacked weights of one layer, and with that of the portable operator where
activations are rounded too. Times are microseconds per call, medians of CUDA-graph replays, all forms of a point in turns; ``limit`` is the
time that reading the storage of the experts that are hit would take. A form that does not fit a shape is left out, with a line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402

from moefuse.ops.meaning.call import ExpertsCall  # noqa: E402
from moefuse.ops.meaning.encoding import EXPONENTS, MADE, Encoding, Packing, Rounding, dequantise  # noqa: E402
from moefuse.runtime.cpu import experts_extended as portable  # noqa: E402

FORMS = {
    "e4m3 blocks": Encoding("e4m3", (128, 128)),
    "s8 channels": Encoding("s8", (1, 0), "bf16"),
    "u4 groups of 128": Encoding(MADE["u4-8"], (1, 128), "bf16", packing=Packing(1, (0, 4))),
    "mxfp4": Encoding(MADE["e2m1"], (1, 32), "f32", EXPONENTS, packing=Packing(1, (0, 4))),
    "fp8 blocks, tokens too": Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128)),
    "fp8 channels, tokens too": Encoding("e4m3", (1, 0), activation=Rounding("e4m3", 0)),
}
BANDWIDTH = 4.8e12
TURNS = 11


def held(encoding: Encoding, experts: int, out: int, inp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random storage and scales."""
    per = 1 if encoding.packing is None else encoding.packing.per
    shape = (experts, out, inp // per)
    if encoding.table == "e4m3":
        storage = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    else:
        storage = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
        storage = storage.view(torch.int8) if encoding.table == "s8" else storage
    blocks = (experts, *encoding.scales(out, inp))
    if encoding.scale:
        return storage, torch.randint(116, 122, blocks, device="cuda", dtype=torch.uint8)
    size = {"e4m3": 1.0, "s8": 64.0}.get(str(encoding.table), 4.0)
    dtype = torch.bfloat16 if encoding.arithmetic == "bf16" else torch.float32
    return storage, ((torch.rand(blocks, device="cuda") + 0.5) * inp**-0.5 / size).to(dtype)


def fits(shape: Any, encoding: Encoding) -> bool:
    """Whether rows have whole groups only where they are rounded."""
    return encoding.activation is None or not any(inputs % (encoding.activation.group or inputs) for _, inputs in sizes_of(shape))


def sizes_of(shape: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(features, inputs) of both projections; of gpt-oss nothing but the sizes is taken."""
    return (2 * shape.inter, shape.hidden), (shape.hidden, shape.inter)


def sets_of(tokens: int) -> int:
    """Calls with inputs of their own in one graph."""
    return 4 if tokens <= 512 else 2


def calls(shape: Any, tokens: int, weights: dict[str, Any]) -> dict[str, Any]:
    """A function of no arguments for each form."""
    sets = []
    for seed in range(sets_of(tokens)):
        torch.manual_seed(seed)
        x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, shape.experts, device="cuda").topk(shape.top_k).indices
        sets.append((x, ids, torch.rand(tokens, shape.top_k, device="cuda", dtype=torch.bfloat16)))

    def run(form: str) -> None:
        lists = weights[form]
        for x, ids, w in sets:
            if form == "bfloat16":
                torch.ops.moefuse.experts(x, ids, w, [lists[0]], [], [lists[1]], [], [], [])
            else:
                (s_in, by_in), (s_out, by_out) = lists
                names = [str(FORMS[form]), "", str(FORMS[form])]
                torch.ops.moefuse.experts_extended(
                    x, ids, w, [s_in], [], [s_out], *([] for _ in range(9)), [by_in, by_out], encodings=names
                )

    return {form: lambda form=form: run(form) for form in weights}


def right(shape: Any, form: str, lists: Any, tokens: int) -> float:
    """Error over a few experts: against the unpacked weights, relative to the largest value; where rows are rounded against the portable
    operator, relative to the norm, since a number in the middle of two codes may become either."""
    (s_in, by_in), (s_out, by_out) = lists
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, 4, device="cuda").topk(2).indices
    w = torch.rand(tokens, 2, device="cuda", dtype=torch.bfloat16)
    names = [str(FORMS[form]), "", str(FORMS[form])]
    part = [t[:4] for t in (s_in, by_in, s_out, by_out)]
    given = x, ids, w, part[:1], [], part[2:3], *([] for _ in range(9)), [part[1], part[3]]
    ours = torch.ops.moefuse.experts_extended(*given, encodings=names).float()
    if FORMS[form].activation is not None:
        theirs = portable(ExpertsCall.of_extended(*given, encodings=names)).float()
        return float((ours - theirs).norm() / theirs.norm())
    dense = [dequantise(FORMS[form], part[i], part[i + 1], None, torch.bfloat16) for i in (0, 2)]
    theirs = torch.ops.moefuse.experts(x, ids, w, dense[:1], [], dense[1:], [], [], []).float()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def weights_of(name: str, shape: Any, forms: list[str]) -> dict[str, Any]:
    """The weights of each form that is right."""
    found: dict[str, Any] = {"bfloat16": [torch.empty(shape.experts, *s, device="cuda", dtype=torch.bfloat16).normal_(std=s[1] ** -0.5)
                                          for s in sizes_of(shape)]}  # fmt: skip
    made: dict[Encoding, Any] = {}
    for form in forms:
        encoding = FORMS[form]
        if not fits(shape, encoding):
            print(f"{name} {form}: rows are no whole groups, not timed", flush=True)
            continue
        plain = replace(encoding, activation=None)
        if plain not in made:
            made[plain] = [held(plain, shape.experts, *s) for s in sizes_of(shape)]
        try:
            errors = [right(shape, form, made[plain], tokens) for tokens in (1, 32, 640)]
        except RuntimeError as problem:
            print(f"{name} {form}: {type(problem).__name__}: {str(problem)[:200]}, not timed", flush=True)
            continue
        print(f"{name} {form}: errors {', '.join(f'{e:.1e}' for e in errors)}{'' if max(errors) < 0.02 else ': not timed'}", flush=True)
        if max(errors) < 0.02:
            found[form] = made[plain]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--shapes", default="qwen3")
    parser.add_argument("--tokens", default="1,8,64,512,4096,16384")
    parser.add_argument("--forms", default=";".join(FORMS), help="names with ';' between them; bfloat16 always is one")
    parser.add_argument("--budget", type=float, default=140, help="seconds after which no other point is begun")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    forms = [form.strip() for form in args.forms.split(";")]
    for name in args.shapes.split(","):
        shape = gs.SHAPES[name]
        weights = weights_of(name, shape, forms)
        for tokens in map(int, args.tokens.split(",")):
            if time.perf_counter() - begin > args.budget:
                print(f"{name} {tokens}: not timed, the budget is spent", flush=True)
                continue
            rows += measured(name, shape, tokens, timed(calls(shape, tokens, weights), sets_of(tokens)))
            data = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "unit": "microseconds per call", "results": rows}
            Path(args.out, "coded.json").write_text(json.dumps(data))
        del weights
        torch.cuda.empty_cache()
        print(f"[{time.perf_counter() - begin:.0f} s]", flush=True)


def measured(name: str, shape: Any, tokens: int, times: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of a point, which are printed too."""
    hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    each, rows = 3 * shape.hidden * shape.inter * hit, []
    for form, us in times.items():
        bits = 16 if form == "bfloat16" else 8 if FORMS[form].packing is None else 4
        limit, times_faster = each * bits / 8 / BANDWIDTH * 1e6, times["bfloat16"] / us
        rows.append({"shape": name, "T": tokens, "form": form, "us": round(us, 1), "limit_us": round(limit, 1)})
        print(f"{name:9}{tokens:>6} {form:25}{us:9.1f} us  {times_faster:5.2f}x of bfloat16  limit {limit:8.1f}", flush=True)
    return rows


def timed(functions: dict[str, Any], sets: int) -> dict[str, float]:
    graphs, pool = {}, torch.cuda.graph_pool_handle()  # one for all: nobody reads what a replay gives
    for form, call in functions.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graphs[form] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[form], pool=pool):
            call()
    times: dict[str, list[float]] = {form: [] for form in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(TURNS):
        for form, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[form].append(start.elapsed_time(end) * 1e3 / sets)
    return {form: statistics.median(found[1:]) for form, found in times.items()}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
