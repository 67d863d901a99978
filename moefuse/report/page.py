"""A whole report as HTML: :func:`document` for a file, :func:`fragment` for a notebook. Neither loads anything."""

from __future__ import annotations

import functools
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from moefuse._version import __version__
from moefuse.report.entries import Entries, Fused, Skipped, amount
from moefuse.report.grouping import grouped_fused, grouped_skipped, module_names
from moefuse.report.page_drawing import drawing
from moefuse.report.page_source import excerpt, split
from moefuse.report.page_text import escaped, marked_up, tag
from moefuse.report.page_tree import Marks, tree
from moefuse.spec import ExpertsSpec

_ROOM = Path(__file__).parent
BREAKS = 12
"""Graph breaks that are shown."""


def document(report: Entries) -> str:
    """A page of its own."""
    return whole(f"moefuse: {report.summary}", _main(report))


def whole(text: str, main: str) -> str:
    """A page with this title around this content."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    style = f"<style>{_style()}\nbody {{ margin: 0; }}</style>"
    title = tag("title", escaped(text))
    body = f'<body class="moefuse">\n{main}\n</body>'
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}\n{title}\n{style}</head>\n{body}\n</html>\n'


def fragment(report: Entries) -> str:
    """The same inside of another page."""
    return inside(_main(report))


def inside(main: str) -> str:
    """What stands in another page."""
    return f'<div class="moefuse"><style>{_style()}</style>{main}</div>'


@functools.cache
def _style() -> str:
    return (_ROOM / "page.css").read_text()


@functools.cache
def advice() -> dict[str, str]:
    """What to do about each refusal, from docs/refusals.md."""
    loaded: dict[str, str] = json.loads((_ROOM / "advice.json").read_text())
    return loaded


def _main(report: Entries) -> str:
    return tag("main", _header(report) + "\n" + sections(report))


def sections(report: Entries) -> str:
    """All that is below the header."""
    parts = [
        section("Model", _model(report)),
        section("Left as it was", "".join(_left(items, report.root) for items in grouped_skipped(report.skipped))),
        section("Fused", "".join(_fused(items, report.root) for items in grouped_fused(report.fused))),
        section("Graph breaks", _breaks(report.graph_breaks)),
        section("Notes", _list(report.notes)),
        tag("footer", escaped(_versions())),
    ]
    return "\n".join(part for part in parts if part)


def section(title: str, content: str) -> str:
    """A part of the page; nothing without content."""
    return tag("section", tag("h2", title) + content) if content else ""


def _header(report: Entries) -> str:
    done, found = report.layers
    summary = f"{report.summary[0].upper()}{report.summary[1:]}"
    share = f'<span style="width: {100 * done / found:.1f}%"></span>' if found else ""
    numbers = [
        (done, "fused"),
        (found - done, "left as they were" if found - done != 1 else "left as it was"),
        (report.graph_count, "graphs" if report.graph_count != 1 else "graph"),
        (len(report.graph_breaks), "graph breaks" if len(report.graph_breaks) != 1 else "graph break"),
    ]
    facts = tag("ul", "".join(tag("li", f"<b>{number}</b> {what}") for number, what in numbers), "facts")
    bar = tag("div", share, "bar" if found else "bar none")
    return tag("header", f"{tag('p', 'moefuse report', 'over')}{tag('h1', escaped(summary))}{bar}{facts}")


def _model(report: Entries) -> str:
    """The trees of what was compiled; without them the report's own lists say it all."""
    trees = []
    for prefix, root in report.modules:
        marks: dict[tuple[str, ...], str] = {}
        for module, mark in [
            *((f.module, _badge("fused", "fused")) for f in report.fused),
            *((s.module, _badge(s.code, "left")) for s in report.skipped),
        ]:
            path = tuple(module.split(".")) if module else ()
            if prefix and path[:1] != (prefix,):
                continue
            marks.setdefault(path[1:] if prefix else path, mark)
        trees.append(tree(root, _within(root, marks), prefix or "model"))
    return tag("div", "".join(trees), "card") if trees else ""


def _within(root: object, marks: Marks) -> Marks:
    """Marks at the nearest module that the tree has: a module in a plain list is in none."""
    found: dict[tuple[str, ...], str] = {}
    for path, mark in marks.items():
        node, depth = root, 0
        for name in path:
            child = dict(getattr(node, "children", ())).get(name)
            if child is None:
                break
            node, depth = child, depth + 1
        found.setdefault(path[:depth], mark)
    return found


