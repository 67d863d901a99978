"""FusionReport: what was fused, what was not, and the user's line for each. Text and JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from moefuse.spec import Domain, ExpertsSpec, Tier

MAX_BREAKS_SHOWN = 8


@dataclass(frozen=True)
class Fused:
    """One region that was replaced.

    Attributes:
        module: dotted path of the user's module, e.g. ``model.layers.0.mlp`` (empty when torch recorded none).
        location: the user's ``file:line`` of the combine.
        spec: sizes, dtype, activation and layout.
        domain: which spelling the rows were in.
        tier: ``"fused"`` for one op, ``"grouped"`` for grouped GEMMs around the user's own pointwise code.
        error: error of the fused op against an fp64 reference divided by the original's allowance (at most 1 passes); None if not verified.
        shared: whether a shared expert runs beside it.
        workspace: bytes that a call in inference takes in addition to its result, on CUDA devices; None where nothing is known.
        tokens: with so many tokens.
    """

    module: str
    location: str
    spec: ExpertsSpec
    domain: Domain
    tier: Tier
    error: float | None = None
    shared: bool = False
    workspace: int | None = None
    tokens: int | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "module": self.module,
            "location": self.location,
            "spec": self.spec.to_dict(),
            "domain": self.domain,
            "tier": self.tier,
            "error": self.error,
            "shared": self.shared,
            "workspace": self.workspace,
            "tokens": self.tokens,
        }


@dataclass(frozen=True)
class Skipped:
    """One mixture-of-experts-looking region that stayed as it was, and why. ``code`` is a key of :data:`moefuse.errors.CODES`."""

    code: str
    message: str
    module: str
    location: str

    def to_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "module": self.module, "location": self.location}


class RejectedError(Exception):
    """A rewrite that a last check of the whole graph rejects: the graph goes back to what it was, and ``skipped`` says why."""

    def __init__(self, skipped: Skipped) -> None:
        super().__init__(skipped.message)
        self.skipped = skipped


@dataclass
class FusionReport:
    """What one compilation did; graphs are counted as Dynamo hands them over."""

    fused: list[Fused] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    graph_count: int = 0
    graph_breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "fused": [f.to_dict() for f in self.fused],
            "skipped": [s.to_dict() for s in self.skipped],
            "graph_count": self.graph_count,
            "graph_breaks": list(self.graph_breaks),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def extend(self, other: FusionReport) -> None:
        """Add what another graph's report says."""
        self.fused += other.fused
        self.skipped += other.skipped
        self.graph_count += other.graph_count
        self.graph_breaks += other.graph_breaks
        self.notes += [note for note in other.notes if note not in self.notes]

    @classmethod
    def merged(cls, reports: Iterable[FusionReport]) -> FusionReport:
        """One report of several graphs.

        One without a graph is of a frame that Dynamo gave up on: what it could not have fused is tried again in the frames that it calls.
        """
        merged = cls()
        for report in sorted(reports, key=lambda report: report.graph_count == 0):
            known = {(skipped.code, skipped.location) for skipped in merged.skipped} if report.graph_count == 0 else set()
            merged.extend(replace(report, skipped=[s for s in report.skipped if (s.code, s.location) not in known]))
        return merged

    @property
    def summary(self) -> str:
        """The first line of the text, without its counts of graphs and breaks."""
        found = len(self.fused) + len(self.skipped)
        if not found:
            return "no mixture-of-experts code found"
        return f"fused {len(self.fused)} of {_count(found, 'MoE region')}"

    def __str__(self) -> str:
        head = f"moefuse: {self.summary}, {_count(self.graph_count, 'graph')}, {_count(len(self.graph_breaks), 'graph break')}"
        return "\n".join([head, *(_table(self._rows())), *self._break_lines(), *(f"  note    {note}" for note in self.notes)])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for fused in _grouped(self.fused, lambda f: (_pattern(f.module), f.location, f.spec, f.domain, f.tier, f.shared)):
            first = fused[0]
            errors = [f.error for f in fused if f.error is not None]
            at_most = "at most " if len(errors) > 1 else ""
            error = f"error {at_most}{max(errors):.2g}" if errors else "not verified"
            beside = " and a shared expert" if first.shared else ""
            sizes = [(f.workspace, f.tokens) for f in fused if f.workspace is not None]
            memory = f", {max(sizes)[0] / 2**20:.2g} MiB for {max(sizes)[1]} tokens" if sizes else ""
            text = f"{first.spec}{beside}  [{first.domain}, {first.tier}, {error}{memory}]"
            rows.append(("fused", module_names([f.module for f in fused]), _basename(first.location), text))
        for skipped in _grouped(self.skipped, lambda s: (_pattern(s.module), s.location, s.code, s.message)):
            code, message, location = skipped[0].code, skipped[0].message, skipped[0].location
            rows.append(("skipped", module_names([s.module for s in skipped]), _basename(location), f"{code}: {message}"))
        return rows

    def _break_lines(self) -> list[str]:
        reasons = list(dict.fromkeys(self.graph_breaks))
        lines = [f"  break   {reason}" for reason in reasons[:MAX_BREAKS_SHOWN]]
        if len(reasons) > MAX_BREAKS_SHOWN:
            lines.append(f"  ...     {len(reasons) - MAX_BREAKS_SHOWN} more in graph_breaks")
        if reasons and not self.fused and not self.skipped:
            lines.append("  hint    moefuse only sees what Dynamo captured; an expert loop that breaks the graph is not in it")
        return lines


_Item = TypeVar("_Item")


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _pattern(module: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``: equal for the layers of one stack."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def module_names(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0] or "(no module)"
    same = len(set(paths)) == 1
    return f"{(paths[0] if same else _pattern(paths[0])) or '(no module)'} x{len(paths)}"


def _basename(location: str) -> str:
    return os.path.basename(location) or "(no location)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Rows as aligned lines; the last column is free text."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [f"  {row[0]:<7} {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}" for row in rows]
