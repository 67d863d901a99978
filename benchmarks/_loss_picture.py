"""A picture of two loss curves, and below, on a logarithmic scale, how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

WIDTH, LEFT, RIGHT, UPPER, LOWER = 760, 60, 20, 210, 150
FIRST, SECOND = 74, 74 + UPPER + 84
"""Where the panels of losses and of distances begin."""
FLOOR = 1e-8
"""Shown instead of a distance of 0, which a logarithmic scale does not have."""


class Style(NamedTuple):
    label: str
    line: str


# The two losses lie upon one another: the first is so wide that it is seen beside the second, and between its dashes.
EAGER = Style("eager", 'stroke="#8fc1ea" stroke-width="5"')
MOEFUSE = Style("moefuse", 'stroke="#b3400e" stroke-width="1.5" stroke-dasharray="7 4"')
REORDERED = Style("eager with the sequences of a batch in another order", 'stroke="#555" stroke-width="1.5" stroke-dasharray="1.5 2.5"')


class Panel(NamedTuple):
    """One pair of axes. ``at``: the y of a value."""

    top: int
    height: int
    steps: int
    at: Callable[[float], float]

    def x(self, step: int) -> float:
        """Of a step; the first is 1."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(self.steps - 1, 1)

    def curve(self, values: Sequence[float], style: Style) -> str:
        points = " ".join(f"{self.x(i):.1f},{self.at(value):.1f}" for i, value in enumerate(values, 1))
        return f'<polyline points="{points}" fill="none" {style.line}/>'

    def axes(self, title: str, marks: Sequence[tuple[float, str]]) -> list[str]:
        bottom, end = self.top + self.height, WIDTH - RIGHT
        out = [text(12, self.top - 30, title)]
        for value, label in marks:
            y = self.at(value)
            out.append(f'<line x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
            out.append(text(LEFT - 8, y + 4, label, anchor="end"))
        out.append(f'<polyline points="{LEFT},{self.top} {LEFT},{bottom} {end},{bottom}" fill="none" stroke="#888"/>')
        steps = [1, *range(self.steps // 4, self.steps + 1, max(self.steps // 4, 1))]
        out += [text(self.x(step), bottom + 17, str(step), anchor="middle") for step in steps]
        return [*out, text((LEFT + end) / 2, bottom + 33, "step", anchor="middle")]

    def legend(self, styles: Sequence[Style]) -> list[str]:
        out, x, y = [], LEFT, self.top - 12
        for style in styles:
            out.append(f'<line x1="{x}" x2="{x + 40}" y1="{y}" y2="{y}" {style.line}/>')
            out.append(text(x + 47, y + 4, style.label))
            x += 47 + 8 * len(style.label) + 24
        return out


def text(x: float, y: float, said: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{said}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Four to eleven round numbers from one below ``low`` to one above ``high``."""
    rough = (high - low) / 4 or 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * max(times for times in (1, 2, 5) if times * size <= rough)
    return [i * step for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def losses(result: dict[str, Any]) -> list[str]:
    eager, mine = result["eager"], result["moefuse"]
    marks = ticks(min(*eager, *mine), max(*eager, *mine))
    low, high = marks[0], marks[-1]
    panel = Panel(FIRST, UPPER, len(eager), lambda value: FIRST + UPPER * (high - value) / (high - low))
    out = panel.axes("Loss of the step, nats per token", [(mark, f"{mark:.1f}") for mark in marks])
    return [*out, *panel.legend([EAGER, MOEFUSE]), panel.curve(eager, EAGER), panel.curve(mine, MOEFUSE)]


def distances(result: dict[str, Any]) -> list[str]:
    mine, noise = result["distance"]["moefuse"], result["distance"]["reordered eager"]
    least, most = round(math.log10(FLOOR)), math.ceil(math.log10(max(*mine, *noise, FLOOR)))
    most = max(most, least + 1)

    def at(value: float) -> float:
        return SECOND + LOWER * (most - math.log10(max(value, FLOOR))) / (most - least)

    panel = Panel(SECOND, LOWER, len(mine), at)
    marks = [(10.0**power, f"1e{power}") for power in range(least, most + 1)]
    out = panel.axes("Largest difference so far from the loss in eager, nats per token", marks)
    return [*out, *panel.legend([MOEFUSE, REORDERED]), panel.curve(noise, REORDERED), panel.curve(mine, MOEFUSE)]


def drawn(mode: str, result: dict[str, Any]) -> str:
    """The picture of a mode as SVG; its background is white, so that it reads on a dark page, too."""
    fused, there = result["layers"]
    title = f"The demo's model, {mode}: {fused} of {there} layers fused, torch {result['torch']} on a CPU"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{SECOND + LOWER + 46}" font-family="sans-serif" font-size="12">'
    ]
    out += ['<rect width="100%" height="100%" fill="white"/>', text(12, 22, title, weight="bold")]
    return "\n".join([*out, *losses(result), *distances(result), "</svg>\n"])
