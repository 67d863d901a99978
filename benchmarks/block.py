"""Whole mixture-of-experts blocks of transformers: router, routed experts and shared experts, with random weights.

    python benchmarks/block.py --out benchmarks/results/block-h200.json
    python benchmarks/block.py --device cpu --tiny

Every implementation of a point takes turns in shuffled order, correctness first. Microseconds per call: ``us`` of CUDA-graph replays (what
the device does), ``wall_us`` of plain calls one after another (what people see who do not use CUDA graphs).

``hf``: transformers under Inductor; ``serial``: moefuse, shared experts left to Inductor; ``overlap``: moefuse with shared experts beside
the router and the routed ones; ``fused``: the same with ``fuse_router``; each also with CUDA graphs by Inductor (``*_reduce``, like
mode="reduce-overhead"), which have a wall time only. ``experts``, ``shared``: the routed experts and the shared one of ``serial`` alone;
``router``: transformers' router alone under moefuse's backend; ``ub_read``: the chosen experts' and the shared expert's weights read once.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _timing import by_line  # noqa: E402

Call = Callable[[Tensor], Any]
TOKENS = (1, 8, 64, 256, 1024, 4096)
PLAIN = ("hf", "serial", "overlap", "fused")
NAMES = (*PLAIN, *(f"{name}_reduce" for name in PLAIN), "experts", "router", "shared", "ub_read")
NOT_A_BLOCK = ("experts", "router", "ub_read", "shared")


def _qwen3(**sizes: Any) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    given = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768} | sizes
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**given))


def _qwen2moe(**sizes: Any) -> nn.Module:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    given = {"num_experts": 60, "num_experts_per_tok": 4, "hidden_size": 2048, "moe_intermediate_size": 1408}
    given |= {"shared_expert_intermediate_size": 5632} | sizes
    return Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**given))


def _deepseek(**sizes: Any) -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    given = {"n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168, "moe_intermediate_size": 2048, "n_shared_experts": 1}
    return DeepseekV3MoE(DeepseekV3Config(**(given | sizes)))


def _glm4(**sizes: Any) -> nn.Module:
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeMoE

    given = {"n_routed_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096, "moe_intermediate_size": 1408, "n_shared_experts": 1}
    return Glm4MoeMoE(Glm4MoeConfig(**(given | sizes)))


BLOCKS: dict[str, Callable[..., nn.Module]] = {"qwen3": _qwen3, "qwen2moe": _qwen2moe, "deepseek": _deepseek, "glm4": _glm4}
TINY: dict[str, dict[str, int]] = {
    "qwen3": {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32},
    "qwen2moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "deepseek": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4": {"n_routed_experts": 16, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32},
}


def build(name: str, device: str, tiny: bool) -> nn.Module:
    """The block on the device, in bfloat16, with weights of the usual variance."""
    with torch.device("meta"):
        block = BLOCKS[name](**(TINY[name] if tiny else {}))
    block = block.to_empty(device=device).to(torch.bfloat16).eval().requires_grad_(False)
    for each in (*block.parameters(), *block.buffers()):
        each.copy_(
            torch.randn(each.shape, device=device, dtype=torch.bfloat16) / max(each.shape[-1], 1) ** 0.5 if each.dim() > 1 else each.zero_()
        )
    for module in block.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._experts_implementation = "grouped_mm"
    return block


class Router(nn.Module):
    """The block with experts that cost nothing: what is left is the choice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.gate = block.gate

    def forward(self, x: Tensor) -> Any:
        rows = x.view(-1, x.shape[-1])
        for given in (rows, x):
            with contextlib.suppress(IndexError, RuntimeError, TypeError):
                return self.gate(given)  # type: ignore[operator]
        raise TypeError("no router")


def make(name: str, block: nn.Module) -> Call:
    torch._dynamo.reset()
    if name == "shared":
        return torch.compile(getattr(block, "shared_expert", None) or block.shared_experts, dynamic=False)  # type: ignore[arg-type, return-value]
    if name in ("hf", "hf_reduce"):
        return torch.compile(block, dynamic=False, mode="reduce-overhead" if name == "hf_reduce" else None)
    if name == "router":
        return torch.compile(Router(block), dynamic=False, backend="moefuse")
    base, *reduce = name.split("_")
    options: dict[str, Any] = {"overlap": 0 if base == "serial" else 1 << 30, "fuse_router": base == "fused"}
    options |= {"triton.cudagraphs": True} if reduce else {}
    return torch.compile(block, dynamic=False, backend="moefuse", options=options)


def reading(block: nn.Module, tokens: int, top_k: int) -> Call:
    """The weights of as many experts as uniform routing chooses on average, and all that every token reads, once."""
    from read_kernel import read_experts

    routed = list(block.experts.parameters())  # type: ignore[union-attr, operator]
    count, mine = len(routed[0]), {id(p) for p in routed}
    chosen = torch.arange(round(count * (1 - (1 - top_k / count) ** tokens)), dtype=torch.int32, device=routed[0].device)
    always = [p[None] for p in block.parameters() if id(p) not in mine and p.dim() > 1]
    return lambda x: [read_experts(p, chosen) for p in routed] + [read_experts(p, chosen[:1]) for p in always]


