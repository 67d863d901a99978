"""CPU seconds of a first call up to where Inductor writes code: Dynamo, capture, moefuse's passes and proofs, AOTAutograd.

    PYTHONPATH=. python benchmarks/compile_front.py --out /tmp/after.json [FAMILY ...]         # in each checkout, at the same time
    python benchmarks/compile_front.py --beside /tmp/before.json --with /tmp/after.json --out benchmarks/results/compile-front.json

What two commits differ in, on a machine where code generation would hide it (``compile_families.py`` has that too). Tiny models of
transformers (tests/zoo), inference, four rounds over all families in one process, the quickest round counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

FAMILIES = """qwen3_moe mixtral gpt_oss deepseek_v3 olmoe llama4 qwen2_moe dbrx
jamba granitemoe phimoe switch_transformers nllb_moe glm4_moe ernie4_5_moe minimax""".split()
ROUNDS = 4


def measured(names: list[str]) -> dict[str, list[float]]:
    import torch
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    from moefuse import _torch_private
    from tests.zoo import tiny

    def front(gm: Any, inputs: Any, *_: Any) -> Any:
        with config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(inputs), inner_compile=lambda traced, *_, **__: traced.forward)  # type: ignore[arg-type, misc]

    torch.set_num_threads(1)
    _torch_private.compile_fx = front
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            torch._dynamo.reset()
            compiled, inputs = torch.compile(tiny.build(name), backend="moefuse"), tiny.inputs(name)
            gc.collect()
            gc.disable()
            start = time.process_time()
            with torch.no_grad():
                tiny.hidden(compiled, **inputs)
            found[name].append(round(time.process_time() - start, 3))
            gc.enable()
    return found


def compared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Ratios of the quickest rounds."""
    rows = {
        name: {"before": min(times), "after": min(after["seconds"][name])}
        for name, times in before["seconds"].items()
        if name in after["seconds"]
    }
    ratios = [row["after"] / row["before"] for row in rows.values()]
    summary = {"median_ratio": round(statistics.median(ratios), 3), "largest_ratio": round(max(ratios), 3), "families": len(rows)}
    return {"before": before["commit"], "after": after["commit"], "environment": after["environment"], **summary, "seconds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--with", type=Path, dest="other")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.beside is not None:
        result = compared(*(json.loads(path.read_text()) for path in (args.beside, args.other)))
    else:
        from _timing import environment

        logging.disable(logging.CRITICAL)
        warnings.filterwarnings("ignore")
        where = environment()
        result = {"commit": where["commit"], "environment": where, "seconds": measured(args.families)}
    from _timing import short

    args.out.write_text(json.dumps(short(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
