"""Draw docs/speed.svg, the picture at the top of README.md, from the measurements in benchmarks/results.

    python docs/picture.py            # rewrite docs/speed.svg
    python docs/picture.py --check    # fail if it is not what the results say

Each bar is the time of torch.compile's default (Inductor) divided by that of moefuse, side by side in one run: in a CUDA graph, which takes
the host away, and in default mode, as the host launches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speed.svg"
WIDTH, LEFT, ROW, UNIT = 790, 280, 30, 100  # UNIT: pixels of 1x
SHOWN = {"default-mode-h200": (8, 128, 4096), "default-mode-prefill512-h200": (512,), "default-mode-train-h200": (4096,)}
"""Of which runs in default mode which numbers of tokens are shown."""


class Group(NamedTuple):
    """The bars of one mode: (what, Inductor / moefuse), and on which GPU, with which versions and when each run was."""

    mode: str
    colour: str
    bars: list[tuple[str, float]]
    origins: list[str]

    @property
    def heading(self) -> str:
        return f"{self.mode}: {'; '.join(dict.fromkeys(self.origins))}"


def read(name: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return run


def origin(run: dict[str, Any], date: str) -> str:
    versions = run.get("versions", run)
    return f"{run['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, {date[:10]}"


def launched() -> Group:
    """In default mode."""
    found: list[tuple[str, float]] = []
    for name, tokens in SHOWN.items():
        run = read(name)
        what = f"{'training step' if run['train'] else 'forward'} of {run['layers']} layers"
        rows = [row for row in run["rows"] if row["backend"] == "moefuse" and row["tokens"] in tokens]
        found += [(f"{what}, {row['tokens']} tokens", row["ratio"]) for row in rows]
    return Group("Default mode, launched by the host", "#7fb6e6", found, [origin(run, run["date"]) for run in map(read, SHOWN)])


def in_a_graph() -> Group:
    """In a CUDA graph; the worst of several runs of a line."""
    whole, training = read("e2e-h200"), read("train-h200")
    part = whole["with the router's top-k as one kernel"]
    ratios: dict[str, float] = {}
    for run in part["results"]:
        if run["what"] != "decode":
            continue
        name = f"generate, batch {run['size']}"
        ratios[name] = min(run["default"] / run["moefuse"], ratios.get(name, float("inf")))
    us = {row["impl"]: row["us"] for row in training["results"] if (row["shape"], row["T"]) == ("qwen3", 4096)}
    bars = [*ratios.items(), ("experts, training step, 4096 tokens", us["hf_grouped_c"] / us["moefuse"])]
    return Group("In a CUDA graph", "#1f6fb4", bars, [origin(whole, part["date"]), origin(training, training["date"])])


def groups() -> list[Group]:
    """All that is shown."""
    return [in_a_graph(), launched()]


def drawn() -> str:
    """The picture as SVG; its background is white, so that it reads on a dark page, too."""
    shown = groups()
    bottom = 36 + sum(ROW * (1 + len(group.bars)) for group in shown)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 22}" font-family="sans-serif" font-size="13">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out.append('<text x="12" y="22" font-weight="bold">Qwen3-30B-A3B in bf16 on one GPU: times as fast as with Inductor</text>')
    y = 36
    for group in shown:
        out.append(f'<text x="12" y="{y + 18}" font-size="12" fill="#555">{group.heading}</text>')
        y += ROW
        top = y - 4
        for name, ratio in group.bars:
            out.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{name}</text>')
            out.append(f'<rect x="{LEFT}" y="{y}" width="{ratio * UNIT:.0f}" height="{ROW - 8}" fill="{group.colour}"/>')
            out.append(f'<text x="{LEFT + ratio * UNIT + 6:.0f}" y="{y + 15}" font-weight="bold">{ratio:.2f}x</text>')
            y += ROW
        out.append(f'<line x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="{top}" y2="{y - 4}" stroke="#888" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{LEFT + UNIT}" y="{bottom + 12}" text-anchor="middle" font-size="11" fill="#555">Inductor: 1x</text>')
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
