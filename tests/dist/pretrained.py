"""What tests with models of transformers have each rank do."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moefuse
from moefuse import Options
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, scenes


def config(**how: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**{
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "norm_topk_prob": True, **how,
    })  # fmt: skip


def single(**how: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(config(**how)).eval()


class Lists(PreTrainedModel):  # type: ignore[misc]
    """Experts in lists, as in models of transformers 4."""

    config_class = PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.body = layers.Model(layers.Listed, 6)
        self.post_init()


def lists_saved(rank: int, path: str, how: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = Lists(PretrainedConfig())
    moefuse.parallelize(model, scenes.mesh(), **how)
    model.save_pretrained(path)
    dist.barrier()


def words(rank: int) -> torch.Tensor:
    return torch.randint(64, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))


def apart(model: Any, wanted: Any, text: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(input_ids=text).logits - wanted(input_ids=text).logits).abs().max())


def loaded(rank: int, path: str, how: dict[str, Any], tied: bool) -> float:
    """A checkpoint as it is on the hub, one tensor for each expert's projection, into a model from the meta device."""
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


class Plain(layers.Model):
    """With a ``save_pretrained`` of another library's kind."""

    def save_pretrained(self, save_directory: str) -> None:
        torch.save(self.state_dict(), save_directory)


def alone(rank: int, path: str) -> list[str]:
    """One rank saves, as the Trainer does, while the other one goes on; a full state needs no other rank. And what takes no state."""
    from moefuse.parallel import pretrained

    model, texts = single(), []
    moefuse.parallelize(model, scenes.mesh())
    state = moefuse.full_state_dict(model, keep=rank == 0)
    if rank == 0:
        model.save_pretrained(path, state_dict=state)
        pretrained.WAIT = datetime.timedelta(seconds=1)
        try:
            model.save_pretrained(path)
        except moefuse.PeerError as error:
            texts.append(str(error))
        pretrained.WAIT = None
    texts.append(str(apart(model, single(), words(rank)) <= 1e-5))
    other = Plain(layers.Stacked, 6)
    moefuse.parallelize(other, scenes.mesh())
    try:
        other.save_pretrained(path)
    except moefuse.ParallelError as error:
        texts.append(str(error))
    return texts


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def distributed(path: str, **how: Any) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return Qwen3MoeForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(ep_size=2, **how))


def trained(rank: int, path: str, how: dict[str, Any]) -> tuple[float, float, str]:
    """(difference of the loss, largest of a gradient from one process, how the compiled layers are spread)."""
    model = distributed(path, ep_implementation="moefuse", **how).train()
    wanted = single(num_hidden_layers=1).train()
    seen = Seen()
    run = torch.compile(model, backend=capturing(seen, Options(), "aot_eager"))
    same = "tp_size" in how
    every = [words(0 if same else r) for r in range(2)]
    text = every[rank]
    loss = run(input_ids=text, labels=text, use_cache=False).loss
    loss.backward()
    losses = [wanted(input_ids=t, labels=t, use_cache=False).loss for t in every]
    sum(losses, torch.zeros(())).div(2).backward()
    theirs, worst = dict(wanted.named_parameters()), 0.0
    mine = {name: p.grad for name, p in model.named_parameters()}
    assert mine.keys() == theirs.keys()
    for name, found in mine.items():
        grad: Any = found.full_tensor() if isinstance(found, DTensor) else found
        worst = max(worst, float((grad - theirs[name].grad).abs().max()))
    local = [p.to_local().shape[0] for module in experts_of(model) for p in module._parameters.values()]  # type: ignore[union-attr]
    assert local == [3] * 2
    parallel = {fused.parallel for fused in seen.report.fused}
    return abs(float(loss.detach()) - float(losses[rank].detach())), worst, f"{len(seen.report.fused)} {sorted(parallel)}"


def kept(rank: int, path: str, other: str, how: dict[str, Any]) -> float:
    """Largest difference of outputs; writes the model to ``other``."""
    model, wanted = distributed(path, ep_implementation="moefuse", **how), single()
    worst = apart(model, wanted, words(0 if "tp_size" in how else rank))
    state, theirs = moefuse.full_state_dict(model, keep=rank == 0), wanted.state_dict()
    assert sorted(state) == (sorted(theirs) if rank == 0 else [])
    assert all(torch.equal(state[key], theirs[key]) for key in state)
    model.save_pretrained(other)
    dist.barrier()
    return worst


def others(rank: int, path: str) -> tuple[float, str]:
    model = distributed(path, ep_implementation="all_to_all", tp_size=2)
    assert all("forward" in module.__dict__ for module in experts_of(model))
    try:
        moefuse.parallelize(model, scenes.mesh())
    except moefuse.ParallelError as error:
        return apart(model, single(), words(0)), str(error)
    return 0.0, "nothing"
