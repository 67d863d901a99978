"""What a refusal says is in the words of the program: no name of a node of a graph, no repr of an object, and a line of the program."""

from __future__ import annotations

import re
from typing import Protocol

from moefuse.report.entries import Skipped

_NAMES = re.compile(r"\b[A-Za-z]\w*_\d+\b|\b[lg]_\w+_\b|\b\w*self_\w+_parameters_\w+\b")
"""Like those of nodes: an operation and a number, an input behind its source."""

_INSIDE = re.compile(r"[LG]\['|object at 0x|___stack|torch_dynamo_resume|slots \[|%\w+")
_PLACE = re.compile(r".+:\d+$")
_WHOLE = frozenset(("graph-differs", "internal-error", "verification-error"))
"""Refusals of a whole graph: an error's own words, an input by its source."""


class Said(Protocol):
    """Whatever has refusals: a report, or what a compilation left."""

    @property
    def skipped(self) -> list[Skipped]: ...


def untrue(report: Said, source: str) -> list[str]:
    """Messages with words that no reader of a program knows, or without a line."""
    return [f"said {s.code} at {s.location or 'no line'}: {s.message}" for s in report.skipped if _odd(s, source)]


def _odd(skipped: Skipped, source: str) -> bool:
    if skipped.code in _WHOLE:
        return False
    inside = [name for name in _NAMES.findall(skipped.message) if not re.search(rf"\b{re.escape(name)}\b", source)]
    return bool(inside or _INSIDE.search(skipped.message)) or _PLACE.match(skipped.location) is None


__all__ = ["untrue"]
