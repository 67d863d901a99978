"""Experts whose weights are held in few bits against the same experts in bfloat16, on a GPU.

    python benchmarks/coded_gpu.py --out FOLDER [--shapes qwen3] [--tokens 1,8,64,512,4096]

Correctness comes first: the result is compared with that of the unpacked weights of one layer. Times are microseconds per call, medians of
CUDA-graph replays, all forms of a point in turns; ``limit`` is the time that reading the storage of the experts that are hit would take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402

from moefuse.ops.encoding import EXPONENTS, MADE, Encoding, Packing, dequantise  # noqa: E402

FORMS = {
    "e4m3 blocks": Encoding("e4m3", (128, 128)),
    "s8 channels": Encoding("s8", (1, 0), "bf16"),
    "u4 groups of 128": Encoding(MADE["u4-8"], (1, 128), "bf16", packing=Packing(1, (0, 4))),
    "mxfp4": Encoding(MADE["e2m1"], (1, 32), "f32", EXPONENTS, packing=Packing(1, (0, 4))),
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


def calls(shape: Any, tokens: int, weights: dict[str, Any]) -> dict[str, Any]:
    """A function of no arguments for each form."""
    sets = []
    for seed in range(4):
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
                torch.ops.moefuse.experts_coded(x, ids, w, [s_in], [], [s_out], [], [], [], [by_in, by_out], encodings=names)

    return {form: lambda form=form: run(form) for form in weights}


def right(shape: Any, form: str, lists: Any) -> float:
    """Error against the unpacked weights, relative to the largest value."""
    (s_in, by_in), (s_out, by_out) = lists
    x = torch.randn(32, shape.hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 4, (32, 2), device="cuda")
    w = torch.rand(32, 2, device="cuda", dtype=torch.bfloat16)
    names = [str(FORMS[form]), "", str(FORMS[form])]
    part = [t[:4] for t in (s_in, by_in, s_out, by_out)]
    ours = torch.ops.moefuse.experts_coded(x, ids, w, part[:1], [], part[2:3], [], [], [], [part[1], part[3]], encodings=names)
    dense = [dequantise(FORMS[form], part[i], part[i + 1], None, torch.bfloat16) for i in (0, 2)]
    theirs = torch.ops.moefuse.experts(x, ids, w, dense[:1], [], dense[1:], [], [], [])
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--shapes", default="qwen3")
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    args = parser.parse_args()
    rows = []
    for name in args.shapes.split(","):
        shape = gs.SHAPES[name]
        weights: dict[str, Any] = {"bfloat16": [torch.randn(shape.experts, *s, device="cuda", dtype=torch.bfloat16) * s[1] ** -0.5
                                                for s in ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter))]}  # fmt: skip
        for form, encoding in FORMS.items():
            both = [held(encoding, shape.experts, *s) for s in ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter))]
            error = right(shape, form, both)
            if error < 0.02:
                weights[form] = both
            else:
                print(f"{name} {form}: error {error:.3g}, not timed", flush=True)
        for tokens in map(int, args.tokens.split(",")):
            times = timed(calls(shape, tokens, weights))
            hit = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
            each = 3 * shape.hidden * shape.inter * hit
            base = times["bfloat16"]
            for form, us in times.items():
                bits = 16 if form == "bfloat16" else 8 if FORMS[form].packing is None else 4
                limit = each * bits / 8 / BANDWIDTH * 1e6
                rows.append({"shape": name, "T": tokens, "form": form, "us": round(us, 1), "limit_us": round(limit, 1)})
                print(f"{name:9}{tokens:>6} {form:18}{us:9.1f} us  {base / us:5.2f}x of bfloat16  limit {limit:8.1f}", flush=True)
    data = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "unit": "microseconds per call", "results": rows}
    Path(args.out, "coded.json").write_text(json.dumps(data))


def timed(functions: dict[str, Any]) -> dict[str, float]:
    graphs = {}
    for form, call in functions.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graphs[form] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[form]):
            call()
    times: dict[str, list[float]] = {form: [] for form in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(TURNS):
        for form, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[form].append(start.elapsed_time(end) * 1e3 / 4)
    return {form: statistics.median(found[1:]) for form, found in times.items()}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
