"""What was gained as HTML: bars for the model and its layers, and the fusion report below."""

from __future__ import annotations

from moefuse.gains.rows import HEADS, INDUCTOR, MOEFUSE, Measured, Row, Timed, cells, milliseconds, times
from moefuse.report.page import inside, section, sections, whole
from moefuse.report.page_text import escaped, marked_up, tag

WIDTH, NAME, LABEL = 760, 80, 260
BAR, GAP = 22, 12


def document(gains: Measured) -> str:
    """A page of its own."""
    return whole(f"moefuse: {gains.headline}", _main(gains))


def fragment(gains: Measured) -> str:
    """The same inside of another page."""
    return inside(_main(gains))


def _main(gains: Measured) -> str:
    summary = f"{gains.headline[0].upper()}{gains.headline[1:]}"
    turns = max(len(row.ms) for row in gains.model.rows)
    facts = [(gains.device, "device"), (str(turns), "turns"), (f"{gains.seconds:.0f} s", "with the compilations")]
    listed = tag("ul", "".join(tag("li", f"<b>{escaped(value)}</b> {what}") for value, what in facts), "facts")
    header = tag("header", f"{tag('p', 'moefuse benchmark', 'over')}{tag('h1', escaped(summary))}{listed}")
    parts = [
        header,
        section("What is off", tag("ul", "".join(tag("li", escaped(text)) for text in gains.warnings), "plain") if gains.warnings else ""),
        section("Model", _card(gains.model, "The whole call")),
        section("Layers by themselves", "".join(_card(layer, f"{layer.name}: {layer.verdict}") for layer in gains.layers)),
        section("About the measurement", tag("ul", "".join(tag("li", marked_up(t)) for t in gains.notes), "plain") if gains.notes else ""),
        section("Fusion report", tag("p", escaped(gains.report.summary))),
        sections(gains.report),
    ]
    return tag("main", "\n".join(part for part in parts if part))


def _card(timed: Timed, title: str) -> str:
    head = tag("tr", tag("th", "") + "".join(tag("th", name) for name in HEADS))
    rows = "".join(tag("tr", tag("th", row.name) + "".join(tag("td", escaped(cell)) for cell in cells(row, timed))) for row in timed.rows)
    return tag("article", tag("h3", escaped(title)) + bars(timed) + tag("table", head + rows), "card")


def bars(timed: Timed) -> str:
    """A horizontal bar for each way that ran, as long as its median, with a line from the 10th to the 90th percentile."""
    rows = [row for row in timed.rows if row.ms]
    longest = max((row.spread[1] for row in rows), default=0.0)
    if not longest:
        return ""
    scale = (WIDTH - NAME - LABEL) / longest
    height = len(rows) * (BAR + GAP)
    drawn = "".join(_bar(row, timed, at * (BAR + GAP) + GAP / 2, scale) for at, row in enumerate(rows))
    said = ", ".join(f"{row.name} {milliseconds(row.median)} ms" for row in rows)
    frame = f'class="bars" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="{escaped(said)}"'
    return f"<svg {frame}>{drawn}</svg>"


def _bar(row: Row, timed: Timed, y: float, scale: float) -> str:
    low, high = (NAME + value * scale for value in row.spread)
    middle = y + BAR / 2
    ratio = timed.ratio() if row.name == MOEFUSE else None
    label = f"{milliseconds(row.median)} ms" + (f", {times(ratio)} times as fast as {INDUCTOR}" if ratio is not None else "")
    kind = "own" if row.name == MOEFUSE else "other"
    return (
        f'<text class="name" x="{NAME - 8}" y="{middle + 4:.1f}">{escaped(row.name)}</text>'
        f'<rect class="{kind}" x="{NAME}" y="{y:.1f}" width="{max(row.median * scale, 1):.1f}" height="{BAR}" rx="4"/>'
        f'<line x1="{low:.1f}" y1="{middle:.1f}" x2="{high:.1f}" y2="{middle:.1f}"/>'
        f'<text x="{high + 8:.1f}" y="{middle + 4:.1f}">{escaped(label)}</text>'
    )
