"""How many generated programs it takes to see a fault, with each root cause put back in turn (tests/programs/effects/faults.py).

    python benchmarks/fault_injection.py --most 500 --jobs 2 --out benchmarks/results/fault-injection.json

With every fault the search starts anew, from each of a few seeds. A fault that no search sees is a hole in the generator.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def one(name: str, seed: int, most: int, small: bool) -> dict[str, Any]:
    """Search for one fault from one seed."""
    import torch

    from tests.programs.effects import changes, floats

    for kind in (changes, floats):
        if name in kind.FAULTS:
            return _of_calls(kind, name, seed, most)

    from tests.programs.effects import shrunk
    from tests.programs.effects.faults import FAULTS, search
    from tests.programs.effects.run import fails

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    fault, start, ran, fused = FAULTS[name], time.perf_counter(), 0, 0
    for count, p, found in search(fault, most, seed):
        ran, fused = count, fused + (found.fused > 0)
        if count % 20 == 0:
            print(f"{name}, seed {seed}: {count} programs, {fused} fused", file=sys.stderr, flush=True)
        if found.failed:
            seconds = round(time.perf_counter() - start, 1)
            with fault.put_back():
                program = str(shrunk(p, fails) if small else p)
            return {"fault": name, "seed": seed, "programs": ran, "fused": fused, "found": True, "seconds": seconds, "program": program}
    return {"fault": name, "seed": seed, "programs": ran, "fused": fused, "found": False, "seconds": round(time.perf_counter() - start, 1)}


def _of_calls(kind: Any, name: str, seed: int, most: int) -> dict[str, Any]:
    """The same for programs that change between calls, whose reports may be untrue, and for those whose floats do."""
    from tests.programs.effects import broken

    start = time.perf_counter()
    found = broken.search(kind.FAULTS[name], kind.draw, kind.wrong, most, seed)
    seconds = round(time.perf_counter() - start, 1)
    if found is None:
        return {"fault": name, "seed": seed, "programs": most, "found": False, "seconds": seconds}
    return {"fault": name, "seed": seed, "programs": found[0], "found": True, "seconds": seconds, "program": str(found[1])}


def main() -> None:
    from tests.programs.effects import changes, floats
    from tests.programs.effects.faults import FAULTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=500, help="programs of each search")
    parser.add_argument("--seeds", type=int, default=3, help="searches for each fault")
    parser.add_argument("--small", action="store_true", help="make what is found small, which takes longer than to find it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--faults", type=lambda text: text.split(","), default=[*FAULTS, *changes.FAULTS, *floats.FAULTS])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=2) as pool:
        searches = [(name, seed, args.most, args.small) for name in args.faults for seed in range(args.seeds)]
        for row in pool.map(one, *zip(*searches, strict=True)):
            print(json.dumps({k: v for k, v in row.items() if k != "program"}), row.get("program", ""), sep="\n", flush=True)
            found.append(row)
            _write(args.out, found, args.faults)
    seen = {row["fault"] for row in found if row["found"]}
    print(f"{len(seen)} of {len(args.faults)} faults seen; most programs {max((r['programs'] for r in found if r['found']), default=0)}")


def _write(out: Path | None, found: list[dict[str, Any]], faults: list[str]) -> None:
    """What is found so far: a search may take long."""
    from _timing import by_line, environment

    if out is not None:
        seen = {row["fault"] for row in found if row["found"]}
        out.write_text(by_line({**environment(), "seen": len(seen), "faults": len(faults)}, "searches", found))


if __name__ == "__main__":
    main()
