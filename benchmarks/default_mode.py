"""Whole models as people run them: ``torch.compile(model, backend=...)`` in default mode, launched and not in a CUDA graph.

    python benchmarks/default_mode.py --layers 24 --tokens 512 4096 --out benchmarks/results/default-mode-h200.json
    python benchmarks/default_mode.py --device cpu --tiny --tokens 8 --train

Qwen3-30B-A3B with random weights and fewer layers, one prefill of so many tokens (or one training step: forward, backward, no optimizer).
Per backend and number of tokens: milliseconds of a call that somebody waits for (``call``), of each of many calls in a row (``row``), of
the host alone until a call returns (``host``), and of the device's kernels (``device``, their sum in a profile). Where ``row`` is ``host``
the host decides, where it is ``device`` the device does. ``experts`` is how many experts a layer's tokens reach on average: a random model
sends all tokens to few, ``--spread`` gives its tokens hidden states as far from each other as those of a trained one.
Backends are processes of their own that stay, and take turns (``--turns``): a host is faster in one minute than in the next. The median
of the turns counts; ``ratio`` is the first backend's ``row`` to each one's, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def build(device: str, layers: int, tiny: bool, spread: bool) -> Any:
    from decode import build

    model = build(device, tiny, layers)
    torch.set_default_dtype(torch.float32)
    if spread:
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_()
    return model


def reached(model: Any, ids: torch.Tensor) -> float:
    """Experts that a layer's tokens reach, on average over the layers."""
    counts: list[int] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _, __, out: counts.append(len(torch.unique(out[-1])))) for gate in gates]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return sum(counts) / len(counts)


def step_of(model: Any, ids: torch.Tensor, train: bool) -> Callable[[], Any]:
    def prefill() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    def step() -> Any:
        for p in model.parameters():
            p.grad = None
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    return step if train else prefill


def measured(step: Callable[[], Any], cuda: bool, calls: int) -> dict[str, float]:
    sync = torch.cuda.synchronize if cuda else lambda: None
    whole, host = [], []
    for _ in range(2):
        step()
    for _ in range(calls):
        sync()
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        sync()
        whole.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    sync()
    row = (time.perf_counter() - begin) / calls
    return {"call": median(whole) * 1e3, "row": row * 1e3, "host": median(host) * 1e3}


def device_time(step: Callable[[], Any]) -> float:
    """Milliseconds of all kernels of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in prof.key_averages()) / 3e3


def child(args: argparse.Namespace) -> None:
    """Answers each line of standard input: "compile T", "turn" or "end"."""
    import moefuse.backend  # noqa: F401

    cuda = args.device == "cuda"
    model = build(args.device, args.layers, args.tiny, args.spread).train(args.train)
    model.set_experts_implementation("grouped_mm" if cuda else "eager")
    step: Callable[[], Any] = dict
    for line in sys.stdin:
        what, *rest = line.split()
        if what == "compile":
            torch._dynamo.reset()
            drawn = torch.Generator(args.device).manual_seed(1)
            ids = torch.randint(0, model.config.vocab_size, (1, int(rest[0])), device=args.device, generator=drawn)
            made = model if args.child == "eager" else torch.compile(model, backend=args.child)
            step = step_of(made, ids, args.train)
            begin = time.perf_counter()
            first = step().detach().float()
            row = {"first": time.perf_counter() - begin, "experts": reached(model, ids), "mean": float(first.abs().mean())}
            for _ in range(3):
                step()
            row |= {"device": device_time(step)} if cuda else {}
            if args.profile:
                from _profile import where

                print(where(step, args.profile), file=sys.stderr, flush=True)
        elif what == "turn":
            row = measured(step, cuda, args.calls)
        else:
            return
        print("row", json.dumps(row), flush=True)


class Child:
    """A backend's process."""

    def __init__(self, backend: str) -> None:
        command = [sys.executable, *sys.argv, "--child", backend]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        for answer in self.process.stdout:
            if answer.startswith("row "):
                row: dict[str, float] = json.loads(answer[4:])
                return row
        raise RuntimeError(f"{self.process.args} has ended")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 1024, 4096])
    parser.add_argument("--backends", nargs="+", default=["inductor", "moefuse"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--profile", type=int, default=0, help="so many lines of where the host is")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    children = {backend: Child(backend) for backend in args.backends}
    rows = []
    for tokens in args.tokens:
        known = {backend: {"backend": backend, "tokens": tokens} | it.ask(f"compile {tokens}") for backend, it in children.items()}
        turns: dict[str, list[dict[str, float]]] = {backend: [] for backend in children}
        for _ in range(args.turns):
            for backend, it in children.items():
                turns[backend].append(it.ask("turn"))
        for backend, each in turns.items():
            ratios = [base["row"] / own["row"] for base, own in zip(turns[args.backends[0]], each, strict=True)]
            rows.append(known[backend] | {name: median(turn[name] for turn in each) for name in each[0]} | {"ratio": median(ratios)})
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    for it in children.values():
        print("end", file=it.process.stdin, flush=True)
    if args.out:
        from _timing import by_line, environment

        settings = {"layers": args.layers, "train": args.train, "spread": args.spread, "unit": "ms"}
        args.out.write_text(by_line(environment() | settings, "rows", rows))


if __name__ == "__main__":
    main()
