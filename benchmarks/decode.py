"""Where the time of a decode step goes: 16 of 48 layers of Qwen3-30B-A3B with random weights, through ``generate`` with a static cache.

    python benchmarks/decode.py --out benchmarks/results/decode-h200.json
    python benchmarks/decode.py --device cpu --tiny

For each batch size and backend: milliseconds per token (the difference of a long and a short generation), and from a profile the GPU's
microseconds per token by kind of kernel, and between kernels: pauses of up to 20 us, where the graph goes from one kernel to the next, and
longer ones, where the GPU waits for the host. "moefuse+fuse_router" is moefuse with that option.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("Inductor's", ("triton_",)),
    ("experts", ("_vectors", "down_parts", "up_tiles", "down_tiles", "combine_", "sort_once", "_chunks", "grouped_mm", "GroupProblem")),
    ("router", ("few_logits", "choose", "route", "topk", "TopK", "bitonicSort", "radix")),
    ("attention", ("flash", "fmha", "attention")),
    ("library products", ("gemm", "gemv", "cutlass", "nvjet", "splitK", "cublas")),
    ("copies", ("Memcpy", "Memset", "copy_kernel", "CatArray")),
]
"""Kind of kernel -> parts of names; the first kind that fits counts."""
LONG, SHORT = 48, 8


def kind_of(kernel: str) -> str:
    """The kind that a kernel's name says."""
    return next((kind for kind, parts in KINDS if any(part in kernel for part in parts)), "other")


def build(device: str, tiny: bool, layers: int = 16) -> Any:
    """Qwen3-30B-A3B with so many layers and random weights; ``tiny``: a small one of two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "head_dim": 128, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "num_hidden_layers": layers}
    if tiny:
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "num_hidden_layers": 2}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **sizes)).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def generator(model: Any, batch: int, backend: str, device: str) -> Callable[[int], None]:
    """A function that generates so many tokens."""
    from transformers import CompileConfig

    ids = torch.randint(0, model.config.vocab_size, (batch, 32), device=device)
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    name, _, option = backend.partition("+")
    # torch takes a mode or options: with options, "triton.cudagraphs" is what mode="reduce-overhead" means.
    given: dict[str, Any] = {"mode": None, "options": {"triton.cudagraphs": device == "cuda", option: True}} if option else {}
    how["compile_config"] = CompileConfig(backend=name, **given)

    def generate(count: int) -> None:
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **how)
        if device == "cuda":
            torch.cuda.synchronize()

    return generate


def seconds(generate: Callable[[int], None], count: int) -> float:
    begin = time.perf_counter()
    generate(count)
    return time.perf_counter() - begin


def on_the_gpu(generate: Callable[[int], None], count: int) -> Counter[str]:
    """Microseconds by kind of kernel, and of pauses between kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        generate(count)
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found: Counter[str] = Counter()
    busy_until = None
    for event in sorted(events, key=lambda event: event.time_range.start):
        found[kind_of(event.name)] += event.device_time_total
        found["kernels"] += 1
        if busy_until is not None and event.time_range.start > busy_until:
            pause = event.time_range.start - busy_until
            found["pauses up to 20 us" if pause <= 20 else "longer pauses"] += pause
        busy_until = max(busy_until or 0, event.time_range.end)
    return found


def measure(model: Any, batch: int, backend: str, device: str, turns: int) -> dict[str, Any]:
    torch._dynamo.reset()
    generate = generator(model, batch, backend, device)
    for _ in range(2):
        generate(LONG)
    differences = sorted(seconds(generate, LONG) - seconds(generate, SHORT) for _ in range(turns))
    row: dict[str, Any] = {"batch": batch, "backend": backend, "ms": round(differences[turns // 2] / (LONG - SHORT) * 1e3, 3)}
    if device == "cuda":
        long, short = on_the_gpu(generate, LONG), on_the_gpu(generate, SHORT)
        row["gpu_us"] = {kind: round((us - short[kind]) / (LONG - SHORT), 1) for kind, us in long.most_common()}
        row["kernels"] = row["gpu_us"].pop("kernels")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["moefuse", "moefuse+fuse_router", "inductor"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from _timing import by_line
    from layer import environment

    unit = "ms: milliseconds per token; gpu_us: microseconds per token in a profile, which makes the host slower"
    head = {**environment(args.commit), "unit": unit} if args.device == "cuda" else {}
    rows: list[dict[str, Any]] = []
    model = build(args.device, args.tiny)
    with torch.no_grad():
        for batch in args.batch:
            for backend in args.backends:
                row = measure(model, batch, backend, args.device, args.turns)
                rows.append(row)
                shown = f"{row['ms']:8.3f} ms  {row.get('kernels', 0)} kernels  GPU us: {row.get('gpu_us', 'not profiled')}"
                print(f"batch {batch:3} {backend:20} {shown}", flush=True)
                if args.out:
                    args.out.write_text(by_line(head, "results", rows))


if __name__ == "__main__":
    main()
