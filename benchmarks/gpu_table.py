"""Put measurements into the table that ships: winners of ``sweep_gpu.py``, and what compiled programs take by ``layer.py``.

    python benchmarks/gpu_table.py sweep.json [more.json ...]
    python benchmarks/gpu_table.py benchmarks/results/layer-h200.json

Of two sweeps of one point the quicker configuration stays, so a sweep over some points updates the table of all. A result of ``layer.py``
says how much longer than the op transformers' compiled grouped program takes in the same run; the cost gate compares the two.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402

from moefuse.tuning.problem import Config, Problem  # noqa: E402

TABLES = Path(__file__).parent.parent / "kernels" / "triton" / "tables"


def problem_of(shape: str, tokens: int) -> Problem:
    """What a configuration measured at this point is for."""
    s = gs.SHAPES[shape]
    gating = gs.options(s)["gating"]
    return Problem(tokens, s.top_k, s.experts, s.hidden, s.inter, s.hidden, gating, "bfloat16", s.oai, s.oai)


def swept(entries: dict[Problem, dict[str, Any]], sweep: dict[str, Any]) -> None:
    """Take over the configurations of a sweep that are quicker than those of the table.

    Warp-specialised kernels have a place of their own in an entry, for where they do not run.
    """
    for name, best in sweep["points"].items():
        shape, tokens = name.split("/")
        problem = problem_of(shape, int(tokens))
        if "config" not in best or best["us"] >= entries.get(problem, {"us": float("inf")})["us"]:
            continue
        config = Config.from_json(best["config"])
        kept = {k: v for k, v in entries.get(problem, {}).items() if k == "grouped_mm"}  # what another script measures
        entries[problem] = {"problem": asdict(problem), "us": best["us"], "config": config.to_json(), **kept}
        # Of one run with the time above, so that the cost gate compares like with like.
        if best.get("peer_us"):
            entries[problem]["peer_us"] = round(best["peer_us"], 2)


def compared(entries: dict[Problem, dict[str, Any]], layers: dict[str, Any]) -> None:
    """Times of the compiled program, scaled from the op's time in their run to the op's time in the table."""
    times = {(r["shape"], r["T"], r["impl"]): r["us"] for r in layers["results"] if "us" in r and "skew" not in r}
    for (shape, tokens, name), us in times.items():
        entry = entries.get(problem_of(shape, tokens))
        if name == "hf_grouped_c" and entry is not None and (shape, tokens, "moefuse") in times:
            best = min([entry["us"], *entry.get("grouped_mm", {}).values()])
            entry["peer_us"] = round(us * best / times[shape, tokens, "moefuse"], 2)


def main() -> None:
    entries: dict[Problem, dict[str, Any]] = {}
    versions: dict[str, Any] = {}
    for path in sys.argv[1:]:
        data = json.loads(Path(path).read_text())
        table = TABLES / f"{data['gpu'].replace(' ', '_').replace('/', '_')}.json"
        if not entries and table.is_file():
            old = json.loads(table.read_text())
            entries = {Problem(**e["problem"]): e for e in old["entries"]}
            versions = {k: v for k, v in old.items() if k != "entries"}
        if "points" in data:
            versions = {"gpu": data["gpu"], "torch": data["torch"]}
            swept(entries, data)
        else:
            compared(entries, data)
    lines = ",\n  ".join(json.dumps(entries[p]) for p in sorted(entries, key=lambda p: (p.experts, p.hidden, p.tokens)))
    head = json.dumps(versions)[1:-1]
    table.write_text("{" + head + ',\n "entries": [\n  ' + lines + "\n ]}\n")
    print(f"{len(entries)} entries in {table}")


if __name__ == "__main__":
    main()
