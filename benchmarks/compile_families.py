"""First-call time of ``backend="moefuse"`` beside ``backend="inductor"`` for every family of transformers, as tiny models (tests/zoo).

    python benchmarks/compile_families.py --jobs 8 --out benchmarks/results/compile-families.json [FAMILY ...]

Each family has the experts that transformers chooses by default. Each measurement is a process of its own with one thread and empty folders
for Inductor's caches; torch and transformers are imported before (a fork server), moefuse's own C++ kernel is compiled before. The two
backends of a family run at the same time; a family that seems slow is measured again, and the quickest call of each backend counts.
A family whose expert loops break Dynamo's graph has more graphs with inductor than with moefuse: there the two do different work.
A file that is there already is continued.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

SUSPICIOUS = 1.15
"""A ratio from which on a family is measured again."""
BACKENDS = ("inductor", "moefuse")
KERNELS = os.environ.setdefault("MOEFUSE_CACHE_DIR", tempfile.mkdtemp(prefix="compile-families-"))
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Some Pythons give the fork server neither the main module nor its path.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])


def first_call(name: str, backend: str, train: bool) -> dict[str, Any]:
    """Seconds of the first call, and what became of the graph; in a process that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        try:
            return _first_call(name, backend, train)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _first_call(name: str, backend: str, train: bool) -> dict[str, Any]:
    import warnings

    import torch
    import transformers
    import zoo_coverage
    from torch._dynamo.utils import counters

    from tests.zoo import tiny

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = zoo_coverage.build(name, zoo_coverage.OWN)
    if model is None:
        return {"absent": True}
    model, inputs = model.train(train), tiny.inputs(name)
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


def row(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """One family: the quickest call of each backend, and their ratio."""
    for backend, every in runs.items():
        for found in every:
            if "seconds" not in found:
                return None if "absent" in found else {"family": name, "backend": backend, **found}
    best = {backend: min(r["seconds"] for r in every) for backend, every in runs.items()}
    return {
        "family": name,
        **{f"{backend}_s": round(seconds, 2) for backend, seconds in best.items()},
        "ratio": round(best["moefuse"] / best["inductor"], 3),
        "calls": len(runs["moefuse"]),
        **{f"{backend}_graphs": every[0]["graphs"] for backend, every in runs.items()},
        "fused": runs["moefuse"][0]["fused"],
    }


def measure(pool: ProcessPoolExecutor, families: list[str], train: bool, write: Any) -> list[dict[str, Any]]:
    """All families, and those that seem slow again."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {backend: [] for backend in BACKENDS} for name in families}
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(3):
        again = [name for name in families if name not in rows or rows[name].get("ratio", 0) > SUSPICIOUS]
        asked: list[tuple[str, str, Future[dict[str, Any]]]] = []
        for name in again:
            asked += [(name, backend, pool.submit(first_call, name, backend, train)) for backend in BACKENDS]
        for name, backend, future in asked:
            runs[name][backend].append(future.result())
            if backend == BACKENDS[-1]:
                found = row(name, runs[name])
                if found is None:
                    families = [f for f in families if f != name]
                    continue
                rows[name] = found
                print(found, flush=True)
                write(list(rows.values()))
    return list(rows.values())


def known_rows(path: Path | None, train: bool) -> dict[str, dict[str, Any]]:
    """What a file has already, by family: without names given, only the others are measured."""
    data: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {"rows": [], "train": train}
    if data["train"] != train:
        raise SystemExit(f"{path} has {'training' if data['train'] else 'inference'}")
    return {r["family"]: r for r in data["rows"] if "ratio" in r}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from _timing import by_line, environment

    from tests.zoo.families import FAMILIES

    here = environment()

    known = known_rows(args.out, args.train)

    def write(rows: list[dict[str, Any]]) -> None:
        if args.out is not None:
            every = known | {r["family"]: {**r, "commit": here.get("commit")} for r in rows}
            args.out.write_text(by_line({**here, "jobs": args.jobs, "train": args.train}, "rows", [every[name] for name in sorted(every)]))

    context = get_context("forkserver")
    context.set_forkserver_preload(["_warm_inductor"])
    with ProcessPoolExecutor(args.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        pool.submit(first_call, "mixtral", "moefuse", args.train).result()
        rows = measure(pool, args.families or [name for name in FAMILIES if name not in known], args.train, write)
    every = known | {r["family"]: r for r in rows}
    ratios = sorted(r["ratio"] for r in every.values() if "ratio" in r and r["inductor_graphs"] == r["moefuse_graphs"])
    if ratios:
        print(
            f"{len(ratios)} families with as many graphs: ratio {ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}"
        )


if __name__ == "__main__":
    main()