def _badge(text: str, kind: str) -> str:
    return tag("span", escaped(text), f"badge {kind}")


def _fused(items: Sequence[Fused], root: str) -> str:
    first = items[0]
    errors = [item.error for item in items if item.error is not None]
    rows = _parameters(first.spec)
    rows += [("written as", first.domain), ("replaced by", "one op" if first.tier == "fused" else "grouped products around your own code")]
    rows += [("shared expert", "runs beside it")] if first.shared else []
    rows += [("error", f"{'at most ' if len(errors) > 1 else ''}{max(errors):.2g} of what the original is allowed")] if errors else []
    rows += [("error", "not verified")] if not errors else []
    size = weight_bytes(first.spec)
    rows += [("expert weights", f"{amount(size)}{' in each layer' if len(items) > 1 else ''}, read in place")] if size else []
    sizes = [(item.workspace, item.tokens) for item in items if item.workspace is not None]
    rows += [("workspace", f"{amount(max(sizes)[0])} for {max(sizes)[1]} tokens")] if sizes else []
    table = tag("table", "".join(tag("tr", tag("th", name) + tag("td", escaped(value))) for name, value in rows))
    sides = tag("div", table + drawing(first.before, first.after), "sides")
    return tag("article", _head(items, root, _badge("fused", "fused"), first.location) + sides, "card")


def _parameters(spec: ExpertsSpec) -> list[tuple[str, str]]:
    constants = f" ({', '.join(map(str, spec.activation_args))})" if spec.activation_args else ""
    gating = {"plain": "none", "split": "gate and up are two weights", "merged": "gate and up in one weight, in halves"}
    rows = [
        ("experts (E)", str(spec.num_experts)),
        ("per token (K)", str(spec.top_k)),
        ("hidden (H)", str(spec.hidden) if spec.hidden_out in (0, spec.hidden) else f"{spec.hidden}, out {spec.hidden_out}"),
        ("intermediate (I)", str(spec.intermediate)),
        ("dtype", spec.dtypes),
        ("activation", f"{spec.activation}{constants}"),
        ("gate", gating.get(spec.gating, "gate and up in one weight, interleaved")),
        ("weights", "one Parameter per expert" if spec.weights == "per_expert" else "stacked"),
        ("layout", "/".join(dict.fromkeys(spec.layout))),
        ("bias", "yes" if spec.bias else "no"),
    ]
    return [row for row in rows if row != ("intermediate (I)", "0")] + ([("weight on", "input")] if spec.weight_on == "input" else [])


def weight_bytes(spec: ExpertsSpec) -> int:
    """Bytes of the experts' weights, biases left out; 0 for a body that no template describes."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return 0
    projections = 1 if spec.gating == "plain" else 2
    width = spec.hidden * projections + (spec.hidden_out or spec.hidden)
    return spec.num_experts * spec.intermediate * width * dtype.itemsize


def _left(items: Sequence[Skipped], root: str) -> str:
    first = items[0]
    to_do = advice().get(first.code)
    parts = [
        _head(items, root, _badge(first.code, "left"), first.location),
        tag("p", f"{marked_up(first.text)}."),
        excerpt(first.location),
    ]
    parts += [tag("p", marked_up(to_do), "advice")] if to_do else []
    return tag("article", "".join(parts), "card")


def _head(items: Sequence[Fused] | Sequence[Skipped], root: str, badge: str, location: str) -> str:
    name, line = split(location)
    place = tag("span", escaped(f"{name}:{line}" if line else location), "place")
    return tag("div", f"{tag('h3', escaped(module_names([item.module for item in items], root)))}{badge}{place}", "head")


def _breaks(reasons: Sequence[str]) -> str:
    different = list(dict.fromkeys(reasons))
    cards = []
    for reason in different[:BREAKS]:
        text, _, location = reason.rpartition(" at ")
        lines = excerpt(location) if text else ""
        cards.append(tag("article", tag("p", marked_up(reason)) + lines, "card"))
    more = len(different) - BREAKS
    return "".join(cards) + (tag("p", f"{more} more are in <code>graph_breaks</code>.") if more > 0 else "")


def _list(texts: Sequence[str]) -> str:
    return tag("ul", "".join(tag("li", marked_up(text)) for text in texts), "plain") if texts else ""


def _versions() -> str:
    return f"moefuse {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
