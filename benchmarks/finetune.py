"""A fine-tuning step: forward, backward and AdamW of a few layers of the Qwen3-30B-A3B shape, in the ways people run it.

    python benchmarks/finetune.py --out benchmarks/results/finetune-h200.json
    python benchmarks/finetune.py --device cpu --tiny          # smoke test

``full`` trains all weights, ``lora`` rank-16 adapters on attention and experts (PEFT's ``target_parameters``); weights in bfloat16, or in
float32 under ``autocast``; with and without activation checkpoints. Implementations: ``eager`` is transformers' loop, ``grouped_mm`` its
default, also under Inductor; ``moefuse`` compiles the default and ``eager + moefuse`` the loop. Each is checked against float32 first
(loss, norm of the gradients). Two models with their optimizers do not fit into one GPU's memory, so implementations run one after the
other, and the first one again at the end, which shows how much the machine has drifted. A step is timed as a few in a row, as a training
loop runs them: nothing waits for the device between steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _timing import by_line, environment, in_a_row, summary  # noqa: E402

import moefuse  # noqa: E402

IMPLS = ("eager", "grouped_mm", "grouped_mm + inductor", "moefuse")
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
FULL = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32}
RANK = 16
IN_A_ROW = 4


@dataclass(frozen=True)
class Case:
    """One row of the table; ``tokens`` of one sequence."""

    train: str
    weights: str
    checkpoints: bool
    tokens: int


def base(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    """The layers, and a small vocabulary around them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **(TINY if args.tiny else FULL), num_hidden_layers=args.layers, num_key_value_heads=4, head_dim=16 if args.tiny else 128,
        vocab_size=1024, norm_topk_prob=True, mlp_only_layers=[], use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(args.device):
            return Qwen3MoeForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def adapted(model: nn.Module) -> nn.Module:
    """With adapters whose B is not zero, so that every gradient counts."""
    import peft

    found = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    made = peft.get_peft_model(model, found)
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return made


class Step:
    """One way to run a case: forward, backward, optimizer."""

    def __init__(self, args: argparse.Namespace, case: Case, impl: str, exact: bool = False) -> None:
        wide = exact or case.weights == "autocast"
        model: Any = base(args, torch.float32 if wide else torch.bfloat16)
        model.set_experts_implementation("eager" if impl.startswith("eager") else "grouped_mm")
        if case.checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = adapted(model).train() if case.train == "lora" else model
        self.autocast = case.weights == "autocast" and not exact
        self.device = args.device
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=args.device == "cuda")
        self.run: Any = self.model
        if impl == "grouped_mm + inductor":
            self.run = torch.compile(self.model)
        elif impl.endswith("moefuse"):
            self.run = torch.compile(self.model, backend="moefuse")

    def loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            found: Tensor = self.run(input_ids=ids, labels=ids).loss
        return found

    def __call__(self, ids: Tensor) -> None:
        self.loss(ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self, ids: Tensor) -> tuple[float, float]:
        """(loss, norm of all gradients), of the weights as they are."""
        loss = self.loss(ids)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for values in itertools.product(args.train, args.weights, args.checkpoints, args.tokens):
        yield Case(values[0], values[1], values[2] == "on", values[3])


def compared(args: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """All implementations of a case: what is wrong with each, memory and times."""
    ids = torch.randint(1024, (1, case.tokens), generator=torch.Generator().manual_seed(3)).to(args.device)
    exact = Step(args, case, "grouped_mm", exact=True).measured(ids)
    rows = []
    for number, impl in enumerate([*args.impls, args.impls[0]]):
        torch._dynamo.reset()
        _free()
        row: dict[str, Any] = {**vars(case), "impl": impl, "again": number == len(args.impls)}
        try:
            row |= measured(args, case, impl, ids, exact)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        except Exception as error:  # another library's; the table has to go on
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        rows.append(row)
        print({k: v for k, v in row.items() if k != "us"} | {"ms": round(row.get("us", {}).get("median", 0) / 1e3, 2)}, flush=True)
    return rows


def measured(args: argparse.Namespace, case: Case, impl: str, ids: Tensor, exact: tuple[float, float]) -> dict[str, Any]:
    """One row."""
    step = Step(args, case, impl)
    errors = [abs(mine - true) / abs(true) for mine, true in zip(step.measured(ids), exact, strict=True)]
    for _ in range(3):
        step(ids)
    _free()
    step(ids)
    peak = _peak()
    times = summary([in_a_row(functools.partial(step, ids), IN_A_ROW, args.device) for _ in range(args.rounds)])
    report = moefuse.last_report() if impl.endswith("moefuse") else None
    return {
        "loss_error": errors[0], "norm_error": errors[1], "peak_gib": peak, "us": times,
        "tokens_per_second": case.tokens / times["median"] * 1e6, "fused": len(report.fused) if report is not None else 0,
    }  # fmt: skip


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--train", nargs="*", default=["full", "lora"])
    parser.add_argument("--weights", nargs="*", default=["bfloat16", "autocast"])
    parser.add_argument("--checkpoints", nargs="*", default=["off", "on"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--impls", nargs="*", default=list(IMPLS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases(args):
        rows += [{"layers": args.layers, **row} for row in compared(args, case)]
        if args.out is not None:
            args.out.write_text(by_line(environment(), "results", rows))


if __name__ == "__main__":
    main()
