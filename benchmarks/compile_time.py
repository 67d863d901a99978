"""First-call time of ``torch.compile(backend="moefuse")`` beside ``backend="inductor"`` on an unmodified transformers model.

    python benchmarks/compile_time.py --layers 4 --repeats 3 --out benchmarks/results/compile-time.json

Each measurement is a fresh process with empty Inductor cache folders; the candidates alternate. Measured is the first call (Dynamo,
rewrite, Inductor, C++ compiler), without imports and model construction, after one tiny unrelated compilation has paid the one-off costs.
moefuse's own C++ kernel is compiled once per machine and kept in moefuse's cache: "moefuse" finds it there, "moefuse, no kernel yet"
does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _timing import environment, paired_ratio, short, summary

FIRST = "moefuse, no kernel yet"
CANDIDATES = ("inductor", "moefuse", FIRST)


def first_call(backend: str, layers: int, train: bool) -> dict[str, Any]:
    """What the child process does."""
    import logging
    import time
    import warnings

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, hidden_size=256, moe_intermediate_size=96, intermediate_size=512, head_dim=32, num_attention_heads=8,
        num_key_value_heads=2, num_experts=64, num_experts_per_tok=8, vocab_size=1024, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).train(train)
    ids = torch.randint(3, 1024, (1, 64))
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
    compiled = torch.compile(model, backend=backend)

    def step() -> float:
        start = time.perf_counter()
        if train:
            compiled(ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                compiled(ids, use_cache=False)
        return time.perf_counter() - start

    seconds = step()
    fused = 0
    if backend == "moefuse":
        import moefuse

        report = moefuse.last_report()
        fused = len(report.fused) if report else 0
    return {"seconds": seconds, "steady_s": min(step() for _ in range(3)), "fused": fused}


def child(candidate: str, args: argparse.Namespace, kernels: str) -> dict[str, Any]:
    """One first call in a process of its own; ``kernels`` is the folder in which moefuse's kernels are kept from call to call."""
    with tempfile.TemporaryDirectory() as folder:
        own = folder if candidate == FIRST else kernels
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "MOEFUSE_CACHE_DIR": own}
        command = [sys.executable, __file__, "--child", candidate.split(",")[0], "--layers", str(args.layers)] + ["--train"] * args.train
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{candidate} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if candidate != "inductor" and result["fused"] != args.layers:
        raise SystemExit(f"moefuse fused {result['fused']} of {args.layers} layers")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", choices=CANDIDATES[:2], default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(first_call(args.child, args.layers, args.train)))
        return
    seconds: dict[str, list[float]] = {candidate: [] for candidate in CANDIDATES}
    with tempfile.TemporaryDirectory() as kernels:
        child("moefuse", args, kernels)
        for turn in range(args.repeats):
            for candidate in CANDIDATES if turn % 2 == 0 else CANDIDATES[::-1]:
                result = child(candidate, args, kernels)
                seconds[candidate].append(result["seconds"])
                print(f"{candidate:22s} first call {result['seconds']:6.2f} s, then {result['steady_s'] * 1e3:7.2f} ms", flush=True)
    ratio = {name: paired_ratio(values, seconds["inductor"]) for name, values in seconds.items() if name != "inductor"}
    for name, values in ratio.items():
        print(f"{name} / inductor: {values['median']:.2f}x (median of {args.repeats} pairs)")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: summary(values) for name, values in seconds.items()}
        settings = {"layers": args.layers, "train": args.train}
        args.out.write_text(json.dumps(short(environment() | settings | {"unit": "s", "seconds": rows, "ratio": ratio}), indent=1) + "\n")


if __name__ == "__main__":
    main()
