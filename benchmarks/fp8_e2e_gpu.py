"""A shortened Qwen3-30B-A3B whose experts are held in float8 (blocks of 128 x 128), against the same model in bfloat16.

    python benchmarks/fp8_e2e_gpu.py --out FOLDER [--what fp8+moefuse,bf16+moefuse,bf16+inductor] [--at-once 5]
    python benchmarks/fp8_e2e_gpu.py --tiny --device cpu

16 of 48 layers, random weights. Decode: milliseconds per token of ``generate`` with a static cache (the difference of a long and a short
generation); prefill: milliseconds of one forward; both with the peak of memory. Each point is a process of its own: those of one model
compile beside each other, then measure one at a time while the others wait. First a small model is compared with itself, whose experts are
computed by the portable operator.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

BLOCK = 128
LONG, SHORT = 48, 8
POINTS = "decode:1,decode:8,decode:32,prefill:512,prefill:4096"
FULL = {"hidden_size": 2048, "moe_intermediate_size": 768, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4}
FULL |= {"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "num_hidden_layers": 16}
TINY = FULL | {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 32, "num_attention_heads": 8, "num_experts": 8}
TINY |= {"num_experts_per_tok": 2, "vocab_size": 512, "num_hidden_layers": 2}


def build(sizes: dict[str, Any], device: str, float8: bool) -> Any:
    """The model; in float8 its experts are never there in bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    width = sizes["moe_intermediate_size"]
    small = sizes | {"moe_intermediate_size": 16} if float8 else sizes
    config = Qwen3MoeConfig(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False, **small)
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config).eval()
        if float8:
            config.moe_intermediate_size = width
            for layer in model.model.layers:
                layer.mlp.experts = float8_experts(config)
    model.set_experts_implementation("moefuse" if float8 else "grouped_mm")
    return model


def float8_experts(config: Any) -> Any:
    """transformers' own module, with random codes and scales that give weights the size of a usual initialisation."""
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import use_experts_implementation

    import moefuse.integrations.transformers_fp8  # noqa: F401

    own: Any = finegrained_fp8
    kind = use_experts_implementation(
        experts_class=type("Experts", (own.FP8Experts,), {}), experts_interface=own.ALL_FP8_EXPERTS_FUNCTIONS, has_gate=True
    )
    made = kind(config, block_size=[BLOCK, BLOCK], has_gate=True)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype == torch.float8_e4m3fn:
            for expert in parameter.data:
                expert.copy_(torch.randn(expert.shape, dtype=torch.bfloat16))
        else:
            parameter.data.copy_((torch.rand(parameter.shape) + 0.5) * 0.02)
    return made


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str) -> float:
    sync(device)
    begin = time.perf_counter()
    call()
    sync(device)
    return time.perf_counter() - begin


def decode(model: Any, batch: int, backend: str, device: str) -> Callable[[int], object]:
    """A function that generates so many tokens."""
    from transformers import CompileConfig

    ids = torch.randint(0, model.config.vocab_size, (batch, 32), device=device)
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    how["compile_config"] = CompileConfig(backend=backend)  # its mode is reduce-overhead
    return lambda count: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **how)


