"""Fine-tune a mixture-of-experts model of transformers with its Trainer.

python examples/finetune.py --steps 20
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import moefuse  # gives transformers the name "moefuse"


def small_model() -> Qwen3MoeForCausalLM:
    """In the place of ``AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")``."""
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Numbers that count up from somewhere."""
    rows = [(torch.randint(64, (1,)) + torch.arange(32)) % 128 for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-2, torch_compile_backend="moefuse",
            logging_steps=max(steps // 4, 1), report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(small_model(), arguments, train_dataset=sentences(8 * steps))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(moefuse.last_report())


if __name__ == "__main__":
    main()
