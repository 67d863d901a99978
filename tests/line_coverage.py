"""Line and branch coverage of each folder, out of ``coverage json -o -``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import PurePath
from typing import Any


def folder(path: str) -> str:
    """Two levels: ``passes/rules/rows/views.py`` counts for ``passes/rules``."""
    return "/".join(PurePath(path).parts[:-1][:2])


def table(data: dict[str, Any]) -> str:
    folders: dict[str, Counter[str]] = {}
    for path, file in data["files"].items():
        for name in (folder(path), "all"):
            folders.setdefault(name, Counter()).update(file["summary"])
    lines = [f"{'coverage':22}{'lines':>8}{'branches':>10}"]
    for name in sorted(folders, key=lambda n: (n == "all", n)):
        n = folders[name]
        lines.append(f"{name:22}{share(n['covered_lines'], n['num_statements']):>8}{share(n['covered_branches'], n['num_branches']):>10}")
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


if __name__ == "__main__":
    sys.stdout.write(table(json.load(sys.stdin)) + "\n")
