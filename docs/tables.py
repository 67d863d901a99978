"""Render the measurements in benchmarks/results/*.json into docs/benchmarks.md, between the two marker comments.

    python docs/tables.py            # rewrite docs/benchmarks.md
    python docs/tables.py --check    # fail if docs/benchmarks.md is not what the results say

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
BEGIN = "<!-- tables: begin (python docs/tables.py; do not edit by hand) -->\n"
END = "<!-- tables: end -->\n"
PLACE = {"cpu": "", "threads": " threads", "torch": " torch", "transformers": " transformers", "date": ""}
NOTHING = "No measurements yet: `make bench` writes them to `benchmarks/results/`, `python docs/tables.py` renders them here.\n"


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
    """All results files, or a line that says there are none."""
    files = [path for path in sorted(results.glob("layer*.json")) if "rows" in json.loads(path.read_text())]
    return "\n".join(section(path) for path in files) if files else NOTHING


def inserted(text: str, tables: str) -> str:
    """The document with its tables replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError("docs/benchmarks.md has lost the comments between which the tables stand")
    return before + BEGIN + tables + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = ROOT / "docs" / "benchmarks.md"
    old = page.read_text()
    new = inserted(old, rendered(ROOT / "benchmarks" / "results"))
    if arguments.check:
        return int(old != new)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
