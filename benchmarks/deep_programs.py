"""Search for a program that moefuse computes wrongly: thousands of generated ones, near misses included, each beside eager and float64.

    python benchmarks/deep_programs.py --programs 20000 --jobs 8 --out benchmarks/results/deep-programs.json
    python benchmarks/deep_programs.py --kinds effects --programs 20000 --jobs 16 --budget 3000 --log /tmp/deep.jsonl --out ...

The generators and the checks are those of the tests (tests/strategies.py, tests/programs). A shard is one kind of program with one seed.
The log has a line for each, so that a search can be continued: shards that it holds already are not run again. Programs are counted once,
however often they are drawn. The result has a row for each kind, torch and commit.

Programs with effects need nothing but torch; the others need hypothesis.
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
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
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


EFFECTS = (
    "views", "updates", "python", "neutral", "ids", "draws", "twins", "promises", "later", "orders", "casts", "layouts",
    "numbers", "meanwhile", "kinks", "options", "ambient", "overlaps", "behind", "changes", "mixed",
)  # fmt: skip
"""As tests.programs.effects.NAMES, which needs a torch to be imported, and programs that change between calls."""

DRAWN: dict[str, Callable[[], tuple[Any, Check]]] = {
    **{name.lower(): lambda name=name: _spelling(name) for name in ("Selected", "Filled", "Masked", "Slots", "Sorted", "Dense")},  # type: ignore[misc]
    "near misses": _near_misses,
    "loops that select rows": lambda: _loops(False, False),
    "loops over pieces": lambda: _loops(True, False),
    "twisted loops that select rows": lambda: _loops(False, True),
    "twisted loops over pieces": lambda: _loops(True, True),
}
KINDS = (*DRAWN, *(f"effects: {name}" for name in EFFECTS))
AT_ONCE = ("selected", "filled", "masked", "slots", "sorted", "dense", "near misses", *KINDS[len(DRAWN) :])
"""What is drawn with torch 2.11, whose Dynamo breaks more of the loops."""

BEHIND = {17: "aot_eager", 31: "inductor"}
"""Of so many programs with effects, one goes through this compiler of torch's; all others run as Dynamo recorded them."""


def shard(kind: str, seed: int) -> dict[str, Any]:
    """Run one shard; a failure is part of the result, and ends it."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = _effects(kind.removeprefix("effects: "), seed) if kind.startswith("effects: ") else _examples(kind, seed)
    torch._dynamo.reset()
    return {"kind": kind, "seed": seed, "seconds": round(time.perf_counter() - start, 1), **found}


def _examples(kind: str, seed: int) -> dict[str, Any]:
    """Examples that hypothesis draws."""
    from hypothesis import HealthCheck, Phase, given, seed as seeded, settings

    drawn, check = DRAWN[kind]()
    done: set[str] = set()
    last: list[str] = [""]

    @seeded(seed)
    @settings(max_examples=SHARD, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(drawn)
    def run(program: Any) -> None:
        last[0] = repr(program)
        key = _key(last[0])
        if key not in done:
            check(program)
            done.add(key)

    try:
        run()
    except Exception as error:
        return {"keys": sorted(done), "failed": f"{type(error).__name__}: {error}"[:2000], "program": last[0]}
    return {"keys": sorted(done)}


def _effects(kind: str, seed: int) -> dict[str, Any]:
    """Programs with effects, of so many seeds in a row; one that fails is made small, and the shard goes on."""
    from tests.programs.effects import draw, shrunk, verdict

    if kind == "changes":
        return _changes(seed)
    done: set[str] = set()
    failed: list[str] = []
    programs: list[str] = []
    counts = dict.fromkeys(("fused", "torch's", "no program"), 0)
    for number in range(seed * SHARD, (seed + 1) * SHARD):
        p = draw(number, kind)
        behind = next((name for every, name in BEHIND.items() if number % every == every - 1), "eager")
        found = verdict(p, behind)
        counts["no program"] += bool(found.no_program)
        if found.no_program:
            continue
        done.add(_key(str(p)))
        counts["fused"] += found.fused > 0
        counts["torch's"] += bool(found.theirs)
        if found.failed:
            small = shrunk(p, lambda q, behind=behind: verdict(q, behind).failed)
            failed.append(f"{kind} {number} with {behind}: {found.wrong[:3]} {found.codes}"[:500])
            programs.append(str(small))
    return {"keys": sorted(done), **counts, **({"failed": "\n".join(failed), "program": "\n\n".join(programs)} if failed else {})}


def _changes(seed: int) -> dict[str, Any]:
    """Programs that change between calls, whose reports are compared with what ran."""
    from tests.programs.effects import changes

    drawn = [(number, changes.draw(number)) for number in range(seed * SHARD, (seed + 1) * SHARD)]
    found = [(number, p, wrong) for number, p in drawn if (wrong := changes.wrong(p))]
    failed = {"failed": "\n".join(f"changes {n}: {w[:1]}"[:500] for n, _, w in found), "program": "\n\n".join(str(p) for _, p, _ in found)}
    return {"keys": sorted({_key(str(p)) for _, p in drawn}), "fused": len(drawn), **(failed if found else {})}


def _key(program: str) -> str:
    return hashlib.sha256(program.encode()).hexdigest()[:12]


def plan(kinds: list[str], known: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """One shard of each kind after another, new ones only."""
    seed = 0
    while True:
        for kind in kinds:
            if (kind, seed) not in known:
                yield kind, seed
        seed += 1


def search(args: argparse.Namespace, write: Callable[[list[dict[str, Any]]], None], shards: list[dict[str, Any]]) -> None:
    """Fill ``shards`` until there are enough programs or the time is over.

    A process that dies takes its pool with it; what was running then is run again, each shard in a pool of its own.
    """
    todo, end = plan(args.kinds, {(s["kind"], s["seed"]) for s in shards}), time.perf_counter() + args.budget
    while True:
        running: dict[Future[dict[str, Any]], tuple[str, int]] = {}
        try:
            with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=8) as pool:
                _fill(args, pool, todo, end, running, write, shards)
            return
        except BrokenProcessPool:
            lost = list(running.values())
        with ThreadPoolExecutor(args.jobs) as threads:
            for found in threads.map(_alone, lost):
                _keep(found, shards, _seen(shards), write)


def _alone(which: tuple[str, int]) -> dict[str, Any]:
    """A shard in a process that nothing else needs."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(shard, *which).result()
    except BrokenProcessPool:
        return {"kind": which[0], "seed": which[1], "seconds": 0.0, "keys": [], "died": 1}


