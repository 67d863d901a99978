"""transformers' Trainer on every rank, with spread experts and without."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import moefuse
from moefuse.integrations import transformers_trainer
from tests.dist import pretrained, scenes


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, Any]:
        words = torch.randint(0, 64, (6,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": words, "labels": words}


def run(rank: int, folder: str, spread: bool) -> tuple[float, float, list[str], list[str]]:
    """Three steps, a checkpoint behind two of them, and ``save_model``.

    Returns:
        The loss; the largest difference of what was saved from the model that was trained; the files of the checkpoint; warnings.
    """
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, env), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=3, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
            ddp_backend="gloo",
        )  # fmt: skip
        model = pretrained.single().train()
        if spread:
            moefuse.parallelize(model, scenes.mesh())
        trainer = Trainer(model=model, args=args, train_dataset=Words())
        loss = trainer.train().training_loss
        trainer.save_model(f"{folder}/end")
        state = moefuse.full_state_dict(model)
        assert transformers_trainer._is_ours(trainer) is spread
        # Of a model that transformers itself has put on ranks, all of them save: that is left as it is.
        trainer.is_distributed_loading_by_transformers = True
        assert not transformers_trainer._is_ours(trainer)
    dist.barrier()
    back = pretrained.Qwen3MoeForCausalLM.from_pretrained(f"{folder}/end").state_dict()
    off = max((back[key] - state[key]).abs().max().item() for key in state)
    return loss, off, sorted(os.listdir(f"{folder}/checkpoint-2")), [str(w.message) for w in said if "spread" in str(w.message)]
