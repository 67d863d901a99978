"""What becomes of every mixture-of-experts family of transformers: docs/coverage.md, from real runs.

    make zoo-coverage                                            # both releases, then the page
    python benchmarks/zoo_coverage.py --out benchmarks/results/coverage.json [FAMILY ...]
    python benchmarks/zoo_coverage.py --page docs/coverage.md        # only write the page

Every family is a tiny model of its own class (``tests/zoo``) with each implementation of its experts, in evaluation and in training,
compiled with moefuse's capture and rewrite and without Inductor. The file keeps one run of each release; a run with families named
replaces their rows only.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import zoo_page  # noqa: E402
from _timing import environment  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from moefuse.report.report import FusionReport  # noqa: E402
from tests.cpu.capture_case import Seen, capturing  # noqa: E402
from tests.zoo import tiny  # noqa: E402
from tests.zoo.budget import output_and_gradients  # noqa: E402

OWN = "own code"
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def build(name: str, implementation: str) -> Any:
    """The tiny model; None if this release does not have the family."""
    try:
        return tiny.build(name, experts_implementation=None if implementation == OWN else implementation)
    except (pytest.skip.Exception, AttributeError, ValueError):  # ValueError: there is no implementation to choose
        return None


def implementations(name: str) -> Iterator[str]:
    """The implementations of a family in this release."""
    if tiny.major() == "4" or not tiny.FAMILIES[name].registry:
        yield OWN
    else:
        yield from IMPLEMENTATIONS


def default_of(name: str) -> str:
    """The implementation that transformers chooses."""
    model = None if OWN in implementations(name) else build(name, OWN)
    return OWN if model is None else str(model.config._experts_implementation)


def apart(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def gradients_apart(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a gradient; one that is rounding beside the others is measured against those."""
    scale = max((float(g.norm()) for g in expected.values()), default=1.0) * 1e-4
    return max((float((got[n] - g).norm() / g.norm().clamp_min(scale)) for n, g in expected.items()), default=0.0)


def result(called: Any, model: Any, mode: str, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and, in training, gradients; an expert without tokens has none in eager and zeros behind a fused op."""
    if mode == "eval":
        with torch.no_grad():
            return tiny.hidden(called, **inputs), {}
    return output_and_gradients(model, lambda: tiny.hidden(called, **inputs))


def errors(got: tuple[Tensor, dict[str, Tensor]], eager: tuple[Tensor, dict[str, Tensor]], mode: str) -> dict[str, float]:
    gradient = {"gradient": gradients_apart(got[1], eager[1])} if mode == "train" else {}
    return {"output": apart(got[0], eager[0]), **gradient}


_FOLDER = re.compile(r"/\S*/site-packages/")
"""Where a library is installed is nobody's business."""


def reasons(report: FusionReport) -> list[dict[str, str]]:
    """Code, module and the line in transformers of everything that was not fused."""
    return [
        {"code": s.code, "module": s.module, "line": Path(s.location).name, "message": _FOLDER.sub("", s.message)} for s in report.skipped
    ]


def row(name: str, implementation: str, mode: str) -> dict[str, Any] | None:
    """One family with one implementation in one mode; None where this release does not have it."""
    torch._dynamo.reset()
    counters.clear()
    model = build(name, implementation)
    if model is None:
        return None
    known = {"family": name, "implementation": implementation, "mode": mode, "present": tiny.FAMILIES[name].layers}
    model, inputs, seen = model.train(mode == "train"), tiny.inputs(name), Seen()
    try:
        eager = result(model, model, mode, inputs)
    except Exception as error:
        return {**known, "unusable": f"{type(error).__name__} in transformers without compiling: {str(error)[:100]}"}
    try:
        got = result(torch.compile(model, backend=capturing(seen)), model, mode, inputs)
    except Exception as error:
        return {**known, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return {
        **known,
        "fused": len(seen.report.fused),
        "tiers": sorted({f.tier for f in seen.report.fused}),
        "graphs": len(seen.graphs),
        "breaks": sum(counters["graph_break"].values()),
        **errors(got, eager, mode),
        "reasons": reasons(seen.report),
        **({"alone": tiny.FAMILIES[name].alone} if tiny.FAMILIES[name].alone else {}),
        "where": sorted({Path(f.location).name for f in seen.report.fused}),
    }


def rows_of(name: str, modes: list[str]) -> Iterator[dict[str, Any]]:
    try:
        default = default_of(name)
    except pytest.skip.Exception:
        return
    for implementation in implementations(name):
        for mode in modes:
            found = row(name, implementation, mode)
            if found is not None:
                yield {**found, "default": implementation == default}


def written(out: Path, fresh: list[dict[str, Any]]) -> None:
    """Add rows to the run of this release."""
    runs = {r["transformers"]: r for r in (zoo_page.read(out) if out.exists() else [])}
    old = runs.get(transformers.__version__, {"rows": []})["rows"]
    key = [(r["family"], r["implementation"], r["mode"]) for r in fresh]
    kept = [r for r in old if (r["family"], r["implementation"], r["mode"]) not in key]
    order = list(tiny.FAMILIES)
    rows = sorted(kept + fresh, key=lambda r: (order.index(r["family"]), r["implementation"], r["mode"]))
    command = {
        "command": "python benchmarks/zoo_coverage.py --out benchmarks/results/coverage.json",
        "transformers": transformers.__version__,
    }
    runs[transformers.__version__] = {**environment(), **command, "rows": rows}
    out.write_text(zoo_page.as_text([runs[v] for v in sorted(runs)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--modes", default="eval,train")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write the page from the results that are there, and measure nothing")
    args = parser.parse_args()
    if args.page:
        args.page.write_text(zoo_page.page(zoo_page.read()))
        return
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for name in args.families or tiny.FAMILIES:
        fresh = []
        for found in rows_of(name, args.modes.split(",")):
            fresh.append(found)
            codes = {r["code"] for r in found.get("reasons", ())}
            print({k: v for k, v in found.items() if k not in ("reasons", "where")}, codes, flush=True)
        if args.out is not None and fresh:
            written(args.out, fresh)


if __name__ == "__main__":
    main()
