"""One mixture-of-experts block of transformers on the CPU: moefuse beside transformers' own implementations.

    python benchmarks/layer_cpu.py --out benchmarks/results/layer-cpu.json
    python benchmarks/layer_cpu.py --shapes qwen3 --tokens 1,64 --rounds 30
    python benchmarks/layer_cpu.py --train --tokens 512,1024 --out benchmarks/results/layer-cpu-train.json

Every candidate is the same unmodified block (router included) with the same weights. Results are compared with a double-precision loop
before anything is timed. A ratio above 1 means that moefuse is faster.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from _timing import by_line, environment, interleaved, paired_ratio, summary
from torch import Tensor, nn

# Real layers with the feature sizes divided by four to eight, so that the weights of one stay near 100 MB.
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"block": ("mixtral", "MixtralSparseMoeBlock"), "experts": 8, "top_k": 2, "hidden": 512, "intermediate": 1792},
    "qwen3": {"block": ("qwen3_moe", "Qwen3MoeSparseMoeBlock"), "experts": 128, "top_k": 8, "hidden": 512, "intermediate": 192},
    "olmoe": {"block": ("olmoe", "OlmoeSparseMoeBlock"), "experts": 64, "top_k": 8, "hidden": 512, "intermediate": 256},
    "tiny": {"block": ("qwen3_moe", "Qwen3MoeSparseMoeBlock"), "experts": 32, "top_k": 4, "hidden": 128, "intermediate": 64},
}
EAGER, GROUPED, BATCHED, OURS = "eager loop", "grouped_mm + inductor", "batched_mm + inductor", "moefuse"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_block(shape: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The family's block with random weights."""
    family, name = shape["block"]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    block_class = getattr(module, name)
    config_class = next(cls for key, cls in vars(module).items() if key.endswith("Config") and key.lower().startswith(family[:5]))
    width = {"moe_intermediate_size": shape["intermediate"], "intermediate_size": shape["intermediate"]}
    count = {"num_experts": shape["experts"], "num_local_experts": shape["experts"], "num_experts_per_tok": shape["top_k"]}
    known = set(vars(config_class()))
    config = config_class(**{k: v for k, v in (width | count | {"hidden_size": shape["hidden"]}).items() if k in known})
    config._experts_implementation = "grouped_mm"
    block: nn.Module = block_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return block.to(dtype).eval()


def with_implementation(block: nn.Module, implementation: str) -> nn.Module:
    """The same parameters under another experts implementation."""
    shared = {id(parameter): parameter for parameter in block.parameters()}
    clone = copy.deepcopy(block, shared)
    for module in clone.modules():
        if hasattr(module, "config"):
            module.config = copy.copy(module.config)
            module.config._experts_implementation = implementation
    return clone


def candidates(block: nn.Module) -> dict[str, Any]:
    """Name -> callable. moefuse gets the block in its default implementation, as a user would hand it over."""
    return {
        EAGER: with_implementation(block, "eager"),
        GROUPED: torch.compile(with_implementation(block, "grouped_mm"), backend="inductor", dynamic=False),
        BATCHED: torch.compile(with_implementation(block, "batched_mm"), backend="inductor", dynamic=False),
        OURS: torch.compile(with_implementation(block, "grouped_mm"), backend="moefuse", dynamic=False),
    }


def output(call: Any, x: Tensor) -> Tensor:
    result = call(x)
    return result[0] if isinstance(result, tuple) else result


def check(calls: dict[str, Any], block: nn.Module, x: Tensor) -> dict[str, float]:
    """Error of each candidate against double precision, relative to the size of the output; raises if moefuse is off or fused nothing."""
    import moefuse

    exact = output(copy.deepcopy(with_implementation(block, "eager")).double(), x.double())
    errors = {name: float((output(call, x).double() - exact).norm() / exact.norm()) for name, call in calls.items()}
    limit = 2 * max(error for name, error in errors.items() if name != OURS) + 4 * torch.finfo(x.dtype).eps
    if errors[OURS] > limit:
        raise SystemExit(f"moefuse's error {errors[OURS]:.3g} is above {limit:.3g}; nothing is timed on a wrong result")
    report = moefuse.last_report()
    if report is None or len(report.fused) != 1:
        raise SystemExit(f"moefuse fused nothing: {report}")
    return errors


