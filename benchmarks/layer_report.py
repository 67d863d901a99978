"""Tables and a figure of what ``layer.py`` measured, beside the stored times of implementations that it cannot install."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gpu_shapes as gs
from _timing import by_line

OURS, CEILINGS = "moefuse", ("ub_read", "ub_dense")
Point = tuple[str, int]


def write(path: Path, data: dict[str, Any]) -> None:
    """JSON, one line per result."""
    path.write_text(by_line({k: v for k, v in data.items() if k != "results"}, "results", data["results"]))


def points(data: dict[str, Any]) -> dict[Point, dict[str, dict[str, Any]]]:
    """(shape, T) -> implementation -> result, of those that were timed."""
    found: dict[Point, dict[str, dict[str, Any]]] = {}
    for r in data["results"]:
        if "us" in r:
            found.setdefault((r["shape"], r["T"]), {})[r["impl"]] = r
    return dict(sorted(found.items(), key=lambda p: (list(gs.SHAPES).index(p[0][0]), p[0][1])))


def row(point: Point, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One point: our time, the ceiling, the best peer of this run, and the best stored peer scaled by the ceilings of both runs."""
    ours = results[OURS]["us"]
    ceiling = max((results[c]["us"] for c in CEILINGS if c in results), default=0.0)
    peers = {n: r["us"] for n, r in results.items() if not n.startswith(OURS) and n not in CEILINGS}
    here = min(peers.items(), key=lambda p: p[1], default=("", 0.0))
    stored, stored_ceiling = gs.best_peer(*point)
    scaled = stored * ceiling / stored_ceiling if ceiling and stored_ceiling else stored
    best = min((t for t in (here[1], scaled) if t), default=0.0)
    return {"us": ours, "ceiling": ceiling, "here": here, "stored": scaled, "best": best, "host": results[OURS].get("host_us", 0.0)}


def table(data: dict[str, Any]) -> str:
    """Text; ratios above 1 are in our favour."""
    lines = ["shape         T        us   ceiling  best here              stored,scaled | peer/us ceiling/us  host us  error"]
    ratios = []
    for point, results in points(data).items():
        if OURS not in results:
            lines.append(f"{point[0]:9}{point[1]:6}  (not measured)")
            continue
        r = row(point, results)
        ratio = r["best"] / r["us"] if r["best"] else 0.0
        if ratio:
            ratios.append(ratio)
        lines.append(
            f"{point[0]:9}{point[1]:6} {r['us']:9.1f} {r['ceiling']:9.1f} {r['here'][1]:9.1f} {r['here'][0]:14} {r['stored']:9.1f}  | "
            f"{ratio:6.2f} {r['ceiling'] / r['us']:9.2f} {r['host']:10.1f}  {results[OURS].get('error', 0):.4f}"
        )
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(f"geometric mean {mean:.3f}x of the best peer over {len(ratios)} points; ahead at {sum(r >= 1 for r in ratios)}")
    return "\n".join(lines)


def figure(data: dict[str, Any]) -> str:
    """SVG: one panel per shape, share of the ceiling's speed over T, ours and the best peer."""
    width, height, left, top = 260, 170, 40, 30
    parts = []
    shapes = [s for s in gs.SHAPES if any(p[0] == s for p in points(data))]
    for i, shape in enumerate(shapes):
        x0, y0 = left + i % 3 * (width + 40), top + i // 3 * (height + 60)
        mine = {t: row((s, t), r) for (s, t), r in points(data).items() if s == shape and OURS in r}
        parts.append(f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{shape}</text>')
        for share in (0.0, 0.5, 1.0):
            y = y0 + height * (1 - share / 1.2)
            parts.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.1f}</text>')
        for j, (t, r) in enumerate(mine.items()):
            x = x0 + (j + 0.15) * width / max(len(mine), 1)
            for k, (us, colour) in enumerate(((r["us"], "#1f6fb4"), (r["best"], "#bbb"))):
                if us and r["ceiling"]:
                    h = height * min(r["ceiling"] / us, 1.2) / 1.2
                    parts.append(f'<rect x="{x + 15 * k:.1f}" y="{y0 + height - h:.1f}" width="14" height="{h:.1f}" fill="{colour}"/>')
            parts.append(f'<text x="{x + 14:.1f}" y="{y0 + height + 14}" text-anchor="middle">{t}</text>')
    total = (3 * (width + 40) + left, top + -(-len(shapes) // 3) * (height + 60) + 10)
    note = f"{data['gpu']}: speed as a share of the ceiling (weights streamed once, or dense GEMMs). Blue: moefuse, grey: best peer."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" font-family="sans-serif" font-size="11">'
    return (
        "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', f'<text x="{left}" y="14">{note}</text>', *parts, "</svg>"])
        + "\n"
    )
