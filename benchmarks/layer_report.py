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


BLUE, GREY, LIGHT = "#1f6fb4", "#b8b8b8", "#ddd"
WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 170, 52, 92, 76


def figure(data: dict[str, Any]) -> str:
    """SVG: a panel for each shape, the share of the ceiling over T, ours and the best peer's; above, how many times as fast ours is."""
    shapes = [s for s in gs.SHAPES if any(p[0] == s for p in points(data))]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if name in ("torch", "triton"))
    total = (3 * (WIDTH + GAP) + 10, TOP + -(-len(shapes) // 3) * (HEIGHT + GAP))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" font-family="sans-serif" font-size="11">'
    parts = [head, '<rect width="100%" height="100%" fill="white"/>']
    parts.append(_text(12, 20, "One layer's experts: share of the speed that the hardware allows", 'font-size="14" font-weight="bold"'))
    parts.append(_text(12, 38, f"{data['gpu']}, {data['dtype']}, in a CUDA graph, {versions}, {data['date']}", 'fill="#555"'))
    for x, colour, name in ((12, BLUE, "moefuse"), (90, GREY, "best peer of the run, or stored and scaled")):
        parts.append(f'<rect x="{x}" y="46" width="12" height="12" fill="{colour}"/>' + _text(x + 17, 56, name))
    parts.append(_text(400, 56, "above the bars: times as fast as the best peer"))
    for i, shape in enumerate(shapes):
        mine = {t: row((s, t), r) for (s, t), r in points(data).items() if s == shape and OURS in r}
        parts += _panel(LEFT + i % 3 * (WIDTH + GAP), TOP + i // 3 * (HEIGHT + GAP), shape, mine)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(x0: int, y0: int, shape: str, rows: dict[int, dict[str, Any]]) -> list[str]:
    bottom = y0 + HEIGHT
    parts = [_text(x0, y0 - 8, shape, 'font-weight="bold"'), _text(x0 + WIDTH // 2, bottom + 30, "tokens", 'text-anchor="middle"')]
    middle = f'text-anchor="middle" transform="rotate(-90 {x0 - 36} {y0 + HEIGHT // 2})"'
    parts.append(_text(x0 - 36, y0 + HEIGHT // 2, "share of the ceiling", middle))
    for share in (0.0, 0.5, 1.0):
        y = bottom - HEIGHT * share / 1.2
        parts.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LIGHT}"/>')
        parts.append(_text(x0 - 6, y + 4, f"{share:.1f}", 'text-anchor="end"'))
    for j, (t, r) in enumerate(rows.items()):
        x, tops = x0 + (j + 0.15) * WIDTH / max(len(rows), 1), [float(bottom)]
        for k, (us, colour) in enumerate(((r["us"], BLUE), (r["best"], GREY))):
            if us and r["ceiling"]:
                h = HEIGHT * min(r["ceiling"] / us, 1.2) / 1.2
                tops.append(bottom - h)
                parts.append(f'<rect x="{x + 15 * k:.1f}" y="{bottom - h:.1f}" width="14" height="{h:.1f}" fill="{colour}"/>')
        if r["best"]:
            parts.append(_text(x + 14, min(tops) - 3, f"{r['best'] / r['us']:.2f}", 'text-anchor="middle" font-size="10"'))
        parts.append(_text(x + 14, bottom + 14, str(t), 'text-anchor="middle"'))
    return parts


def _text(x: float, y: float, text: str, how: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" {how}>{text}</text>'


def newest(every: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several: a later one has the points that it measured for its own, but for ceilings that it did not measure."""
    found = dict(every[0])
    for later in every[1:]:
        own = {(r["shape"], r["T"]) for r in later["results"]}
        measured = {(r["shape"], r["T"], r["impl"]) for r in later["results"]}
        kept = [r for r in found["results"] if (r["shape"], r["T"]) not in own]
        kept += [
            r
            for r in found["results"]
            if (r["shape"], r["T"]) in own and r["impl"] in CEILINGS and (r["shape"], r["T"], r["impl"]) not in measured
        ]
        found |= {**later, "dtype": later.get("dtype", found["dtype"]), "results": kept + later["results"]}
    return found
