"""A mixture-of-experts language model, trained and run through ``torch.compile(backend="moefuse")`` on a CPU in a few minutes.

    python examples/demo.py

1. Trains a small Qwen3-MoE (transformers' own class, unmodified) on the sources of Python's standard library, byte by byte.
2. Generates from it in eager mode and compiled, and checks that the tokens agree.
3. Prints what was fused, and the time and memory of one forward beside transformers' own implementations; draws the times to demo.svg.
"""

from __future__ import annotations

import os
import platform

# OpenMP threads that wait sleep instead of spinning: on a machine with other work, that is the difference between seconds and minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import contextlib
import html
import json
import logging
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse

STEPS, BATCH, LENGTH = 800, 8, 128
PROMPT = "    def __init__(self, name, value):\n        self."
TOKEN_COUNTS = (1, 16, 128, 1024)
PICTURE = Path("demo.svg")
EAGER, GROUPED, BATCHED, OURS = "eager loop", "grouped_mm + inductor", "batched_mm + inductor", "moefuse"


def build_model() -> Qwen3MoeForCausalLM:
    """Two layers of 32 experts, four of them per token: 1.7 million parameters."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
        max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def read_corpus(limit: int = 4_000_000) -> Tensor:
    """Bytes of the standard library's modules, in a fixed order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(model: Qwen3MoeForCausalLM, corpus: Tensor) -> tuple[float, float]:
    """Mean loss over the first and the last ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    model.train()
    bar: Any = None
    print("compiling ..", flush=True)
    for _ in range(STEPS):
        starts = torch.randint(0, corpus.numel() - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([corpus[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        # The first step compiles: how long it took says nothing about the others.
        bar = tqdm(desc="training", total=STEPS, initial=0, unit="step", mininterval=0.5) if bar is None else bar
        bar.update()
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    bar.close()
    model.eval()
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def eager_copy(model: Qwen3MoeForCausalLM, implementation: str) -> Qwen3MoeForCausalLM:
    """The same weights in a fresh, not compiled model that uses one of transformers' own implementations."""
    clone = build_model().eval()
    clone.load_state_dict(model.state_dict())
    clone.set_experts_implementation(implementation)
    return clone


def generate(model: Qwen3MoeForCausalLM, count: int = 96) -> list[int]:
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, repetition_penalty=1.2, use_cache=False, pad_token_id=0)
    return out[0].tolist()


def paired_medians(calls: dict[str, Callable[[], object]], seconds: float = 1.5) -> dict[str, float]:
    """Milliseconds per call: the candidates take turns, so that a slow moment hits all of them."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[OURS]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(values) for name, values in times.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The profiler's C++ code tells standard error that it starts and stops, whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def peak_megabytes(call: Callable[[], object]) -> float:
    """Largest amount of memory that is allocated for tensors at one moment of a call, from the profiler's allocation events."""
    with quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    del result
    now = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak / 1e6


def machine() -> str:
    """The model, where it ran, and when."""
    cpu = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    )
    here = f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"Qwen3-MoE, 2 layers of 32 experts, 1.7 M parameters, float32; {here}, {time.strftime('%Y-%m-%d')}"


def picture(times: dict[int, dict[str, float]], where: str) -> str:
    """For each number of tokens, how many times as fast as transformers' eager loop each implementation is."""
    colors = dict(zip((EAGER, GROUPED, BATCHED, OURS), ("#bbb", "#8ab", "#9b8", "#1f6fb4"), strict=True))
    bars = [(count, name, ms[EAGER] / ms[name]) for count, ms in times.items() for name in colors]
    unit = 380 / max(ratio for *_, ratio in bars)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{72 + 24 * len(bars)}" font-family="sans-serif" font-size="13">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out.append('<text x="12" y="22" font-weight="bold">One forward: times as fast as the eager loop</text>')
    out.append(f'<text x="12" y="42" fill="#555" font-size="11">{html.escape(where)}</text>')
    for i, (count, name, ratio) in enumerate(bars):
        y = 58 + 24 * i
        out.append(f'<text x="290" y="{y + 14}" text-anchor="end">{count} token{"s" * (count > 1)}, {name}</text>')
        out.append(f'<rect x="300" y="{y}" width="{ratio * unit:.0f}" height="18" fill="{colors[name]}"/>')
        out.append(f'<text x="{306 + ratio * unit:.0f}" y="{y + 14}">{ratio:.1f}x</text>')
    return "\n".join([*out, "</svg>\n"])


