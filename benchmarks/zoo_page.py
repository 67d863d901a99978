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
unmodified model. Written by `make zoo-coverage` from `benchmarks/results/coverage.json`, which has every row and its errors; do not edit.

* A **row** is one implementation of one family in one mode. It is fused if every expert layer that a forward pass runs is.
* **Graphs** and **breaks** are what Dynamo made. More than one graph with every layer fused: Dynamo breaks at code beside the experts.
* **Fused** are families by implementations, transformers' default first, in both modes unless one is named. "grouped":
  the experts are grouped products around the family's code, not one op; "partly grouped": some layers are.

"""


ERRORS = ("output", "gradient")
COLUMNS = "family implementation mode default present fused tiers graphs breaks where output gradient reasons alone unusable failed".split()


def as_text(runs: list[dict[str, Any]]) -> str:
    """JSON with one line for each row: its columns as far as it has any, errors as the page shows them."""
    parts = (by_line(_head(run), "rows", list(map(_packed, run["rows"]))).rstrip() for run in runs)
    return '{"runs": [\n' + ",\n".join(parts) + "\n]}\n"


def _head(run: dict[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in run.items() if k != "rows"}, "columns": COLUMNS}


def _packed(row: dict[str, Any]) -> list[Any]:
    shown = {k: float(number(row[k])) for k in ERRORS if k in row}
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
        return "fused; code beside the experts breaks the graph"
    found = [f"`{r['code']}` {r['line']}: {r['message']}" for r in row["reasons"]]
    return "<br>".join(dict.fromkeys([*found, *([row["alone"]] if "alone" in row else [])])).replace("|", "/") or "nothing found"


def plain(row: dict[str, Any]) -> bool:
    """Whether the line of the family says all there is to say."""
    return complete(row) and row["graphs"] == 1 and not row["breaks"]


def exceptions(rows: list[dict[str, Any]]) -> str:
    """What is not fused, or breaks: rows of a family that differ in nothing else are one."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if not plain(row):
            counts = (f"{row.get('fused', 0)}/{row['present']}", str(row.get("graphs", "")), str(row.get("breaks", "")))
            alike.setdefault((row["family"], *counts, why(row)), []).append(row)
    lines = [f"| {family} | {covered(alike[key])} | {' | '.join(rest)} |" for key in alike for family, *rest in [key]]
    return "\n".join(["| family | experts | fused | graphs | breaks | why |", "|---|---|---|---|---|---|", *lines])


def covered(rows: list[dict[str, Any]]) -> str:
    """Implementations, the default first, and their modes."""
    modes: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda r: not r["default"]):
        modes.setdefault(row["implementation"], []).append(row["mode"])
    names: dict[str, list[str]] = {}
    for name, ran in modes.items():
        names.setdefault(" and ".join(ran), []).append(name)
    return "; ".join(f"{', '.join(alike)} in {ran}" for ran, alike in names.items())


def kind(rows: list[dict[str, Any]]) -> str:
    """What a family shares with others on the page: implementations and modes that are fused, and the tier if it is not one op."""
    tiers = {tier for row in rows for tier in row["tiers"]}
    tier = {"grouped": "; grouped", "fused grouped": "; partly grouped"}.get(" ".join(sorted(tiers)), "")
    return covered(rows).removesuffix(" in eval and train") + tier


def fused(rows: list[dict[str, Any]]) -> str:
    """Families by their kind, and the family with the largest difference from the unmodified model."""
    alike: dict[str, list[str]] = {}
    for family, some in families(rows).items():
        alike.setdefault(kind(some), []).append(family)
    errors = ", ".join(
        f"{number(row[k])} in {'an' if k == 'output' else 'a'} {k} ({row['family']})" for k in ERRORS for row in [worst(rows, k)]
    )
    lines = "\n".join(["| experts | families |", "|---|---|", *(f"| {name} | {', '.join(names)} |" for name, names in alike.items())])
    return f"{lines}\n\nLargest differences from the unmodified model, relative: {errors}."


def worst(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return max((row for row in rows if key in row), key=lambda row: row[key])


def families(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["family"], []).append(row)
    return found


def summary(run: dict[str, Any]) -> str:
    """How many families are fused completely, in every implementation and mode."""
    rows = [r for r in run["rows"] if "unusable" not in r]
    usable = families(rows)
    full = [name for name, rows in usable.items() if all(map(complete, rows))]
    one = [name for name in full if all(r["graphs"] == 1 for r in usable[name])]
    rest = [name for name in usable if name not in full]
    text = f"{len(full)} of {len(usable)} families fused in every row ({sum(map(complete, rows))} of {len(rows)} rows)"
    text += f", {len(one)} of them in one graph."
    return text + (f" Not in every row: {', '.join(rest)}." if rest else "")


def counts(run: dict[str, Any]) -> str:
    """Families, implementations and rows of a release. What does not run without moefuse counts as no row."""
    rows = [r for r in run["rows"] if "unusable" not in r]
    modes = {mode: [r for r in rows if r["mode"] == mode] for mode in ("eval", "train")}
    fused = [f"{sum(map(complete, modes[mode]))} of {len(modes[mode])}" for mode in modes]
    implementations = len({(r["family"], r["implementation"]) for r in rows})
    breaks = [r for r in rows if r.get("breaks")]
    cells = [len(families(rows)), implementations, *fused, f"{len(breaks)} rows of {len(families(breaks))} families"]
    head = "| families | implementations | fused in eval | fused in train | graph breaks |\n|---|---|---|---|---|\n"
    return head + f"| {' | '.join(map(str, cells))} |"


def page(runs: list[dict[str, Any]]) -> str:
    parts = [HEAD]
    for run in reversed(runs):
        parts.append(f"## transformers {run['transformers']}\n\n{summary(run)}\n\n{counts(run)}\n\n")
        parts.append(
            f"What is not fused, or breaks:\n\n{exceptions(run['rows'])}\n\nFused:\n\n{fused(list(filter(complete, run['rows'])))}\n\n"
        )
    return "".join(parts).rstrip() + "\n"
