"""LoRA on stacked experts with PEFT: train, merge, save, load.

python examples/lora.py --steps 10
"""

from __future__ import annotations

import argparse
import copy
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse


def small_model() -> Qwen3MoeForCausalLM:
    """In the place of ``AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")``."""
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    base = small_model()
    before = copy.deepcopy(base.state_dict())
    # transformers 5 holds the experts of a layer in two Parameters, [E, 2 I, H] and [E, H, I].
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=["gate_up_proj", "down_proj"])
    model = get_peft_model(base, config)
    model.compile(backend="moefuse", options={"expect": 2})
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids = (torch.arange(8)[:, None] * 7 + torch.arange(24)) % 128
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(moefuse.last_report())

    with torch.no_grad():
        wanted = model.eval()(input_ids=ids).logits
    merged = model.merge_and_unload()
    changed = [name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])]
    with tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.compile(backend="moefuse")
    with torch.no_grad():
        off = (loaded(input_ids=ids).logits - wanted).abs().max().item()
    print(f"merged into {len(changed)} Parameters, saved and loaded: logits differ by at most {off:.1e}")


if __name__ == "__main__":
    main()
