"""A server's day: requests of random batch and length through ``generate``, and what torch compiles for them.

    python benchmarks/serving.py --device cpu --tiny --requests 1000
    python benchmarks/serving.py --layers 8 --requests 1000 --out benchmarks/results/serving-h200.json
    python benchmarks/serving.py --layers 48 --requests 1 --ways experts model      # cold start

Ways: ``eager``; ``model`` is ``model.compile(backend="moefuse")``; ``decoder`` compiles each decoder layer; ``experts`` is
``moefuse.compile_layers(model)``. Each is a process of its own, ``--together`` all at once. ``first`` is the seconds of the first request;
``hundredth`` and ``last`` milliseconds of a request, the median of the twenty before it, and of the same requests in eager, in turns with
them; ``graphs`` that torch has compiled, and ``compiling`` the seconds it took; ``fused`` the share of twenty more requests that ran layers
fused; ``grown`` MiB of the process (or of the device) between the tenth request and the last one. Every tenth request has a static cache,
prompts are padded on the left.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

NEW = 3
"""Tokens that a request asks for."""


def prepare(model: Any, way: str) -> None:
    import moefuse

    if way == "model":
        model.compile(backend="moefuse")
    if way == "decoder":
        for layer in model.model.layers:
            layer.compile(backend="moefuse")
    if way == "experts":
        moefuse.compile_layers(model)


def request(vocabulary: int, device: str, drawn: torch.Generator) -> dict[str, torch.Tensor]:
    batch, length = (int(torch.randint(1, most, (1,), generator=drawn)) for most in (9, 65))
    ids, mask = torch.randint(1, vocabulary, (batch, length), generator=drawn), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : int(torch.randint(0, length, (1,), generator=drawn))] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def memory(device: str) -> float:
    """MiB."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def child(args: argparse.Namespace) -> dict[str, Any]:
    """One way."""
    from decode import build
    from torch._dynamo.utils import calculate_time_spent, counters

    from moefuse import _torch_private

    model = build(args.device, args.tiny, args.layers)
    torch.set_default_dtype(torch.float32)
    model.set_experts_implementation("grouped_mm" if args.device == "cuda" else "eager")
    prepare(model, args.child)
    drawn, times, before = torch.Generator().manual_seed(1), list[float](), 0.0
    windows = {"hundredth": range(80, 100), "last": range(args.requests - 20, args.requests)} if args.requests >= 100 else {}
    eager: dict[str, list[float]] = {name: [] for name in windows}
    with torch.no_grad():
        for number in range(args.requests):
            inputs = request(model.config.vocab_size, args.device, drawn)
            for name, numbers in windows.items():
                if number in numbers:
                    with _torch_private.not_compiled(model):
                        eager[name].append(served(model, inputs, number, args.device))
            times.append(served(model, inputs, number, args.device))
            before = memory(args.device) if number == 9 else before
    found: dict[str, Any] = {"way": args.child, "first": times[0], "graphs": counters["stats"]["unique_graphs"]}
    found["compiling"] = calculate_time_spent().get("entire_frame_compile", 0.0)
    for name, numbers in windows.items():
        found |= {name: median(times[numbers.start : numbers.stop]) * 1e3, f"{name}_eager": median(eager[name]) * 1e3}
    grown = memory(args.device) - before
    return found | {"grown": grown, "fused": sum(runs_fused(model, args.device, seed) for seed in range(20)) / 20}


def served(model: Any, inputs: dict[str, torch.Tensor], number: int, device: str) -> float:
    """Seconds."""
    how: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    begin = time.perf_counter()
    model.generate(**inputs, **how, **({"cache_implementation": "static"} if number % 10 == 9 else {}))
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def runs_fused(model: Any, device: str, seed: int) -> bool:
    """Whether one more request reaches an op of ours."""
    from moefuse import _torch_private

    seen: set[str] = set()
    inputs = request(model.config.vocab_size, device, torch.Generator().manual_seed(seed))
    with torch.no_grad(), _torch_private.after_operations(lambda op, *_: seen.add(str(op))):
        model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, disable_compile=True)
    return any(name.startswith("moefuse.") for name in seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", default=["eager", "model", "decoder", "experts"])
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("row", json.dumps(child(args)), flush=True)
        return
    rows = []
    with ThreadPoolExecutor(len(args.ways) if args.together else 1) as pool:
        outputs = pool.map(lambda way: subprocess.check_output([sys.executable, *sys.argv, "--child", way], text=True), args.ways)
    for output in outputs:
        row = json.loads(next(line for line in output.splitlines() if line.startswith("row "))[4:])
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        print(rows[-1], flush=True)
    if args.out:
        from _timing import by_line, environment

        settings = {"layers": args.layers, "tiny": args.tiny, "requests": args.requests, "device": args.device}
        args.out.write_text(by_line(environment() | settings, "rows", rows))


if __name__ == "__main__":
    main()
