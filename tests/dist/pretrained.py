"""What tests with models of transformers have each rank do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse
from tests.dist import scenes


def config(**how: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True, **how,
    )  # fmt: skip


def single(**how: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(config(**how)).eval()


def words(rank: int) -> torch.Tensor:
    return torch.randint(64, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))


def apart(model: Any, wanted: Any, text: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(input_ids=text).logits - wanted(input_ids=text).logits).abs().max())


def loaded(rank: int, path: str, how: dict[str, Any], tied: bool) -> float:
    """A checkpoint as it is on the hub, one tensor for each expert's projection, into a model from the meta device."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(config(tie_word_embeddings=tied)).eval()
        moefuse.parallelize(model, scenes.mesh(), **how)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7)
    # Buffers that are in no checkpoint are as ``to_empty`` leaves them: written by nobody.
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = torch.full_like(module._buffers[name], 7.0)
    found = moefuse.load(model, path)
    assert found.missing_keys == found.unexpected_keys == []
    return apart(model, single(tie_word_embeddings=tied), words(rank))


def saved(rank: int, path: str, how: dict[str, Any], state: str) -> str:
    """Every rank calls ``save_pretrained``, of a model that has been changed since."""
    model = single()
    moefuse.parallelize(model, scenes.mesh(), **how)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(1.5)
    given = {"none": None, "own": model.state_dict() if state == "own" else None, "full": moefuse.full_state_dict(model)}[state]
    try:
        model.save_pretrained(path, state_dict=given)
        model.model.save_pretrained(f"{path}/inner", is_main_process=rank == 0)
    finally:
        dist.barrier()
    return type(model).__name__


def refused(rank: int, path: str, how: dict[str, Any]) -> str:
    model = single()
    moefuse.parallelize(model, scenes.mesh())
    try:
        model.save_pretrained(path, **how)
    except moefuse.ParallelError as error:
        return str(error)
    return "nothing"


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]