class Timed:
    """One implementation at one point: run, checked, captured if it can be."""

    def __init__(self, name: str, call: Call, sets: list[Tensor]) -> None:
        self.name, self.call, self.sets = name, call, sets
        self.us: list[float] = []
        self.wall: list[float] = []
        self.out: Any = None
        for x in (*sets[:1], *sets):
            self.out = call(x)
        self.out = call(sets[0])
        self.out = self.out.clone() if isinstance(self.out, Tensor) else None
        self.graph: torch.cuda.CUDAGraph | None = None
        if sets[0].is_cuda and not name.endswith("reduce"):
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for x in sets:
                    call(x)

    def once(self) -> None:
        if self.graph is not None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            self.us.append(start.elapsed_time(end) * 1000 / len(self.sets))
        if self.sets[0].is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for x in self.sets:
            self.call(x)
        if self.sets[0].is_cuda:
            torch.cuda.synchronize()
        self.wall.append((time.perf_counter() - begin) * 1e6 / len(self.sets))


def exact(block: nn.Module, x: Tensor) -> Tensor:
    """The block in eager with its loop over experts."""
    configs = {id(m.config): m.config for m in block.modules() if hasattr(m, "config")}
    for config in configs.values():
        config._experts_implementation = "eager"
    out: Tensor = block(x)
    for config in configs.values():
        config._experts_implementation = "grouped_mm"
    return out


def measure(name: str, tokens: int, block: nn.Module, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(tokens)
    hidden = next(iter(block.experts.parameters())).shape[-1]  # type: ignore[union-attr, operator]
    top_k = getattr(block, "top_k", None) or getattr(block.gate, "top_k", None) or block.config.num_experts_per_tok  # type: ignore[union-attr]
    device = next(block.parameters()).device
    count = {1: 16, 8: 8, 64: 4}.get(tokens, 2)
    sets = [torch.randn(1, tokens, hidden, device=device).to(torch.bfloat16) for _ in range(count)]
    wanted = exact(block, sets[0]).float()
    timed, rows = [], []
    for each in names:
        row: dict[str, Any] = {"block": name, "T": tokens, "impl": each}
        try:
            call = reading(block, tokens, top_k) if each == "ub_read" else make(each, block)
            if each == "experts":
                call = routed_alone(block, sets, top_k)
            it = Timed(each, call, sets)
            if each not in NOT_A_BLOCK:
                row["error"] = round(float((it.out.float() - wanted).norm() / wanted.norm()), 5)
                if not row["error"] < 0.05:
                    raise RuntimeError(f"error {row['error']}")
            if each in PLAIN[1:]:
                import moefuse

                row["shared"] = [f.shared for f in moefuse.last_report().fused]
            timed.append((it, row))
        except Exception as error:
            rows.append({**row, "failed": str(error).strip().split("\n")[0][:200]})
            print(name, tokens, each, "FAILED", traceback.format_exc(limit=-3)[-600:], flush=True)
    started, order = time.perf_counter(), random.Random(0)
    for turn in range(40):
        if turn >= 9 and time.perf_counter() - started > args.seconds:
            break
        for it, _ in order.sample(timed, len(timed)):
            it.once()
    for it, row in timed:
        row["wall_us"] = round(statistics.median(it.wall[1:]), 1)
        if it.us:
            row["us"] = round(statistics.median(it.us[1:]), 2)
        rows.append(row)
    return rows


def routed_alone(block: nn.Module, sets: list[Tensor], top_k: int) -> Call:
    """The routed experts' op on the block's weights, with uniform routing."""
    params = dict(block.experts.named_parameters())  # type: ignore[union-attr, operator]
    w_in, w_out = params["gate_up_proj"], params["down_proj"]
    chosen = {}
    for x in sets:
        weights, ids = torch.rand(x.shape[1], len(w_in), device=x.device).topk(top_k, -1)
        chosen[x.data_ptr()] = ids, weights.to(x.dtype)
    import moefuse.ops  # noqa: F401

    op = torch.ops.moefuse.experts
    return lambda x: op(x.view(-1, x.shape[-1]), *chosen[x.data_ptr()], [w_in], [], [w_out], [], [], [], activation="silu", gating="merged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default=",".join(BLOCKS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--budget", type=float, default=500)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from layer import environment

    if args.device == "cpu":
        from moefuse.passes.block import shared_experts

        shared_experts.DEVICES.add("cpu")
        data: dict[str, Any] = {"results": []}
    else:
        data = {**environment(args.commit), "results": []}
    begin = time.perf_counter()
    with torch.no_grad():
        for name in args.blocks.split(","):
            block = build(name, args.device, args.tiny)
            for tokens in map(int, args.tokens.split(",")):
                if time.perf_counter() - begin > args.budget:
                    break
                found = measure(name, tokens, block, args.only.split(","), args)
                data["results"] += found
                show(found)
                if args.out:
                    args.out.write_text(by_line({k: v for k, v in data.items() if k != "results"}, "results", data["results"]))
            del block
            if args.device == "cuda":
                torch.cuda.empty_cache()


def show(rows: list[dict[str, Any]]) -> None:
    text = "  ".join(f"{r['impl']} {r.get('us', 0):.1f}/{r['wall_us']:.1f}" for r in rows if "wall_us" in r)
    shared = next((r["shared"] for r in rows if r["impl"] == "overlap" and "shared" in r), None)
    print(f"{rows[0]['block']:9} {rows[0]['T']:5}  {text}  joined {shared}", flush=True)


if __name__ == "__main__":
    main()
