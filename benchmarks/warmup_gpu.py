"""What ``moefuse.warmup`` gains on this GPU, and what the cost gate then decides: tests first, then layers of public models.

    python benchmarks/warmup_gpu.py [--budget SECONDS] [--out FOLDER] [--layers qwen3] [--tokens 512,4096]

Measurements go to a folder of their own, not to the user's cache. Per layer and number of tokens: the op as it ships, as tuned, and the
grouped program of transformers (``experts_implementation="grouped_mm"``) compiled by Inductor; then what the next compilation does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from _timing import by_line  # noqa: E402

TOKENS = (1, 8, 64, 512, 4096)
"""Numbers of tokens; each is compiled apart, so that every one has a program of its own."""


def blocks() -> dict[str, Any]:
    """Layers of transformers with random weights, built one after the other."""
    from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    qwen = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    mixtral = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
    olmoe = {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    return {
        "qwen3": lambda: made(Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**qwen)),
        "mixtral": lambda: made(MixtralSparseMoeBlock, MixtralConfig(**mixtral)),
        "olmoe": lambda: made(OlmoeSparseMoeBlock, OlmoeConfig(**olmoe)),
    }


def made(kind: Any, config: Any) -> Any:
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        block = kind(config).to(torch.bfloat16).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return block


def decided(block: Any, tokens: int) -> str:
    """What one compilation for this many tokens does."""
    import moefuse

    torch._dynamo.reset()
    hidden = next(p for p in block.parameters()).shape[-1]
    x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    torch.compile(block, backend="moefuse", dynamic=False)(x)
    report = moefuse.last_report()
    assert report is not None
    return "fused" if report.fused else ",".join(s.code for s in report.skipped) or "nothing found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of tuning in all")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--layers", default="", help="some of them")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args = parser.parse_args()
    os.environ["MOEFUSE_CACHE_DIR"] = tempfile.mkdtemp()
    if not args.no_tests:
        subprocess.run([sys.executable, "-m", "pytest", "tests/gpu/test_warmup.py", "-q"], cwd=ROOT, check=False)
    import moefuse

    begin, rows = time.monotonic(), []
    tokens = tuple(map(int, args.tokens.split(",")))
    made_blocks = {name: build for name, build in blocks().items() if not args.layers or name in args.layers.split(",")}
    for i, (name, build) in enumerate(made_blocks.items()):
        left = begin + args.budget - time.monotonic()
        block = build()
        with torch.no_grad():
            first = {t: decided(block, t) for t in tokens}
            report = moefuse.warmup(block, tokens, budget_s=max(left / (len(made_blocks) - i), 1.0), progress=False)
            print(report, flush=True)
            then = {t: decided(block, t) for t in tokens}
        rows += [{"layer": name, "first": first.get(t.tokens), "then": then.get(t.tokens), **t.to_dict()} for t in report.tuned]
        del block
        torch.cuda.empty_cache()
    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    os.makedirs(args.out, exist_ok=True)
    (Path(args.out) / "warmup.json").write_text(by_line(head, "rows", list(map(kept, rows))))
    table(rows)
    print(f"{time.monotonic() - begin:.0f} s")


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """What a reader needs: the layer's name stands for its sizes, and a program is called by its kind."""
    names = ("layer", "tokens", "first", "then", "us", "before_us", "tried", "config", "library")
    programs = {name.partition(":")[0]: times for name, times in row["programs"].items()}
    return {name: row[name] for name in names} | {"programs": programs}


def table(rows: list[dict[str, Any]]) -> None:
    print("layer T shipped_us tuned_us gain program_us replaced_us tried before then")
    for r in rows:
        program, replaced = next(iter(r["programs"].values()), (0.0, 0.0))
        before, us = r["before_us"] or 0.0, r["us"] or 0.0
        print(
            f"{r['layer']:8}{r['tokens']:>6} {before:9.1f} {us:9.1f} {before / us if us else 0:5.2f} {program:9.1f} {replaced:9.1f} "
            f"{r['tried']:4} {r['first']} {r['then']} {r['problem']} {'; '.join(r['not_compared'])}"
        )


if __name__ == "__main__":
    main()