def point(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures one point: yields when it is warm, and then the result."""
    import moefuse

    form, _, backend = args.what.partition("+")
    what, _, size = args.points.partition(":")
    begin = time.perf_counter()
    model = build(TINY if args.tiny else FULL, args.device, form == "fp8")
    count, made = int(size), time.perf_counter() - begin
    if what == "decode":
        generate = decode(model, count, backend, args.device)
        run = lambda: seconds(lambda: generate(LONG), args.device) - seconds(lambda: generate(SHORT), args.device)  # noqa: E731
        generate(LONG)
        generate(LONG)
    else:
        ids = torch.randint(0, model.config.vocab_size, (1, count), device=args.device)
        compiled = torch.compile(model, backend=backend)
        call = lambda: compiled(ids, use_cache=False, logits_to_keep=1)  # noqa: E731
        run = lambda: seconds(call, args.device)  # noqa: E731
        for _ in range(3):
            call()
    report = moefuse.last_report() if backend == "moefuse" else None
    warm = {"form": form, "backend": backend, "what": what, "size": count, "build_s": round(made, 1)}
    yield warm | {"warm_s": round(time.perf_counter() - begin, 1), "fused": len(report.fused) if report else None}
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = sorted(run() for _ in range(5 if what == "decode" else 9))
    ms = times[len(times) // 2] * 1e3 / (LONG - SHORT if what == "decode" else 1)
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    yield {"ms": round(ms, 3), "peak_gib": round(peak, 2)}


def check(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Logits of a small model, compiled, against the same model whose experts are the portable operator; and transformers' own path."""
    from moefuse.runtime import providers

    model = build(TINY, args.device, True)
    ids = torch.randint(0, model.config.vocab_size, (4, 64), device=args.device)
    compiled = torch.compile(model, backend="moefuse")
    ours = compiled(ids, use_cache=False).logits.float()
    providers.unregister("experts_extended", "triton")
    theirs = model(ids, use_cache=False).logits.float()
    apart = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    error = float((ours - theirs).norm() / theirs.norm())
    row = {"what": "check", "error": round(error, 5), "error_of_most_tokens": round(float(apart.median()), 5), "right": error < 0.05}
    model.set_experts_implementation("grouped_mm")
    try:
        model(ids, use_cache=False)
        row["transformers_own"] = "runs"
    except Exception as problem:
        row["transformers_own"] = f"not installable here: {type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
    yield row
    yield {}


def worker(args: argparse.Namespace) -> None:
    """Says that it is warm, waits for a line, measures."""
    signal.alarm(int(args.budget) + 100)  # whatever becomes of whoever would say "go"
    work = check(args) if args.points == "check" else point(args)
    try:
        with torch.no_grad():
            print("@" + json.dumps(next(work)), flush=True)
            sys.stdin.readline()
            print("@" + json.dumps(next(work)), flush=True)
    except Exception as problem:
        print("@" + json.dumps({"error": f"{type(problem).__name__}: {str(problem)[:400]}"}), flush=True)
        raise


def start(args: argparse.Namespace, what: str, name: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--worker", "--what", what, "--points", name, "--device", args.device]
    threads = str(max(1, (os.cpu_count() or 1) // max(1, args.at_once)))
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    log = (folder / f"{what}-{name}.log".replace(":", "-")).open("w")
    pipe = subprocess.PIPE
    return subprocess.Popen(command + ["--tiny"] * args.tiny, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that is meant for us."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@"):
            found: dict[str, Any] = json.loads(line[1:])
            return found
    return {"error": f"ended with {process.wait()}"}


def wave(args: argparse.Namespace, what: str, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Points of one model: all get warm, then one after the other measures."""
    processes = [start(args, what, name, folder) for name in names]
    warm = [answer(process) for process in processes]
    rows = []
    for name, process, row in zip(names, processes, warm, strict=True):
        if "error" not in row or "right" in row:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            row |= answer(process)
        process.wait()
        rows.append({"point": f"{what} {name}", **row})
        print(shown(rows[-1]), flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    if "ms" not in row:
        rest = {name: value for name, value in row.items() if name != "point"}
        return f"{row['point']}: {rest}"
    return f"{row['point']:28}{row['ms']:10.3f} ms {row['peak_gib']:7.2f} GiB   fused {row['fused']}, warm after {row['warm_s']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="fp8+moefuse,bf16+moefuse,bf16+inductor")
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--at-once", type=int, default=5, help="processes beside each other: 13 GiB each in float8, 23 in bfloat16")
    parser.add_argument("--budget", type=float, default=140, help="seconds after which no other model is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    for number, what in enumerate(args.what.split(",")):
        names = args.points.split(",")
        if not number and not args.no_check:
            names = ["check", *names]
        for at in range(0, len(names), args.at_once + 1):
            if time.perf_counter() - begin > args.budget:
                print(f"{what} {','.join(names[at:])}: not measured, the budget is spent", flush=True)
                break
            rows += wave(args, what, names[at : at + args.at_once + 1], args.out)
        print(f"[{time.perf_counter() - begin:.0f} s]", flush=True)
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        data = {"gpu": gpu, "torch": torch.__version__, "unit": "ms per token or forward", "results": rows}
        (args.out / "fp8_e2e.json").write_text(json.dumps(data, indent=0))


if __name__ == "__main__":
    main()
