"""The walk of one expert weight in docs/design/tour.md: every file and function of it exists, and none is entered twice."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WALK = (ROOT / "docs/design/tour.md").read_text().partition("## One call, fused\n")[2].partition("\n## ")[0]
STEP = re.compile(r"`((?:moefuse|passes|kernels)/[\w/]+\.py)`\s+((?:`[\w.]+`(?:,\s+)?)+)")


def steps() -> list[tuple[str, str]]:
    """(file, function) in the order of the walk."""
    return [(file, name) for file, some in STEP.findall(WALK) for name in re.findall(r"`([\w.]+)`", some)]


@functools.cache
def functions(file: str) -> frozenset[str]:
    """Functions of a module, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return frozenset(found)


def test_every_step_exists() -> None:
    assert len(steps()) > 40
    assert [(file, name) for file, name in steps() if name not in functions(file)] == []


def test_no_step_is_entered_twice() -> None:
    assert [step for step, times in Counter(steps()).items() if times > 1] == []
