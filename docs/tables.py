"""Render the measurements of layers on a CPU in benchmarks/results/*.json into cpu.md beside them.

    python docs/tables.py            # rewrite benchmarks/results/cpu.md
    python docs/tables.py --check    # fail if it is not what the results say

Known are the files that `benchmarks/layer_cpu.py` writes (``rows``: milliseconds of each candidate and paired ratios). Ratios are
other / moefuse, taken round by round: above 1, moefuse is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "results" / "cpu.md"
HEAD = "# Layers on a CPU\n\nWritten by `python docs/tables.py`; do not edit.\n\n"
PLACE = {"cpu": "", "threads": " threads", "torch": " torch", "transformers": " transformers", "date": ""}
NOTHING = "No measurements yet: `make bench` writes them to `benchmarks/results/`, `python docs/tables.py` renders them.\n"


def ratio(summary: dict[str, float]) -> str:
    """A paired ratio with its quartiles."""
    return f"{summary['median']:.2f} [{summary['p25']:.2f}, {summary['p75']:.2f}]"


def line(row: dict[str, Any]) -> dict[str, str]:
    """One measurement as the cells of a row."""
    out = {"layer": row["shape"], "dtype": row["dtype"], "tokens": str(row["tokens"])}
    out |= {f"{name} ms": f"{times['median']:.3g}" for name, times in row["ms"].items()}
    return out | {f"{name} / moefuse": ratio(paired) for name, paired in row["ratio"].items()}


def table(rows: list[dict[str, str]]) -> str:
    """Rows as a table in Markdown; columns in the order they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row.get(column, "") for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def section(path: Path) -> str:
    """One results file: its name, where it was measured, its rows."""
    data = json.loads(path.read_text())
    where = ", ".join(f"{data[key]}{unit}" for key, unit in PLACE.items() if key in data)
    return f"**{path.stem}** ({where})\n\n{table([line(row) for row in data['rows']])}"


def rendered(results: Path) -> str:
    """The page: all results files, or a line that says there are none."""
    files = [path for path in sorted(results.glob("layer*.json")) if "rows" in json.loads(path.read_text())]
    return HEAD + ("\n".join(section(path) for path in files) if files else NOTHING)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    new = rendered(PAGE.parent)
    if arguments.check:
        return int(PAGE.read_text() != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
