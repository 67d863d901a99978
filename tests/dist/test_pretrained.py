"""Checkpoints of models of transformers, as they are on the hub, from and to models whose experts are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.workers import Workers

transformers = pytest.importorskip("transformers", minversion="5")
pretrained = pytest.importorskip("tests.dist.pretrained")

HOW: dict[str, dict[str, Any]] = {"linear": {}, "round robin": {"placement": "round_robin"}, "slices": {"experts": "tp"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("how", "tied"), [("linear", False), ("round robin", True), ("slices", False)])
def test_from_the_hub(two: Workers, how: str, tied: bool, tmp_path: Path) -> None:
    """transformers' mapping says what gate and up projection become; tied embeddings are tied again, positions are computed again."""
    pretrained.single(tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert max(two.run(pretrained.loaded, str(tmp_path), HOW[how], tied)) <= 1e-5


@pytest.mark.parametrize(
    ("how", "state"), [("linear", "none"), ("round robin", "none"), ("slices", "none"), ("slices", "own"), ("linear", "full")]
)
def test_save_pretrained(two: Workers, how: str, state: str, tmp_path: Path) -> None:
    """What one process would have written: keys, shapes, values, and what ``from_pretrained`` makes of it."""
    wanted = pretrained.single()
    with torch.no_grad():
        for parameter in wanted.parameters():
            parameter.mul_(1.5)
    wanted.save_pretrained(tmp_path / "one")
    assert two.run(pretrained.saved, str(tmp_path / "two"), HOW[how], state) == ["Qwen3MoeForCausalLM"] * 2
    load = pytest.importorskip("safetensors.torch").load_file
    mine, theirs = (load(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert (tmp_path / "two" / "config.json").read_text() == (tmp_path / "one" / "config.json").read_text()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert pretrained.apart(back, wanted, pretrained.words(0)) == 0
    inner = transformers.AutoModel.from_pretrained(tmp_path / "two" / "inner")
    assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), wanted.model.parameters(), strict=True))


@pytest.mark.parametrize("how", HOW)
def test_save_pretrained_of_lists(two: Workers, how: str, tmp_path: Path) -> None:
    """The experts of all ranks, by their numbers."""
    two.run(pretrained.lists_saved, str(tmp_path), HOW[how])
    torch.manual_seed(3)
    wanted = pretrained.Lists(transformers.PretrainedConfig())
    back = pretrained.Lists.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), wanted.parameters(), strict=True))


def test_save_pretrained_refuses(two: Workers, tmp_path: Path) -> None:
    """What it cannot write it says, on every rank."""
    gone = {"distributed_checkpoint": True}
    for text in two.run(pretrained.refused, str(tmp_path), gone):
        assert text.startswith("Qwen3MoeForCausalLM: distributed_checkpoint=True is for models that transformers has sharded; use torch.")
    for text in two.run(pretrained.refused, str(tmp_path), {"state_dict": {"lm_head.weight": torch.zeros(1)}}):
        assert text.startswith(
            "the state_dict that save_pretrained was given has no model.layers.0.mlp.experts.gate_up_proj, which another"
        )
        assert text.endswith("leave it out, or give moefuse.full_state_dict(model)")


def test_one_rank_saves_alone(two: Workers, tmp_path: Path) -> None:
    """It waits on a group of its own, so that what the others do meanwhile is right, and says what it has waited for."""
    first, second = two.run(pretrained.alone, str(tmp_path))
    assert first[0].startswith("Qwen3MoeForCausalLM: save_pretrained gathers the experts of all ranks, so each has to call it")
    text = (
        "Plain: its save_pretrained takes no state_dict, and what a rank has is a part of the model: call moefuse.unparallelize(model) "
        "first, or use torch.distributed.checkpoint"
    )
    assert first[1:] == second == ["True", text]


CONFIGS: dict[str, dict[str, Any]] = {"equal tokens": {"tp_size": 2}, "own tokens": {"fsdp_size": 2}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", CONFIGS)
def test_distributed_config(two: Workers, how: str, tmp_path: Path) -> None:
    """``ep_implementation="moefuse"``: transformers' meshes and loading, our dispatch; loss and gradients of one process."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    pretrained.single(num_hidden_layers=1).save_pretrained(tmp_path)
    for loss, grads, report in two.run(pretrained.trained, str(tmp_path), CONFIGS[how]):
        assert loss <= 1e-6
        assert grads <= 1e-6
        assert report == f"1 ['ep=2 linear, 3 of 6 experts here, {'all_reduce' if how == 'equal tokens' else 'allgather'}']"


@pytest.mark.parametrize("how", CONFIGS)
def test_distributed_config_without_a_compiler(two: Workers, how: str, tmp_path: Path) -> None:
    """Weights are gathered; what ``save_pretrained`` writes is what was loaded; a state on one rank is whole."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    pretrained.single().save_pretrained(tmp_path / "one")
    assert max(two.run(pretrained.kept, str(tmp_path / "one"), str(tmp_path / "two"), CONFIGS[how])) <= 1e-6
    load = pytest.importorskip("safetensors.torch").load_file
    mine, theirs = (load(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_implementations_of_others(two: Workers, tmp_path: Path) -> None:
    """They run as ever beside ours, and their models are refused by ``parallelize`` with the remedy."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    pretrained.single().save_pretrained(tmp_path)
    for apart, text in two.run(pretrained.others, str(tmp_path)):
        assert apart <= 1e-6
        assert text == (
            "model.layers.0.mlp.experts is sharded by transformers already: load the model with "
            'DistributedConfig(ep_implementation="moefuse", ...), or without a distributed_config and call moefuse.parallelize then'
        )
