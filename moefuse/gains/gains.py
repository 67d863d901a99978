"""Gains: what :func:`moefuse.benchmark` measured, as text and as a page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moefuse.gains.rows import HEADS, Measured, Timed, cells


@dataclass
class Gains(Measured):
    """What :func:`moefuse.benchmark` measured: ``print`` it, or :meth:`save_html`."""

    def to_html(self) -> str:
        """A page of its own, with bars and the fusion report; it loads nothing."""
        from moefuse.gains.page import document

        return document(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_html` to a file.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"moefuse: {self.headline}", *_table(self.model)]
        for layer in self.layers:
            lines += [f"  layer   {layer.name}, by itself: {layer.verdict}", *_table(layer)]
        lines += [f"  wrong   {text}" for text in self.warnings]
        lines += [f"  note    {text}" for text in self.notes]
        return "\n".join([*lines, str(self.report)])

    def _repr_html_(self) -> str:
        from moefuse.gains.page import fragment

        return fragment(self)


def _table(timed: Timed) -> list[str]:
    rows = [("", *HEADS), *((row.name, *cells(row, timed)) for row in timed.rows)]
    ran = [row for row in rows if row[1] != "did not run"]
    widths = [max(len(row[column]) for row in ran) for column in range(len(rows[0]))]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) if row in ran else f"{row[0]}  {row[1]}: {row[2]}"
        for row in rows
    ]
    return [f"          {text}".rstrip() for text in texts]
