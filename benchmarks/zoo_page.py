"""The text of docs/coverage.md, out of what ``zoo_coverage.py`` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _timing import by_line

RESULTS = Path(__file__).parent / "results" / "coverage.json"

HEAD = """# Coverage of transformers

Every mixture-of-experts family of transformers, as a tiny model of its own class with random weights (`tests/zoo`), each implementation
of its experts, in evaluation and in training: compiled with moefuse's capture and rewrite, without Inductor, and compared with the
unmodified model. Written by `make zoo-coverage` from `benchmarks/results/coverage.json`; do not edit.

* **fused**: expert layers that were fused, of those that one forward pass runs; **tier**: one op, or grouped products around the family's
  code (`grouped`).
* **graphs**, **breaks**: what Dynamo made. More than one graph with every layer fused is code beside the experts that Dynamo breaks at.
* **error**: largest difference from the unmodified model in the output, in training also of a gradient, relative to its largest value or
  norm.

"""


COLUMNS = "family implementation mode default present fused tiers graphs breaks where output gradient reasons alone unusable failed".split()


def as_text(runs: list[dict[str, Any]]) -> str:
    """JSON with one line for each row: its columns as far as it has any, errors as the page shows them."""
    parts = (by_line(_head(run), "rows", list(map(_packed, run["rows"]))).rstrip() for run in runs)
    return '{"runs": [\n' + ",\n".join(parts) + "\n]}\n"


def _head(run: dict[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in run.items() if k != "rows"}, "columns": COLUMNS}


def _packed(row: dict[str, Any]) -> list[Any]:
    shown = {k: float(number(row[k])) for k in ("output", "gradient") if k in row}
    values = [{**row, **shown, "reasons": row.get("reasons") or None}.get(name) for name in COLUMNS]
    while values[-1] is None:
        values.pop()
    return values


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The runs, each row with its fields by name."""
    runs = json.loads(path.read_text())["runs"]
    return [{**run, "rows": [_unpacked(run["columns"], row) for row in run["rows"]]} for run in runs]


def _unpacked(columns: list[str], values: list[Any]) -> dict[str, Any]:
    row = {name: value for name, value in zip(columns, values, strict=False) if value is not None}
    return {"reasons": [], **row} if "fused" in row else row


def complete(row: dict[str, Any]) -> bool:
    return bool(row.get("fused", -1) == row["present"])


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def why(row: dict[str, Any]) -> str:
    """What stands beside a row that is not fused completely."""
    if "unusable" in row or "failed" in row:
        return str(row.get("unusable") or row["failed"]).replace("|", "/")
    if complete(row):
        return ""
    found = dict.fromkeys(f"`{r['code']}` {r['line']}: {r['message']}" for r in row["reasons"])
    return "<br>".join(found).replace("|", "/") or row.get("alone", "nothing found")


def line(row: dict[str, Any]) -> str:
    name = row["implementation"] + (" (default)" if row["default"] and row["implementation"] != "own code" else "")
    cells = [row["family"], name, row["mode"]]
    if "fused" not in row:
        return "| " + " | ".join([*cells, f"0/{row['present']}", "", "", "", "", why(row)]) + " |"
    errors = " / ".join(number(row[k]) for k in ("output", "gradient") if k in row)
    counts = [f"{row['fused']}/{row['present']}", ", ".join(row["tiers"]), str(row["graphs"]), str(row["breaks"])]
    return "| " + " | ".join([*cells, *counts, errors, why(row)]) + " |"


def summary(run: dict[str, Any]) -> str:
    """How many families are fused completely, in every implementation and mode."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in run["rows"]:
        if "unusable" not in row:
            families.setdefault(row["family"], []).append(row)
    full = [name for name, rows in families.items() if all(map(complete, rows))]
    one = [name for name in full if all(r["graphs"] == 1 for r in families[name])]
    rows = [r for r in run["rows"] if "unusable" not in r]
    rest = [name for name in families if name not in full]
    text = f"{len(full)} of {len(families)} families fused in every row ({sum(map(complete, rows))} of {len(rows)} rows)"
    text += f", {len(one)} of them in one graph."
    return text + (f" Not in every row: {', '.join(rest)}." if rest else "")


def page(runs: list[dict[str, Any]]) -> str:
    parts = [HEAD]
    for run in reversed(runs):
        parts.append(f"## transformers {run['transformers']}\n\n{summary(run)}\n\n")
        parts.append(
            "| family | experts | mode | fused | tier | graphs | breaks | error | why not |\n|---|---|---|---|---|---|---|---|---|\n"
        )
        parts.append("\n".join(map(line, run["rows"])) + "\n\n")
    return "".join(parts).rstrip() + "\n"
