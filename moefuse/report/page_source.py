"""The user's statement, with a few lines around it."""

from __future__ import annotations

import linecache

from moefuse.report.page_text import escaped, tag

AROUND = 3
"""Lines before the statement, and behind it."""
WIDTH = 160
"""Characters of a line."""


def split(location: str) -> tuple[str, int]:
    """(file, line) of ``file:line``; line 0 where there is none."""
    name, _, number = location.rpartition(":")
    return (name, int(number)) if number.isdigit() else (location, 0)


def excerpt(location: str) -> str:
    """The lines as HTML, the statement's marked; empty where the file is not there any more. Cells of notebooks are."""
    name, number = split(location)
    lines = linecache.getlines(name) if number else []
    if not 0 < number <= len(lines):
        return ""
    first = max(1, number - AROUND)
    shown = lines[first - 1 : number + AROUND]
    indent = min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
    rows = [_row(at, line.rstrip()[indent : indent + WIDTH], at == number) for at, line in enumerate(shown, first)]
    return tag("pre", "".join(rows), "source")


def _row(number: int, line: str, here: bool) -> str:
    return tag("mark" if here else "span", f"<i>{number:>5}</i> {escaped(line)}\n")