def step(call: Any, x: Tensor, pull: Tensor) -> None:
    """Forward and backward; gradients replace those of the step before."""
    for t in (x, *call.parameters()):
        t.grad = None
    output(call, x).backward(pull)


def check_gradients(calls: dict[str, Any], block: nn.Module, x: Tensor, pull: Tensor) -> None:
    """As :func:`check`, for the gradients of the input and of every parameter together."""
    double = copy.deepcopy(with_implementation(block, "eager")).double()
    exact_x = x.detach().double().requires_grad_()
    step(double, exact_x, pull.double())
    exact = [exact_x.grad, *(p.grad for p in double.parameters())]
    errors = {}
    for name, call in calls.items():
        step(call, x, pull)
        got = [x.grad, *(p.grad for p in call.parameters())]
        errors[name] = max(
            float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True) if g is not None and e is not None
        )
    limit = 2 * max(error for name, error in errors.items() if name != OURS) + 4 * torch.finfo(x.dtype).eps
    if errors[OURS] > limit:
        raise SystemExit(f"moefuse's gradients are off by {errors[OURS]:.3g}, above {limit:.3g}; nothing is timed on a wrong result")


def measure(shape_name: str, dtype_name: str, tokens: int, rounds: int, budget_s: float, train: bool) -> dict[str, Any]:
    """All candidates at one size."""
    torch._dynamo.reset()
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    block = make_block(shape, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, shape["hidden"], generator=generator).to(dtype)
    pull = torch.randn(x.shape, generator=generator).to(dtype)
    with torch.inference_mode(not train):
        calls = candidates(block)
        if train:
            del calls[BATCHED]  # gathers a copy of the weights for each slot, forward and backward
            x.requires_grad_()
        errors = check(calls, block, x)
        if train:
            check_gradients(calls, block, x, pull)
        timed = {name: (lambda c=call: step(c, x, pull)) if train else (lambda c=call: c(x)) for name, call in calls.items()}
        times = interleaved(timed, rounds=rounds, budget_s=budget_s)
    best = min((name for name in times if name != OURS), key=lambda name: summary(times[name])["median"])
    return {
        "shape": shape_name, "dtype": dtype_name, "tokens": tokens,
        "sizes": {key: shape[key] for key in ("experts", "hidden", "intermediate", "top_k")},
        "ms": {name: summary(values) for name, values in times.items()},
        "error": errors,
        "best_other": best,
        "ratio": {name: paired_ratio(values, times[OURS]) for name, values in times.items() if name != OURS},
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    medians = "  ".join(f"{row['ms'][name]['median']:9.3f}" if name in row["ms"] else " " * 9 for name in (EAGER, GROUPED, BATCHED, OURS))
    best, eager = row["ratio"][row["best_other"]], row["ratio"][EAGER]
    print(
        f"{row['shape']:8s} {row['dtype']:9s} {row['tokens']:5d}  {medians}   "
        f"{best['median']:5.2f}x [{best['p25']:.2f}, {best['p75']:.2f}] {row['best_other']:22s} {eager['median']:6.2f}x eager",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of timing per row (at least five rounds)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if args.threads:
        torch.set_num_threads(args.threads)
    what = "forward and backward" if args.train else "forward"
    print(f"milliseconds per {what} (median), and the paired ratio with its quartiles")
    print(f"{'shape':8s} {'dtype':9s} {'T':>5s}  {EAGER:>9.9s}  {'grouped':>9s}  {'batched':>9s}  {OURS:>9s}   against the best other")
    rows = []
    for shape in args.shapes.split(","):
        for dtype in args.dtypes.split(","):
            for tokens in args.tokens.split(","):
                rows.append(measure(shape, dtype, int(tokens), args.rounds, args.budget, args.train))
                show(rows[-1])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(by_line(environment() | {"unit": f"ms per {what}"}, "rows", rows))


if __name__ == "__main__":
    main()
