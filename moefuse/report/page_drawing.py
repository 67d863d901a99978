"""A region before and after as a picture: its operations in their order on the left, what stands in their place on the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moefuse.program.steps import Run
from moefuse.report.page_text import escaped

WIDTH, COLUMN = 460, 190
BOX, GAP, PAD, TITLE = 24, 12, 10, 30
LONGEST = 25
"""Operations that are drawn of a run; of longer ones the first and the last."""
RUNS = 9
"""Runs that are drawn of a region."""
LETTERS = 22
TIMES = "\N{MULTIPLICATION SIGN}"


def drawing(before: Sequence[Run], after: Sequence[Run]) -> str:
    """The picture as inline SVG; empty where nothing is known."""
    if not before or not after:
        return ""
    left, height = _column(_abridged(before), 0, "before", _count(before))
    right, other = _column(_abridged(after), WIDTH - COLUMN, "after", _count(after))
    middle = TITLE + BOX / 2 + PAD
    arrow = _line(COLUMN + 12, middle, WIDTH - COLUMN - 14, middle)
    label = f"{_operations(_count(before))} before, {_operations(_count(after))} after"
    total = max(height, other)
    return (
        f'<svg class="drawing" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" role="img" aria-label="{label}">'
        f"{_MARKER}{left}{right}{arrow}</svg>"
    )


_MARKER = (
    '<defs><marker id="moefuse-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)


def _column(runs: Iterable[Run], x: int, kind: str, count: int) -> tuple[str, int]:
    """Boxes from top to bottom, repeated ones in a frame; and where the column ends."""
    parts = [_text(x + COLUMN / 2, 16, f"{kind}: {_operations(count)}", "title")]
    y = TITLE + PAD
    for number, run in enumerate(runs):
        if number:
            parts.append(_line(x + COLUMN / 2, y - GAP - PAD + 1, x + COLUMN / 2, y - 2 - (PAD if run.times > 1 else 0)))
        top = y
        for at, name in enumerate(run.names):
            if at:
                parts.append(_line(x + COLUMN / 2, y - GAP, x + COLUMN / 2, y - 2))
            parts.append(_box(x + PAD, y, name, kind))
            y += BOX + GAP
        if run.times > 1:
            parts.append(_frame(x, top - PAD, y - GAP - top + 2 * PAD, run.times))
        y += PAD if run.times == 1 else 2 * PAD
    return "".join(parts), y - GAP + 2


def _abridged(runs: Sequence[Run]) -> list[Run]:
    shown = [_shortened(run) for run in runs]
    if len(shown) <= RUNS:
        return shown
    left_out = sum(len(run.names) * run.times for run in runs[RUNS - 2 : -1])
    return [*shown[: RUNS - 2], Run((f"… {left_out} more",)), shown[-1]]


def _shortened(run: Run) -> Run:
    if len(run.names) <= LONGEST:
        return run
    half = LONGEST // 2
    return run._replace(names=(*run.names[:half], f"… {len(run.names) - 2 * half} more", *run.names[-half:]))


def _box(x: float, y: float, name: str, kind: str) -> str:
    text = name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"
    width = COLUMN - 2 * PAD
    if name.startswith("…"):
        return _text(x + width / 2, y + BOX / 2 + 4, text, "more")
    title = f"<title>{escaped(name)}</title>" if text != name else ""
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BOX}" rx="5"/>'
    return f"<g>{title}{shape}{_text(x + width / 2, y + BOX / 2 + 4, text, kind)}</g>"


def _frame(x: float, y: float, height: float, times: int) -> str:
    shape = f'<rect class="frame" x="{x + 1}" y="{y}" width="{COLUMN - 2}" height="{height}" rx="8"/>'
    return f"{shape}{_text(x + COLUMN + 4, y + height / 2 + 4, f'{TIMES} {times}', 'times')}"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#moefuse-tip)"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escaped(text)}</text>'


def _count(runs: Iterable[Run]) -> int:
    return sum(len(run.names) * run.times for run in runs)


def _operations(count: int) -> str:
    return f"{count} operation{'s' if count != 1 else ''}"
