"""Draw docs/speed.svg, the picture at the top of README.md, from the measurements in benchmarks/results.

    python docs/picture.py            # rewrite docs/speed.svg
    python docs/picture.py --check    # fail if it is not what the results say

Each bar is the time of torch.compile's default (Inductor) divided by that of moefuse, side by side in one run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speed.svg"
WIDTH, LEFT, ROW, UNIT = 760, 250, 30, 100  # UNIT: pixels of 1x
NAMES = {"decode": "generate, batch {}", "prefill": "prefill, {} tokens"}


def bars() -> list[tuple[str, float]]:
    """(what, Inductor / moefuse), the worst of several runs of a line."""
    runs = json.loads((RESULTS / "e2e-h200.json").read_text())["with the router's top-k as one kernel"]["results"]
    ratios: dict[str, float] = {}
    for run in runs:
        name = NAMES[run["what"]].format(run["size"])
        ratios[name] = min(run["default"] / run["moefuse"], ratios.get(name, float("inf")))
    steps = json.loads((RESULTS / "train-h200.json").read_text())["results"]
    us = {row["impl"]: row["us"] for row in steps if (row["shape"], row["T"]) == ("qwen3", 4096)}
    return [*ratios.items(), ("experts, training step, 4096 tokens", us["hf_grouped_c"] / us["moefuse"])]


def drawn() -> str:
    """The picture as SVG; its background is white, so that it reads on a dark page, too."""
    rows = bars()
    height = 64 + ROW * len(rows)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out.append(
        '<text x="12" y="22" font-weight="bold">Qwen3-30B-A3B (16 of 48 layers, bf16) on one H200: times as fast as with Inductor</text>'
    )
    for i, (name, ratio) in enumerate(rows):
        y = 40 + ROW * i
        out.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{name}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{ratio * UNIT:.0f}" height="{ROW - 8}" fill="#1f6fb4"/>')
        out.append(f'<text x="{LEFT + ratio * UNIT + 6:.0f}" y="{y + 15}" font-weight="bold">{ratio:.2f}x</text>')
    bottom = 40 + ROW * len(rows)
    out.append(f'<line x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="34" y2="{bottom}" stroke="#888" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{LEFT + UNIT}" y="{bottom + 12}" text-anchor="middle" font-size="11" fill="#555">Inductor</text>')
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
