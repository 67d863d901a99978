"""A server in one process: requests of any length arrive, are put into batches, and generate.

python examples/server.py --requests 30
"""

from __future__ import annotations

import argparse
import queue
import random
import threading
import time
from dataclasses import dataclass, field

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse

MOST = 4  # requests of a batch


@dataclass
class Request:
    prompt: list[int]
    done: threading.Event = field(default_factory=threading.Event)
    answer: list[int] = field(default_factory=list)


def small_model() -> Qwen3MoeForCausalLM:
    """In the place of ``AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")``."""
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def serve(model: Qwen3MoeForCausalLM, waiting: queue.Queue[Request | None]) -> None:
    """Answers what is waiting, until None comes."""
    last = False
    while not last and (first := waiting.get()) is not None:
        batch = [first]
        while len(batch) < MOST and not waiting.empty() and not last:
            other = waiting.get()
            last = other is None
            batch += [] if other is None else [other]
        width = max(len(one.prompt) for one in batch)
        ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in batch])
        out = model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=4, do_sample=False)
        for one, row in zip(batch, out.tolist(), strict=True):
            one.answer = row[width:]
            one.done.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=30)
    count = parser.parse_args().requests
    model = small_model()
    print("compiled:", moefuse.compile_layers(model))
    waiting: queue.Queue[Request | None] = queue.Queue()
    server = threading.Thread(target=serve, args=(model, waiting))
    server.start()
    requests = [Request([random.randrange(1, 128) for _ in range(random.randrange(1, 40))]) for _ in range(count)]
    for request in requests:
        waiting.put(request)
        time.sleep(random.random() / 100)
    for request in requests:
        request.done.wait()
    waiting.put(None)
    server.join()
    print(f"{count} requests, {torch._dynamo.utils.counters['stats']['unique_graphs']} graph")
    print(moefuse.last_report())


if __name__ == "__main__":
    main()
