"""Search for a program that moefuse computes wrongly: thousands of generated ones, near misses included, each beside eager and float64.

    python benchmarks/deep_programs.py --programs 20000 --jobs 8 --out benchmarks/results/deep-programs.json

The generators and the checks are those of the tests (tests/strategies.py, tests/programs). A shard is one kind of program with one seed, so
that a log can be continued: shards that it holds already are not run again. Programs are counted once, however often they are drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARD = 40
"""Examples that a shard asks for."""

Check = Callable[[Any], object]


def _spelling(name: str) -> tuple[Any, Check]:
    from tests.programs import check
    from tests.strategies import SPELLINGS, programs

    return programs(tuple(s for s in SPELLINGS if s.__name__ == name)), check.check_program


def _near_misses() -> tuple[Any, Check]:
    from hypothesis import strategies as st

    from tests.programs import check
    from tests.programs.mutations import MUTATIONS
    from tests.strategies import near_misses

    pairs = st.sampled_from(MUTATIONS).flatmap(lambda m: st.tuples(near_misses(m), st.just(m.name)))
    return pairs, lambda pair: check.check_near_miss(*pair)


def _loops(cut: bool, twisted: bool) -> tuple[Any, Check]:
    from hypothesis import strategies as st

    from tests.cpu import test_generated_loops as loops
    from tests.programs import generated

    build = loops.cut_loops if cut else loops.rows_loops
    if twisted:
        drawn = st.tuples(build(st.sampled_from(generated.twists(cut=cut))), st.sampled_from(["auto", "off"]), st.booleans())
        return drawn, lambda d: loops.compare(d[0], verify=loops.plain().verify if d[1] == "auto" else "off", grad=d[2])

    def one_graph(loop: Any) -> None:
        seen = loops.compare(loop, verify=loops.plain().verify, grad=True)
        assert (len(seen.graphs), len(seen.report.fused)) == (1, 1), f"{loop}\n{loop.text}\n{seen.report}"

    return build(st.just("none")), one_graph


KINDS: dict[str, Callable[[], tuple[Any, Check]]] = {
    **{name.lower(): lambda name=name: _spelling(name) for name in ("Selected", "Filled", "Masked", "Slots", "Sorted", "Dense")},  # type: ignore[misc]
    "near misses": _near_misses,
    "loops that select rows": lambda: _loops(False, False),
    "loops over pieces": lambda: _loops(True, False),
    "twisted loops that select rows": lambda: _loops(False, True),
    "twisted loops over pieces": lambda: _loops(True, True),
}
AT_ONCE = ("selected", "filled", "masked", "slots", "sorted", "dense", "near misses")
"""What is drawn with torch 2.11, whose Dynamo breaks more of the loops."""


def shard(kind: str, seed: int) -> dict[str, Any]:
    """Run one shard; a failure is part of the result, and ends it."""
    import torch
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    drawn, check = KINDS[kind]()
    done: set[str] = set()
    last: list[str] = [""]
    start = time.perf_counter()

    @seeded(seed)
    @settings(max_examples=SHARD, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(drawn)
    def run(program: Any) -> None:
        last[0] = repr(program)
        key = hashlib.sha256(last[0].encode()).hexdigest()[:12]
        if key not in done:
            check(program)
            done.add(key)

    result: dict[str, Any] = {"kind": kind, "seed": seed}
    try:
        run()
    except Exception as error:
        result |= {"failed": f"{type(error).__name__}: {error}"[:2000], "program": last[0]}
    torch._dynamo.reset()
    return {**result, "seconds": round(time.perf_counter() - start, 1), "keys": sorted(done)}


def plan(kinds: list[str], known: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """One shard of each kind after another, new ones only."""
    seed = 0
    while True:
        for kind in kinds:
            if (kind, seed) not in known:
                yield kind, seed
        seed += 1


def search(args: argparse.Namespace, write: Callable[[list[dict[str, Any]]], None], shards: list[dict[str, Any]]) -> None:
    """Fill ``shards`` until there are enough programs or the time is over."""
    seen = {(s["kind"], key) for s in shards for key in s["keys"]}
    todo, started = plan(args.kinds, {(s["kind"], s["seed"]) for s in shards}), time.perf_counter()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=8) as pool:
        running = {pool.submit(shard, *next(todo)) for _ in range(args.jobs + 2)}
        while running:
            done = next(as_completed(running))
            running.remove(done)
            found = done.result()
            fresh = [key for key in found["keys"] if (found["kind"], key) not in seen]
            seen |= {(found["kind"], key) for key in fresh}
            shards.append({**found, "keys": fresh})
            write(shards)
            if "failed" in found:
                print("FAILED", found["kind"], found["seed"], found["program"], found["failed"], sep="\n", flush=True)
            if len(seen) < args.programs and time.perf_counter() - started < args.budget:
                running.add(pool.submit(shard, *next(todo)))
            elif time.perf_counter() - started >= args.budget:
                for it in running:
                    it.cancel()
                running = {it for it in running if not it.cancelled()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--budget", type=float, default=86400, help="seconds")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="some of: " + ", ".join(KINDS))
    parser.add_argument("--commit", help="what the log says, where git cannot tell")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import torch
    from _timing import by_line, environment

    args.kinds = args.kinds or list(KINDS if torch.torch_version.TorchVersion(torch.__version__) >= (2, 12) else AT_ONCE)
    data: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"shards": []}
    here = {**environment(), **({"commit": args.commit} if args.commit else {})}

    def write(shards: list[dict[str, Any]]) -> None:
        for it in shards:
            it.setdefault("torch", here.get("torch"))
            it.setdefault("commit", here.get("commit"))
        args.out.write_text(by_line({k: v for k, v in data.items() if k != "shards"}, "shards", shards))

    try:
        search(args, write, data["shards"])
    except BrokenProcessPool as error:
        print("a worker died:", error)
    report(data["shards"])


def report(shards: list[dict[str, Any]]) -> None:
    total = 0
    for kind in KINDS:
        of = [s for s in shards if s["kind"] == kind]
        count, failed = sum(len(s["keys"]) for s in of), sum("failed" in s for s in of)
        total += count
        print(f"{kind:32} {len(of):5} shards {count:6} programs {failed:3} failed {sum(s['seconds'] for s in of):8.0f} s")
    print(f"{total} programs")


if __name__ == "__main__":
    main()
