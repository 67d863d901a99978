"""Which families of transformers trace in one graph with their eager expert loops, and how far from eager that is.

    python benchmarks/capture_families.py --out benchmarks/results/capture-families.json

Run it in an environment with transformers 5 and in one with 4.57 (``make .venv4/.installed``): the file keeps one run of each release.
Every family is a tiny model of its own class in training mode (``tests/zoo``), compiled with moefuse's capture and rewrite and without
Inductor. A row holds the graphs and breaks that Dynamo made, the expert layers that were fused and how many there are, the refusals, the
largest relative difference from eager in the output and in a gradient, and the seconds of the first call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import transformers
from _timing import environment
from torch import Tensor
from torch._dynamo.utils import counters

from tests.cpu.capture_case import Seen, capturing
from tests.zoo import tiny
from tests.zoo.budget import output_and_gradients


def build(name: str) -> Any:
    """The tiny model with eager experts; None if this release does not have the family."""
    try:
        return tiny.build(name, experts_implementation="eager" if tiny.major() == "5" and tiny.FAMILIES[name].registry else None)
    except (pytest.skip.Exception, AttributeError):
        return None


def apart(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def row(name: str, model: Any) -> dict[str, Any]:
    """One family."""
    torch._dynamo.reset()
    counters.clear()
    model, inputs, seen = model.train(), tiny.inputs(name), Seen()
    eager = output_and_gradients(model, lambda: tiny.hidden(model, **inputs))
    compiled = torch.compile(model, backend=capturing(seen))
    start = time.perf_counter()
    got = output_and_gradients(model, lambda: tiny.hidden(compiled, **inputs))
    seconds = time.perf_counter() - start
    scale = max(float(g.norm()) for g in eager[1].values()) * 1e-4  # below that a gradient is rounding
    return {
        "family": name,
        "graphs": len(seen.graphs),
        "breaks": sum(counters["graph_break"].values()),
        "fused": len(seen.report.fused),
        "layers": tiny.FAMILIES[name].layers,
        "refusals": sorted(seen.codes),
        "output": apart(got[0], eager[0]),
        "gradient": max(float((got[1][n] - g).norm() / g.norm().clamp_min(scale)) for n, g in eager[1].items()),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name in args.families or tiny.FAMILIES:
        model = build(name)
        if model is not None:
            rows.append(row(name, model))
            print(rows[-1], flush=True)
    run = {**environment(), "transformers": transformers.__version__, "rows": rows}
    if args.out is not None:
        known = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
        runs = [r for r in known if r["transformers"] != run["transformers"]] + [run]
        args.out.write_text(json.dumps({"runs": sorted(runs, key=lambda r: r["transformers"])}, indent=1) + "\n")


if __name__ == "__main__":
    main()
