"""Training, checkpoints, ranks that do other things at other times, and ranks that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.dist import layers, scenes, wrapped
from tests.dist.workers import Workers

ROOT = Path(__file__).parent.parent.parent


def test_training(two: Workers) -> None:
    """Micro-batches, the norm of gradients, clipping and AdamW: those of one process."""
    for norms, outs in two.run(scenes.training, layers.Listed, 3):
        assert norms <= 1e-6
        assert outs <= 1e-5


HOW: dict[str, dict[str, Any]] = {"linear": {}, "round robin": {"placement": "round_robin"}, "slices": {"experts": "tp"}}
HOW["a table"] = {"placement": [0, 0, 0, 1]}
"""In order, but not in the blocks of a DTensor."""


PAIRS = [("linear", "linear"), ("linear", "slices"), ("round robin", "linear"), ("slices", "round robin"), ("a table", "linear")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_checkpoints(two: Workers, kind: type[nn.Module], saved: str, loaded: str, tmp_path: Path) -> None:
    """Of torch.distributed.checkpoint: with the keys of the model, good for another placement, and for one process, too."""
    folder = str(tmp_path / "saved")
    assert two.run(scenes.saved_and_loaded, kind, folder, HOW[saved], HOW[loaded]) == [(True, []), (True, [])]
    assert two.run(scenes.loaded_whole, kind, folder) == [True, True]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed, layers.Transposed])
def test_a_checkpoint_of_one_process(two: Workers, kind: type[nn.Module], how: str) -> None:
    assert max(two.run(scenes.loaded_from_one_process, kind, HOW[how])) <= 1e-5


@pytest.mark.parametrize("experts", ["ep", "tp"])
def test_one_all_reduce_for_each_layer(two: Workers, experts: str) -> None:
    """Routed and shared experts where all ranks have the same tokens: what is whole is added behind the one reduction."""
    assert two.run(scenes.collectives_of_a_call, experts) == [["all_reduce"] * 2] * 2


@pytest.mark.parametrize(
    ("how", "tokens", "moved"),
    [
        ({"max_tokens": 7}, (5, 7), True),
        ({"transport": "all_to_all"}, (3, 6), False),
        ({"tokens": "replicated"}, (4, 4), True),
        ({"experts": "tp"}, (5, 2), True),
    ],
    ids=str,
)
def test_shared_experts_beside(two: Workers, how: dict[str, Any], tokens: tuple[int, int], moved: bool) -> None:
    """They start in front of the router and are met at the sum, behind all transfers; not where the host waits for these."""
    for worst, beside, started in two.run(scenes.shared_beside, how, tokens, code="max_tokens" in how):
        assert worst <= 1e-5
        assert beside == [moved] * 2
        assert started == 2 * moved


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [layers.Listed, layers.Stacked])
def test_sizes_as_symbols(two: Workers, kind: type[nn.Module]) -> None:
    """FSDP's modules have their numbers as symbols then: those of where experts are must not be any, or each call gathers."""
    for worst, fused, refused in two.run(scenes.sizes_as_symbols, kind):
        assert worst <= 1e-5
        assert (fused, refused) == (2, [])


WRAPPED = [
    (layers.Stacked, "fsdp", {"fused": True}),
    (layers.Listed, "fsdp", {"foreach": True}),
    (layers.Stacked, "ddp", {"foreach": True}),
    (layers.Listed, "ddp", {"fused": True}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "around", "settings"), WRAPPED)
def test_data_parallelism_of_the_rest(two: Workers, kind: type[nn.Module], around: str, settings: dict[str, Any]) -> None:
    """FSDP2 on the same mesh and DDP, with optimizers that refuse Parameters of two kinds in one call: as one process."""
    for outs, grads, fused in two.run(wrapped.trained, kind, around, settings):
        assert outs <= 1e-5
        assert grads <= 1e-6
        assert fused >= 2


def test_ranks_that_compile_other_graphs_at_other_times(two: Workers) -> None:
    for worst in two.run(scenes.different_programs):
        assert max(worst) <= 1e-5, worst


def test_too_many_tokens(two: Workers) -> None:
    for rank, text in enumerate(two.run(scenes.too_many)):
        assert text == f"first: rank {rank} has 9 tokens, and max_tokens=6 was promised"


def test_a_rank_that_dies() -> None:
    workers = Workers(2, timeout=15)
    try:
        (alive, text), (there, _) = workers.try_to(scenes.dying)
    finally:
        workers.close()
    assert alive
    assert not there
    assert text.startswith("first: another rank of the mesh 'ep' failed, or did not come: "), text


@pytest.mark.thorough
def test_the_example() -> None:
    """An unmodified Qwen3-MoE of transformers: the same losses as one process, both layers fused."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/expert_parallel.py", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fused 2 of 2 MoE layers" in done.stdout
