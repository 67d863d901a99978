"""FusionReport: what was fused, what was not, and the user's line for each. Text and JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moefuse.report.entries import Entries, count
from moefuse.report.grouping import grouped_fused, grouped_skipped, module_names

MAX_BREAKS_SHOWN = 8


@dataclass
class FusionReport(Entries):
    """What one compilation did; graphs are counted as Dynamo hands them over.

    In a notebook it shows itself as a page; :meth:`save_html` writes that page.
    """

    def to_html(self) -> str:
        """The report as one self-contained page: it loads nothing, and follows the reader's choice of light or dark."""
        from moefuse.report.page import document

        return document(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_html` to a file.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        from moefuse.report.page import fragment

        return fragment(self)

    def __str__(self) -> str:
        head = f"moefuse: {self.summary}, {count(self.graph_count, 'graph')}, {count(len(self.graph_breaks), 'graph break')}"
        return "\n".join([head, *(_table(self._rows())), *self._break_lines(), *(f"  note    {note}" for note in self.notes)])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for fused in grouped_fused(self.fused):
            first = fused[0]
            errors = [f.error for f in fused if f.error is not None]
            at_most = "at most " if len(errors) > 1 else ""
            error = f"error {at_most}{max(errors):.2g} of what rounding may make" if errors else "not verified"
            beside = " and a shared expert" if first.shared else ""
            sizes = [(f.workspace, f.tokens) for f in fused if f.workspace is not None]
            memory = f", {max(sizes)[0] / 2**20:.2g} MiB for {max(sizes)[1]} tokens" if sizes else ""
            where = f"  {first.parallel}" if first.parallel else ""
            text = f"{first.spec}{beside}  [{first.domain}, {first.tier}, {error}{memory}]{where}"
            rows.append(("fused", module_names([f.module for f in fused], self.root), _basename(first.location), text))
        for skipped in grouped_skipped(self.skipped):
            code, message, location = skipped[0].code, skipped[0].text, skipped[0].location
            rows.append(("skipped", module_names([s.module for s in skipped], self.root), _basename(location), f"{code}: {message}"))
        return rows

    def _break_lines(self) -> list[str]:
        followed = set(self.followed) if self.skipped else set()
        reasons = [reason for reason in dict.fromkeys(self.graph_breaks) if reason.rpartition(" at ")[2] not in followed]
        lines = [f"  break   {reason}" for reason in reasons[:MAX_BREAKS_SHOWN]]
        if len(reasons) > MAX_BREAKS_SHOWN:
            lines.append(f"  ...     {len(reasons) - MAX_BREAKS_SHOWN} more in graph_breaks")
        if reasons and not self.fused and not self.skipped and not self.disabled:
            lines.append("  hint    moefuse only sees what Dynamo captured; an expert loop that breaks the graph is not in it")
        return lines


class Reports(tuple[FusionReport, ...]):
    """Reports of several ``torch.compile`` calls, as of layers that are compiled one by one."""

    @property
    def layers(self) -> tuple[int, int]:
        """(layers fused, layers found) in all of them."""
        return sum(report.layers[0] for report in self), sum(report.layers[1] for report in self)

    def __str__(self) -> str:
        done, found = self.layers
        lines: dict[str, int] = {}
        for report in self:
            kinds = ", ".join(tree.kind for _, tree in report.modules) or "no module"
            for line in str(report).split("\n")[1:] if report.fused or report.skipped else [f"  {report.summary}"]:
                named = line.replace("(no module)", f"({kinds})", 1)
                lines[named] = lines.get(named, 0) + 1
        head = f"moefuse: fused {done} of {count(found, 'MoE layer')} in {count(len(self), 'compiled function')}"
        return "\n".join([head, *(line if number == 1 else f"{line}  ({number} times)" for line, number in lines.items())])


def _basename(location: str) -> str:
    return os.path.basename(location) or "(no location)"


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Rows as aligned lines; the last column is free text."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return [f"  {row[0]:<7} {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}" for row in rows]
