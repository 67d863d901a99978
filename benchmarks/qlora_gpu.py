"""QLoRA: experts in four bits with low-rank adapters, as one op and as grouped products (what they were before), in default mode.

    python benchmarks/qlora_gpu.py --out benchmarks/results/qlora-h100.json
    python benchmarks/qlora_gpu.py --device cpu --tiny          # smoke test

16 experts of 2048 x 768, four for a token, rank 16, bfloat16, a loop over the experts that unpacks each one's weights. Microseconds of a
call with its synchronisation, median of 40: no CUDA graph, so the host counts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _timing import by_line, environment  # noqa: E402

from moefuse.passes.lower.lower import Lowering  # noqa: E402
from tests.programs import packed_forms  # noqa: E402

SIZES = {"E": 16, "K": 4, "H": 2048, "WIDE": 768}


@contextlib.contextmanager
def lowered(one_op: bool) -> Iterator[None]:
    """With adapters as grouped products, unless ``one_op``."""
    takes = Lowering.takes
    if not one_op:
        Lowering.takes = lambda self, body: takes(self, body) and not any(p is not None and p.terms for p in body.projections)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lowering.takes = takes  # type: ignore[method-assign]


def layer(held: str, device: str) -> torch.nn.Module:
    from tests.programs.packed_adapters import Beside

    torch.manual_seed(0)
    made = Beside(held, whole=False, dtype=torch.bfloat16).to(device)
    made.router.float()
    return made


def measured(model: torch.nn.Module, tokens: int, trained: bool, device: str, turns: int) -> float:
    torch._dynamo.reset()
    call = torch.compile(model, backend="moefuse", dynamic=False)
    x = torch.randn(tokens, packed_forms.H, device=device, requires_grad=trained)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run() -> None:
        with torch.set_grad_enabled(trained):
            out = call(x)
        if trained:
            torch.autograd.grad(out.sum(), [x, *parameters])

    for _ in range(4):
        run()
    found = []
    for _ in range(turns):
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(found), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--held", default="nibbles")
    args = parser.parse_args()
    for name, size in ({} if args.tiny else SIZES).items():
        setattr(packed_forms, name, size)
    import tests.programs.packed_adapters as adapters

    adapters.R = 4 if args.tiny else 16
    model, rows = layer(args.held, args.device), []
    for tokens, trained in ((1, False), (64, False), (1024, False), (1024, True)):
        row: dict[str, Any] = {"tokens": tokens, "trained": trained}
        for name in ("grouped", "fused", "fused", "grouped"):
            with lowered(name == "fused"):
                us = measured(model, tokens, trained, args.device, 3 if args.tiny else 40)
            row[name] = min(us, row.get(name, us))
        rows.append(row)
        print(row, flush=True)
    if args.out:
        args.out.write_text(by_line({**environment(), "unit": "us", "held": args.held}, "results", rows))


if __name__ == "__main__":
    main()
