"""Put the winners of sweeps into the table that ships: ``python benchmarks/gpu_table.py sweep.json [more.json ...]``.

Of two measurements of one point the quicker configuration stays, so a sweep over some points updates the table of all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import gpu_shapes as gs  # noqa: E402

from moefuse.kernels.triton.config import Config, Problem  # noqa: E402

TABLES = Path(__file__).parent.parent / "kernels" / "triton" / "tables"


def problem_of(shape: str, tokens: int) -> Problem:
    """What a configuration measured at this point is for."""
    s = gs.SHAPES[shape]
    gating = gs.options(s)["gating"]
    return Problem(tokens, s.top_k, s.experts, s.hidden, s.inter, s.hidden, gating, "bfloat16", s.oai, s.oai)


def main() -> None:
    entries: dict[Problem, dict[str, Any]] = {}
    versions: dict[str, Any] = {}
    for path in sys.argv[1:]:
        sweep = json.loads(Path(path).read_text())
        versions = {"gpu": sweep["gpu"], "torch": sweep["torch"]}
        table = TABLES / f"{sweep['gpu'].replace(' ', '_').replace('/', '_')}.json"
        if not entries and table.is_file():
            entries = {Problem(**e["problem"]): e for e in json.loads(table.read_text())["entries"]}
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
    lines = ",\n  ".join(json.dumps(entries[p]) for p in sorted(entries, key=lambda p: (p.experts, p.hidden, p.tokens)))
    head = json.dumps(versions)[1:-1]
    table.write_text("{" + head + ',\n "entries": [\n  ' + lines + "\n ]}\n")
    print(f"{len(entries)} entries in {table}")


if __name__ == "__main__":
    main()