def _fill(
    args: argparse.Namespace,
    pool: ProcessPoolExecutor,
    todo: Iterator[tuple[str, int]],
    end: float,
    running: dict[Future[dict[str, Any]], tuple[str, int]],
    write: Callable[[list[dict[str, Any]]], None],
    shards: list[dict[str, Any]],
) -> None:
    seen = _seen(shards)

    def submit() -> None:
        which = next(todo)
        running[pool.submit(shard, *which)] = which

    for _ in range(args.jobs + 2):
        submit()
    while running:
        done = next(as_completed(running))
        found = done.result()
        del running[done]
        _keep(found, shards, seen, write)
        seen |= _seen(shards[-1:])
        if len(seen) < args.programs and time.perf_counter() < end:
            submit()
        elif time.perf_counter() >= end:
            for it in [it for it in running if it.cancel()]:
                del running[it]


def _seen(shards: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(s["kind"], key) for s in shards for key in s["keys"]}


def _keep(
    found: dict[str, Any], shards: list[dict[str, Any]], seen: set[tuple[str, str]], write: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Add a shard with the programs alone that no other had, and say what went wrong."""
    shards.append({**found, "keys": [key for key in found["keys"] if (found["kind"], key) not in seen]})
    write(shards)
    if "died" in found:
        print("DIED", found["kind"], found["seed"], flush=True)
    if "failed" in found:
        print("FAILED", found["kind"], found["seed"], found["program"], found["failed"], sep="\n", flush=True)


def rows(shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts of each kind, torch and commit."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for it in shards:
        row = found.setdefault(
            _place(it), {**dict(zip(PLACE, _place(it), strict=True)), "shards": 0, "programs": 0, "failed": 0, "seconds": 0.0}
        )
        row["shards"] += 1
        row["programs"] += len(it["keys"])
        row["failed"] += len(it.get("failed", "").splitlines()) if it["kind"].startswith("effects") else "failed" in it
        row["seconds"] = round(row["seconds"] + it["seconds"], 1)
        for name in COUNTED:
            if name in it:
                row[name] = row.get(name, 0) + it[name]
    order = {kind: at for at, kind in enumerate(KINDS)}
    return sorted(found.values(), key=lambda row: (row["commit"], row["torch"], order.get(row["kind"], 0)))


PLACE = ("kind", "torch", "commit")
COUNTED = ("fused", "torch's", "no program", "died")
"""What a row adds up; a shard that died stopped its process."""


def _place(it: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(it[name]) for name in PLACE)


def merged(old: dict[str, Any], shards: list[dict[str, Any]], here: dict[str, Any]) -> str:
    """The text of the result: what other commits or other torches counted stays, what this one counts is replaced."""
    from _timing import by_line

    new = rows(shards)
    places = {_place(row) for row in new}
    kept = [row for row in old.get("rows", []) if _place(row) not in places]
    every = sorted(kept + new, key=lambda row: (row["commit"], row["torch"]))
    head = {"programs": sum(row["programs"] for row in every), "failed": sum(row["failed"] for row in every)}
    return by_line({**here, **head}, "rows", every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--budget", type=float, default=86400, help="seconds")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="'effects', or some of: " + ", ".join(KINDS))
    parser.add_argument("--commit", help="what the result says, where git cannot tell")
    parser.add_argument("--log", type=Path, help="a line for each shard, to continue from")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import torch
    from _timing import environment

    args.kinds = [
        kind for name in args.kinds or () for kind in ([k for k in KINDS if k.startswith("effects")] if name == "effects" else [name])
    ]
    args.kinds = args.kinds or list(KINDS if torch.torch_version.TorchVersion(torch.__version__) >= (2, 12) else AT_ONCE)
    old: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    here = {**environment(), **({"commit": args.commit} if args.commit else {})}
    known = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    shards: list[dict[str, Any]] = [json.loads(line) for line in known]

    def write(shards: list[dict[str, Any]]) -> None:
        shards[-1] |= {"torch": here["torch"], "commit": here["commit"]}
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(shards[-1]) + "\n")
        args.out.write_text(merged(old, shards, here))

    search(args, write, shards)
    report(rows(shards))


def report(found: list[dict[str, Any]]) -> None:
    for row in found:
        more = "".join(f" {row[name]:6} {name}" for name in COUNTED if name in row)
        print(
            f"{row['kind']:32} {row['shards']:5} shards {row['programs']:6} programs {row['failed']:3} failed {row['seconds']:8.0f} s{more}"
        )
    print(f"{sum(row['programs'] for row in found)} programs, {sum(row['failed'] for row in found)} failed")


if __name__ == "__main__":
    main()
