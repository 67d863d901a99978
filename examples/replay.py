"""Reinforcement learning with routing replay: the trainer takes the experts that the rollout took.

python examples/replay.py --steps 5
"""

from __future__ import annotations

import argparse

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse


def small_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def log_probabilities(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = small_model()
    model.compile(backend="moefuse")
    # The rollout engine rounds otherwise than the trainer, so that it chooses other experts where two are nearly equal.
    engine = small_model()
    engine.compile(backend="moefuse")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        engine.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
        ids = torch.randint(128, (8, 24))
        with torch.no_grad(), moefuse.capture_routing(engine) as routing:
            old = log_probabilities(engine, ids)
        advantage = (ids[:, 1:] % 2).float() - 0.5  # odd numbers are rewarded
        with moefuse.replay_routing(model, routing):
            ratio = (log_probabilities(model, ids) - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: ratios {ratio.min().item():.4f} to {ratio.max().item():.4f}, loss {loss.item():.4f}")
    print({layer: [list(ids.shape) for ids in calls] for layer, calls in routing.items()})


if __name__ == "__main__":
    main()
