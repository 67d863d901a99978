"""Train a small Qwen3-MoE with its experts on several processes, and compare the losses with one process.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

Each process has a batch of its own. The losses are those of one process that takes the mean over all batches.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse


def small_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=text, labels=text, use_cache=False).loss
    return loss


def average_gradients(model: nn.Module, world: int) -> None:
    """What DDP does for all that is not sharded."""
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = small_model()
    single = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    plan = moefuse.parallelize(model, mesh["ep"])
    compiled = torch.compile(model, backend="moefuse", options={"expect": 2})

    # Every process has sequences of another length.
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randint(128, (2, 12 + 4 * r), generator=generator) for r in range(world)] for _ in range(steps)]
    # "foreach" is for Parameters of one kind, and there are DTensors beside plain ones.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, single)]

    if rank == 0:
        print(plan)
    worst = 0.0
    for step, batch in enumerate(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = loss_of(compiled, batch[rank])
        mine.backward()
        average_gradients(model, world)
        every = [loss_of(single, text) / world for text in batch]
        sum(every, torch.zeros(())).backward()
        for optimizer in optimizers:
            optimizer.step()
        mean = mine.detach().clone()
        dist.all_reduce(mean)
        found, wanted = mean.item() / world, sum(part.item() for part in every)
        worst = max(worst, abs(found - wanted) / wanted)
        if rank == 0:
            print(f"step {step}: loss {found:.6f} on {world} processes, {wanted:.6f} on one")
    if rank == 0:
        print(moefuse.last_report())
        print(f"largest relative difference: {worst:.1e}")
    assert worst < 1e-4, worst
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
