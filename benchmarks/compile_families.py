"""First-call time of ``backend="moefuse"`` beside ``backend="inductor"`` for every family of transformers, as tiny models (tests/zoo).

    python benchmarks/compile_families.py --jobs 8 --out benchmarks/results/compile-families.json [FAMILY ...]

Each family has the experts that transformers chooses by default. Each measurement is a fresh process with empty Inductor cache folders and
one thread; inductor, moefuse, moefuse, inductor, so that a slow minute hits both. moefuse's own C++ kernel is compiled once before.
A family whose expert loops break Dynamo's graph has more graphs with inductor than with moefuse: there the two do different work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

TURNS = ("inductor", "moefuse", "moefuse", "inductor")


def first_call(name: str, backend: str, train: bool) -> dict[str, Any]:
    """What a child process does: seconds of the first call, and what became of the graph."""
    import warnings

    import torch
    import transformers
    import zoo_coverage
    from torch._dynamo.utils import counters

    from tests.zoo import tiny

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    model = zoo_coverage.build(name, zoo_coverage.OWN)
    if model is None:
        return {"absent": True}
    model, inputs = model.train(train), tiny.inputs(name)
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
    counters.clear()
    compiled, start = torch.compile(model, backend=backend), time.perf_counter()
    if train:
        tiny.hidden(compiled, **inputs).float().square().mean().backward()
    else:
        with torch.no_grad():
            tiny.hidden(compiled, **inputs)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "graphs": counters["stats"]["unique_graphs"], "fused": _fused(backend)}


def _fused(backend: str) -> int:
    import moefuse

    report = moefuse.last_report() if backend == "moefuse" else None
    return len(report.fused) if report is not None else 0


def child(name: str, backend: str, train: bool, kernels: str) -> dict[str, Any]:
    """One first call in a process of its own; ``kernels`` keeps moefuse's compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "MOEFUSE_CACHE_DIR": kernels}
        environ = os.environ | own | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, name, "--child", backend, *(["--train"] if train else [])]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip() or "?").splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measured(name: str, train: bool, kernels: str) -> dict[str, Any] | None:
    """One family: the quicker of two calls of each backend, and their ratio."""
    runs: dict[str, list[dict[str, Any]]] = {"inductor": [], "moefuse": []}
    for backend in TURNS:
        found = child(name, backend, train, kernels)
        if "seconds" not in found:
            return None if "absent" in found else {"family": name, "backend": backend, **found}
        runs[backend].append(found)
    best = {backend: min(r["seconds"] for r in every) for backend, every in runs.items()}
    return {
        "family": name,
        **{f"{backend}_s": round(seconds, 2) for backend, seconds in best.items()},
        "ratio": round(best["moefuse"] / best["inductor"], 3),
        **{f"{backend}_graphs": every[0]["graphs"] for backend, every in runs.items()},
        "fused": runs["moefuse"][0]["fused"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=("inductor", "moefuse"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(first_call(args.families[0], args.child, args.train)))
        return
    from _timing import environment

    from tests.zoo.families import FAMILIES

    rows = []
    with tempfile.TemporaryDirectory() as kernels, ThreadPoolExecutor(args.jobs) as pool:
        child("mixtral", "moefuse", args.train, kernels)
        for row in pool.map(lambda name: measured(name, args.train, kernels), args.families or FAMILIES):
            if row is not None:
                rows.append(row)
                print(row, flush=True)
            if args.out is not None:
                data = {**environment(), "jobs": args.jobs, "train": args.train, "rows": rows}
                args.out.write_text(json.dumps(data, indent=1) + "\n")
    ratios = sorted(r["ratio"] for r in rows if "ratio" in r and r["inductor_graphs"] == r["moefuse_graphs"])
    if ratios:
        print(
            f"{len(ratios)} families with as many graphs: ratio {ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}"
        )


if __name__ == "__main__":
    main()
