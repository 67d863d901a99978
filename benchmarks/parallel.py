"""Experts on several GPUs against experts on each of them: one layer, a training step, and whole models.

    torchrun --nproc-per-node 2 benchmarks/parallel.py layer train --out benchmarks/results/parallel-h200x2.json
    torchrun --nproc-per-node 2 benchmarks/parallel.py layer train --device cpu --tiny     # smoke test

``layer``: Qwen3-30B-A3B's block (128 experts, 8 a token), T tokens on each rank, outputs checked against the block with all experts; times
of CUDA graphs, all implementations in turns. ``replicated``: every rank has all experts, and nothing travels. ``train``: forward, backward
and fused AdamW of a few layers; ``fsdp``: FSDP2 shards everything and gathers experts layer by layer, once more in backward unless they are
``kept``; ``fsdp+ep``: FSDP2 for the rest, on the same mesh, experts by ``moefuse.parallelize``; ``one group``: the rest is gathered at
once; memory per rank, the share of a step in which no kernel runs (``idle``), and that in which none runs but those that communicate
(``no_work``). ``model``: 16 layers of Qwen3-30B-A3B, prefill and decode by transformers' ``generate`` with a static cache, each rank with a
batch of its own. ``hf all_to_all``: transformers' own expert parallelism, which waits for the host, on its grouped products, eager and
under Inductor; transformers before 5.20 has none, and a line says so. ``+ inductor``: layers under Inductor, without moefuse. All ways to
train have to agree in losses and in gradients of experts. Figures are the slowest rank's.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _profile import kernels, where  # noqa: E402
from _ranks import PER_GRAPH, head, in_turns, leave, say, start, summary, told  # noqa: E402
from _timing import by_line, captured  # noqa: E402

import moefuse  # noqa: E402

TOKENS = (1, 8, 64, 512, 4096)
FULL = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768}
WAITS = ("all_to_all",)
"""Transports that wait for the host, so that there is no CUDA graph of them."""
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "moe_intermediate_size": 32}


def block(tiny: bool, device: torch.device) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(**(TINY if tiny else FULL))
    config._experts_implementation = "grouped_mm"  # as transformers sets it for a whole model
    torch.manual_seed(0)
    with device:
        made: nn.Module = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    return made.eval()


@torch.no_grad()
def layers(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[dict[str, Any]]:
    """The block at each number of tokens, spread and replicated."""
    whole = block(args.tiny, device)
    width = (TINY if args.tiny else FULL)["hidden_size"]
    results = []
    for tokens in args.tokens:
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        x = torch.randn(1, tokens, width, generator=generator).to(device, next(whole.parameters()).dtype)
        wanted = whole(x)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        calls: dict[str, Callable[[], object]] = {}
        for name in ("replicated", *args.transports):
            with told(f"{name} {tokens}"):
                torch._dynamo.reset()
                model = copy.deepcopy(whole)
                if name != "replicated":
                    moefuse.parallelize(model, mesh, max_tokens=tokens, transport=name)
                run = torch.compile(model, backend="moefuse", dynamic=False, options={"strict": True})
                out = run(x)
                out = out[0] if isinstance(out, tuple) else out
                error = ((out - wanted).float().norm() / wanted.float().norm()).item()
                assert error < 0.02, f"{name}: {error}"
                calls[name] = _graphed(run, x) if device.type == "cuda" and name not in WAITS else functools.partial(run, x)
                calls[f"{name}, launched"] = functools.partial(run, x)
                if args.profile:
                    lines = where(calls[f"{name}, launched"], args.profile)
                    say(f"{name} {tokens}\n{lines}")
        with told("hf all_to_all"):
            theirs = copy.deepcopy(whole)
            transformers_own(theirs, mesh, device)
            out = theirs(x)
            out = out[0] if isinstance(out, tuple) else out
            assert ((out - wanted).float().norm() / wanted.float().norm()).item() < 0.02
            calls["hf all_to_all, launched"] = functools.partial(theirs, x)
            torch._dynamo.reset()
            faster = torch.compile(theirs)
            faster(x)
            calls["hf all_to_all + inductor, launched"] = functools.partial(faster, x)
        graphs = device.type == "cuda"
        candidates = {n: (c, PER_GRAPH if graphs and n not in WAITS and "launched" not in n else 1) for n, c in calls.items()}
        times = in_turns(candidates, rounds=args.rounds)
        for name, found in times.items():
            ratio = summary([a / b for a, b in zip(times["replicated"], found, strict=True)])
            results.append({"what": "layer", "T": tokens, "impl": name, "us": summary(found), "over_replicated": ratio["median"]})
        say(tokens, {n: f"{summary(t)['median']:.1f} us" for n, t in times.items()})
        del calls, model, run
        gc.collect()
    return results


def transformers_own(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> set[nn.Parameter]:
    """Leave this rank's experts, which are returned, and put transformers' all-to-all (from 5.20 on) around them."""
    from transformers.distributed.expert_parallel import AllToAllEP

    world, found = mesh.size(), set()
    alone = init_device_mesh(device.type, (world, 1), mesh_dim_names=("all", "one"))["one"]

    def spread(experts: Any) -> None:
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(world)[mesh.get_local_rank()].clone()))
        experts.num_experts, experts._is_expert_parallel = experts.num_experts // world, True
        experts.config._experts_implementation = "grouped_mm"
        exchange = AllToAllEP(experts, mesh, alone)
        experts.forward = lambda x, ids, weights: exchange(x, ids, weights).to(x.dtype)
        found.update(experts.parameters())

    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            spread(module)
    return found


@torch.no_grad()
def models(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[dict[str, Any]]:
    """Prefill and decode; every rank has ``batch`` sequences of its own."""
    from transformers import CompileConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**(TINY if args.tiny else FULL), "num_hidden_layers": args.layers, "norm_topk_prob": True, "mlp_only_layers": []}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    full = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    config = Qwen3MoeConfig(**sizes, **(heads | {"vocab_size": 512} if args.tiny else full))
    results = []
    for name in ("replicated", *args.transports):
        torch.manual_seed(0)
        torch._dynamo.reset()
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        with device:
            model = Qwen3MoeForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        model.set_experts_implementation("grouped_mm")
        if name != "replicated":
            moefuse.parallelize(model, mesh, max_tokens="equal", transport=name)
        held = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        say(name, "made", held)
        with told(f"prefill {name}"):
            run = torch.compile(model, backend="moefuse", dynamic=False, options={"verify": "off"})
            for tokens in args.prefill:
                ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
                call = functools.partial(run, ids, use_cache=False, logits_to_keep=1)
                found = summary(in_turns({name: (call, 1)}, rounds=5, repeats=3)[name])
                results.append({"what": "prefill", "impl": name, "tokens": tokens, "us": found, "held_gib": held})
                say(results[-1])
        settings = {"cache_implementation": "static", "compile_config": CompileConfig(backend="moefuse", fullgraph=False)}
        for batch in args.batch:
            with told(f"decode {name} {batch}"):
                torch._dynamo.reset()
                ids = torch.randint(0, config.vocab_size, (batch, 32), device=device)

                def generate(count: int, ids: Tensor = ids, model: Any = model, settings: dict[str, Any] = settings) -> float:
                    dist.barrier()
                    begin = time.perf_counter()
                    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **settings)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    return time.perf_counter() - begin

                generate(48)
                generate(48)
                deltas = torch.tensor([generate(48) - generate(4) for _ in range(3)], device=device)
                dist.all_reduce(deltas, dist.ReduceOp.MAX)
                results.append({"what": "decode", "impl": name, "batch": batch, "us_per_token": deltas.median().item() / 44 * 1e6})
                say(results[-1])
        del model
        gc.collect()
    return results


def _graphed(run: Callable[..., object], x: Tensor) -> Callable[[], object]:
    return captured(lambda: run(x), PER_GRAPH)


class Decoder(nn.Module):
    """A few layers of the Qwen3-MoE shape: attention, norms, experts."""

    def __init__(self, tiny: bool, count: int, device: torch.device) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

        sizes = {**(TINY if tiny else FULL), "num_hidden_layers": count, "vocab_size": 1024, "intermediate_size": 64, "mlp_only_layers": []}
        heads = (
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} if tiny else {"num_attention_heads": 32, "head_dim": 128}
        )
        config = Qwen3MoeConfig(**sizes, **heads)
        torch.manual_seed(0)
        with device:
            self.model = Qwen3MoeModel(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return out


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[dict[str, Any]]:
    """A training step; states of experts and the peak of memory."""
    results, times, agreed = [], {}, None
    ours, theirs = [f"fsdp+ep{groups}, {way}" for way in args.transports for groups in ("", ", one group")], "fsdp+hf all_to_all"
    for name in ("fsdp", "fsdp, kept", "fsdp + inductor", *ours, theirs, f"{theirs} + inductor", f"{theirs}, one group + inductor"):
        with told(name):
            torch._dynamo.reset()
            gc.collect()
            model = Decoder(args.tiny, args.layers, device)
            experts: set[nn.Parameter] = set()
            if name.startswith("fsdp+ep"):
                moefuse.parallelize(model, mesh, max_tokens="equal", transport=name.rpartition(" ")[2])
                experts = {p for p in model.parameters() if isinstance(p, DTensor)}
            elif name.startswith(theirs):
                experts = transformers_own(model, mesh, device)
                for parameter in experts:  # a sum over the tokens of all ranks, where FSDP takes the mean
                    parameter.register_post_accumulate_grad_hook(_mean)
            for layer in () if "one group" in name else model.model.layers:
                fully_shard(layer, mesh=mesh, ignored_params=experts & set(layer.parameters()), reshard_after_forward="kept" not in name)
            fully_shard(model, mesh=mesh, ignored_params=experts)
            backend = "inductor" if name.endswith("inductor") else "eager" if name == theirs else "moefuse"
            if backend != "eager":
                for layer in model.model.layers:
                    layer.compile(backend=backend)
            # fused AdamW takes no plain Parameters beside DTensors
            groups = [{"params": [p for p in model.parameters() if isinstance(p, DTensor) == kind]} for kind in (True, False)]
            optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4, fused=device.type == "cuda")
            ids = torch.randint(0, 1024, (1, args.sequence), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
            losses = []

            def step(model: nn.Module = model, optimizer: Any = optimizer, ids: Tensor = ids, losses: list[Tensor] = losses) -> None:
                loss = model(ids).float().sub(1).square().mean()  # not to zero: of what a norm gives, that is 1 for any weights
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())

            for _ in range(3):
                step()
            seen = trained(model, optimizer, losses)
            agreed = seen if agreed is None else agreed
            assert torch.allclose(seen, agreed, rtol=2e-2, atol=0), f"{seen.tolist()}, and {agreed.tolist()} with FSDP2 alone"
            if device.type == "cuda":
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            times[name] = in_turns({name: (step, 1)}, rounds=args.rounds, repeats=6)[name]
            held = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            states = states_gib(model, optimizer)
            idle, no_work, table = kernels(step) if device.type == "cuda" else (0.0, 0.0, "")
            if args.profile:
                lines = where(step, args.profile)
                say(f"{lines}\n{table}")
            first = [round(loss.item(), 5) for loss in losses[:3]]
            report = moefuse.last_report() if backend == "moefuse" else None
            results.append(
                {
                    "what": "train",
                    "impl": name,
                    "sequence": args.sequence,
                    "layers": args.layers,
                    "us": summary(times[name]),
                    "peak_gib": peak,
                }
                | {
                    "held_gib": held,
                    "experts_gib": states,
                    "idle": idle,
                    "no_work": no_work,
                    "losses": first,
                    "gradients": seen[-1].item(),
                    "fused": 0 if report is None else len(report.fused),
                }
            )
            say(results[-1])
            del model, optimizer, step
    return results


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Tensor:
    """What all ways should agree in, on all ranks alike: mean losses, and the norm of all experts' mean gradients (as Adam has them)."""
    moments = [_local(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters() if "experts" in name]
    found = torch.stack([*losses, sum((m.float().square().sum() for m in moments), losses[0].new_zeros(()))])
    dist.all_reduce(found)
    return torch.cat([found[:-1] / dist.get_world_size(), found[-1:].sqrt()])


def _mean(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(dist.get_world_size())


def states_gib(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Of a rank's parts of experts: weights, gradients as large, and what the optimizer keeps."""
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    kept = [t for p in experts for t in (p, p, *optimizer.state[p].values()) if isinstance(t, Tensor)]
    return sum(_local(t).numel() * t.dtype.itemsize for t in kept) / 2**30


def _local(t: Any) -> Tensor:
    found: Tensor = t.to_local() if isinstance(t, DTensor) else t
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=["layer", "train", "model"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--transports", nargs="*", default=["allgather", "symm"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--profile", type=int, default=0, help="so many lines of where the host is")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    _, world, device = start(args.device)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))["ep"]
    results: list[dict[str, Any]] = []
    if "layer" in args.parts:
        results += layers(args, mesh, device)
    if "train" in args.parts:
        results += train(args, mesh, device)
    if "model" in args.parts:
        results += models(args, mesh, device)
    if args.out and dist.get_rank() == 0:
        info = head("us, the slowest rank's; layer: per call in a CUDA graph", "torchrun benchmarks/parallel.py", args.commit)
        args.out.write_text(by_line(info, "results", results))
    leave()


if __name__ == "__main__":
    main()