def in_words(times: dict[int, dict[str, float]]) -> str:
    """What the table says, for somebody who reads one line of it."""
    ms = times[TOKEN_COUNTS[-1]]
    best = min((GROUPED, BATCHED), key=lambda name: ms[name])
    return (
        f"In short: with {TOKEN_COUNTS[-1]} tokens the model runs {ms[EAGER] / ms[OURS]:.1f}x as fast as in eager mode, "
        f"and {ms[best] / ms[OURS]:.1f}x as fast as transformers' fastest implementation under Inductor ({best.partition(' ')[0]})."
    )


def compare(trained: Qwen3MoeForCausalLM) -> dict[int, dict[str, float]]:
    """Milliseconds of one forward of the whole model, by number of tokens and implementation; printed with its memory."""
    models: dict[str, Any] = {
        EAGER: eager_copy(trained, "eager"),
        GROUPED: torch.compile(eager_copy(trained, "grouped_mm")),
        BATCHED: torch.compile(eager_copy(trained, "batched_mm")),
        OURS: trained,
    }
    print(f"\n{'one forward':24s}" + "".join(f"{f'{count} tokens':>22s}" for count in TOKEN_COUNTS))
    generator = torch.Generator().manual_seed(1)
    rows: dict[str, list[str]] = {name: [] for name in models}
    measured: dict[int, dict[str, float]] = {}
    with torch.no_grad():
        for count in TOKEN_COUNTS:
            ids = torch.randint(32, 127, (1, count), generator=generator)
            calls = {name: (lambda m=model, ids=ids: m(input_ids=ids, use_cache=False).logits) for name, model in models.items()}
            measured[count] = times = paired_medians(calls)
            for name, call in calls.items():
                rows[name].append(f"{times[name]:9.2f} ms {peak_megabytes(call):6.1f} MB")
    for name, cells in rows.items():
        print(f"{name:24s}" + "".join(f"{cell:>22s}" for cell in cells))
    print("time: median of alternating runs; memory: peak of tensor allocations during the call (profiler), weights not counted")
    return measured


def main() -> int:
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64  # the models compared below are one class: Dynamo counts their graphs together
    logging.getLogger("transformers").setLevel(logging.ERROR)
    started = time.perf_counter()
    model, corpus = build_model(), read_corpus()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {corpus.numel() / 1e6:.1f} MB of Python sources")

    model.compile(backend="moefuse")
    first, last = train(model, corpus)
    print(f"loss {first:.3f} -> {last:.3f}")

    expected, got = generate(eager_copy(model, "eager")), generate(model)
    print(f"\n--- generated by the compiled model ---\n{bytes(got).decode(errors='replace')}\n---")
    agree = sum(a == b for a, b in zip(expected, got, strict=True))
    print(f"{agree} of {len(got)} tokens equal to eager mode")

    report = moefuse.last_report()
    print(f"\n{report}")
    fused = len(report.fused) if report else 0
    times = compare(model)
    PICTURE.write_text(picture(times, machine()))
    print(f"\n{in_words(times)}\nThe same as a picture: {PICTURE}")
    print(f"\n{time.perf_counter() - started:.0f} s in total")

    problems = []
    if agree != len(got):
        problems.append("compiled and eager tokens differ")
    if fused != model.config.num_hidden_layers:
        problems.append(f"{fused} of {model.config.num_hidden_layers} layers were fused")
    if last > first - 1.0:
        problems.append("the loss did not fall")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
