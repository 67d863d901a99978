"""Supervised fine-tuning with TRL's defaults (gradient checkpointing, the router's loss), tried with TRL 1.16.

python examples/sft.py --steps 8
"""

from __future__ import annotations

import argparse
import tempfile

import tokenizers
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import SFTConfig, SFTTrainer

import moefuse  # gives transformers the name "moefuse"

WORDS = 128


def small_model() -> Qwen3MoeForCausalLM:
    """In the place of ``AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")``."""
    config = Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w3"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    texts = [{"text": " ".join(f"w{4 + (start + i) % (WORDS - 4)}" for i in range(24))} for start in range(8 * steps)]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-2, torch_compile_backend="moefuse", bf16=False,
            logging_steps=max(steps // 4, 1), report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(small_model(), config, train_dataset=Dataset.from_list(texts), processing_class=small_tokenizer())
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {float(losses[0]):.2f} -> {float(losses[-1]):.2f}")
    print(moefuse.last_report())


if __name__ == "__main__":
    main()
