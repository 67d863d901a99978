"""Draw docs/speed.svg, the picture at the top of README.md, from the measurements in benchmarks/results.

    python docs/picture.py            # rewrite docs/speed.svg
    python docs/picture.py --check    # fail if it is not what the results say

Each bar is the time of torch.compile's default (Inductor) divided by that of moefuse, side by side in one run: dark in a CUDA graph, which
takes the host away, light in default mode, as the host launches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speed.svg"
WIDTH, LEFT, ROW, UNIT = 760, 250, 30, 100  # UNIT: pixels of 1x
IN_A_GRAPH, LAUNCHED = "#1f6fb4", "#7fb6e6"
SHOWN = {"default-mode-h200": (8, 128, 4096), "default-mode-prefill512-h200": (512,), "default-mode-train-h200": (4096,)}
"""Of which runs in default mode which numbers of tokens are shown."""


def launched() -> list[tuple[str, float]]:
    """(what, Inductor / moefuse) in default mode."""
    found: list[tuple[str, float]] = []
    for name, tokens in SHOWN.items():
        run = json.loads((RESULTS / f"{name}.json").read_text())
        what = f"{'training step' if run['train'] else 'forward'} of {run['layers']} layers"
        rows = [row for row in run["rows"] if row["backend"] == "moefuse" and row["tokens"] in tokens]
        found += [(f"{what}, {row['tokens']} tokens", row["ratio"]) for row in rows]
    return found


def in_a_graph() -> list[tuple[str, float]]:
    """(what, Inductor / moefuse), the worst of several runs of a line."""
    runs = json.loads((RESULTS / "e2e-h200.json").read_text())["with the router's top-k as one kernel"]["results"]
    ratios: dict[str, float] = {}
    for run in runs:
        if run["what"] != "decode":
            continue
        name = f"generate, batch {run['size']}"
        ratios[name] = min(run["default"] / run["moefuse"], ratios.get(name, float("inf")))
    steps = json.loads((RESULTS / "train-h200.json").read_text())["results"]
    us = {row["impl"]: row["us"] for row in steps if (row["shape"], row["T"]) == ("qwen3", 4096)}
    return [*ratios.items(), ("experts, training step, 4096 tokens", us["hf_grouped_c"] / us["moefuse"])]


def bars() -> list[tuple[str, float]]:
    """All that is shown."""
    return [*in_a_graph(), *launched()]


def drawn() -> str:
    """The picture as SVG; its background is white, so that it reads on a dark page, too."""
    rows = bars()
    height = 64 + ROW * len(rows)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out.append('<text x="12" y="22" font-weight="bold">Qwen3-30B-A3B on one H200, bf16: times as fast as with Inductor</text>')
    first = len(in_a_graph())
    for i, (name, ratio) in enumerate(rows):
        y = 40 + ROW * i
        out.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{name}</text>')
        out.append(
            f'<rect x="{LEFT}" y="{y}" width="{ratio * UNIT:.0f}" height="{ROW - 8}" fill="{IN_A_GRAPH if i < first else LAUNCHED}"/>'
        )
        out.append(f'<text x="{LEFT + ratio * UNIT + 6:.0f}" y="{y + 15}" font-weight="bold">{ratio:.2f}x</text>')
    bottom = 40 + ROW * len(rows)
    out.append(f'<line x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="34" y2="{bottom}" stroke="#888" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{LEFT + UNIT}" y="{bottom + 12}" text-anchor="middle" font-size="11" fill="#555">Inductor</text>')
    for x, colour, what in ((440, IN_A_GRAPH, "in a CUDA graph"), (580, LAUNCHED, "default mode, launched")):
        out.append(f'<rect x="{x}" y="{bottom + 3}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 15}" y="{bottom + 12}" font-size="11" fill="#555">{what}</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(PICTURE.read_text() != drawn())
    PICTURE.write_text(drawn())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
