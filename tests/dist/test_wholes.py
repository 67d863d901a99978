"""Models that are built without memory, checkpoints of which each rank reads its part, and a model that is whole again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefuse.parallel.files import opened
from tests.dist import layers, wholes
from tests.dist.workers import Workers

safetensors = pytest.importorskip("safetensors.torch")

PLACES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "linear": ({}, (2,)),
    "round robin": ({"placement": "round_robin"}, (2,)),
    "a table with gaps": ({"placement": [0, 0, 0, 1]}, (2,)),
    "slices": ({"experts": "tp"}, (2,)),
    "slices of some": ({"experts": ("ep", "tp"), "tokens": ("distinct", "replicated")}, (1, 2)),
    "some, in full slices": ({"experts": ("ep", "tp"), "tokens": ("distinct", "replicated")}, (2, 1)),
}
CASES = [(layers.Stacked, "linear"), (layers.Stacked, "slices"), (layers.Stacked, "slices of some"), (layers.Stacked, "a table with gaps")]
CASES += [(layers.Listed, place) for place in PLACES]
CASES += [(layers.Transposed, "slices"), (layers.Transposed, "round robin")]


def saved(folder: Path, state: dict[str, Tensor], files: int = 1) -> str:
    """A checkpoint of one file, or of several with an index."""
    if files == 1:
        safetensors.save_file(state, folder / "one.safetensors")
        return str(folder / "one.safetensors")
    keys = sorted(state)
    where = {key: f"model-{number % files}.safetensors" for number, key in enumerate(keys)}
    for name in set(where.values()):
        safetensors.save_file({key: state[key] for key in keys if where[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return str(folder)


def state_of(kind: type[nn.Module]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in wholes.single(kind).state_dict().items()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "place"), CASES)
def test_from_the_meta_device(two: Workers, kind: type[nn.Module], place: str, tmp_path: Path) -> None:
    """The table of experts is right after ``to_empty``, ``to`` and copies, and every weight is this rank's."""
    how, shape = PLACES[place]
    path = saved(tmp_path, state_of(kind), files=1 if place == "linear" else 3)
    for worst in two.run(wholes.loaded, kind, how, shape, path):
        assert max(worst) <= 1e-5, worst


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "place"), CASES)
def test_each_rank_reads_its_part(two: Workers, kind: type[nn.Module], place: str, tmp_path: Path) -> None:
    """Not one byte of an expert, or of a slice, that another rank has."""
    how, shape = PLACES[place]
    path = saved(tmp_path, state_of(kind), files=2)
    whole = sum(v.numel() * v.element_size() for key, v in state_of(kind).items() if "router" not in key and "norm" not in key)
    found = two.run(wholes.bytes_read, kind, how, shape, path)
    for read, held, keys in found:
        rest = {key for key in keys if "router" in key or "norm" in key}
        biases = {key for key in keys if key.endswith(("2.bias", "down_bias"))}  # whole on every rank of a slice
        assert set(keys) == rest | (biases if "tp" in str(how) else set())
        assert len(rest) == 4
        gaps = 2 * 2 if place == "a table with gaps" else 0
        assert read <= held if gaps else read == held
        assert read < whole


def test_beside_fsdp(two: Workers, tmp_path: Path) -> None:
    """Each rank takes its shard of the rest; nothing is undone under another library."""
    for apart, state, text in two.run(wholes.loaded_beside_fsdp, saved(tmp_path, state_of(layers.Stacked))):
        assert apart <= 1e-5
        assert state == 0
        assert text.startswith("FSDPModel is a FSDPModule of another library now, which knows the spread experts: make the model anew")


@pytest.mark.thorough
def test_copies_from_the_meta_device(four: Workers) -> None:
    """Hooks that average gradients over copies are on the Parameters that there are, and not on those that were."""
    assert max(four.run(wholes.trained)) <= 1e-6


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [layers.Transposed, layers.Listed])
def test_slices_of_some_experts(four: Workers, kind: type[nn.Module], tmp_path: Path) -> None:
    """Two by two: each rank has half of half of the experts, from the meta device and back."""
    how = {"experts": ("ep", "tp"), "tokens": ("distinct", "replicated")}
    path = saved(tmp_path, state_of(kind))
    assert max(max(worst) for worst in four.run(wholes.loaded, kind, how, (2, 2), path)) <= 1e-5
    assert all(gathered == 0 and worst <= 1e-5 for gathered, worst in four.run(wholes.undone, kind, how, (2, 2)))


def per_expert(state: dict[str, Tensor], gate: str = "gate.weight", up: str = "up.weight", down: str = "down.weight") -> dict[str, Tensor]:
    """The stacked weights as a checkpoint with one tensor for each expert's projection."""
    out = {}
    for key, value in state.items():
        prefix, _, name = key.rpartition(".")
        if name not in ("gate_up", "down"):
            out[key] = value
            continue
        for e, row in enumerate(value):
            parts = {down: row} if name == "down" else dict(zip((gate, up), row.chunk(2), strict=True))
            out.update({f"{prefix}.experts.{e}.{path}": part.clone() for path, part in parts.items()})
    return out


@pytest.mark.parametrize("how", [{}, {"placement": "round_robin"}, {"experts": "tp"}], ids=["linear", "round robin", "slices"])
def test_experts_one_by_one_into_stacked_weights(two: Workers, how: dict[str, Any], tmp_path: Path) -> None:
    """The user says of what gate and up projection are made; ``down`` is the only one of its shape."""
    path = saved(tmp_path, per_expert(state_of(layers.Stacked)))
    assert max(two.run(wholes.merged, path, {"gate_up": ("gate.weight", "up.weight")}, how)) <= 1e-5


def test_which_parts_is_not_known(two: Workers, tmp_path: Path) -> None:
    """Which of two projections stands first, and whether they are interleaved, shapes do not say."""
    path = saved(tmp_path, per_expert(state_of(layers.Stacked)))
    text = (
        "ParallelError: first.gate_up is [24, 8] for each expert, and which of the checkpoint's "
        "['down.weight', 'gate.weight', 'up.weight'] it is made of is not known: say it, "
        "e.g. moefuse.load(..., merge={'gate_up': ('down.weight', 'gate.weight')})"
    )
    assert two.run(wholes.error_of, path, layers.Stacked) == [text, text]


def test_misuse(two: Workers, tmp_path: Path) -> None:
    """One sentence, on every rank alike, before anything is read."""
    state = state_of(layers.Listed)
    path = saved(tmp_path, state)
    for text in two.run(wholes.error_of, path, layers.Listed, False):
        assert text.startswith("ParallelError: first.")
        assert text.endswith("is on the meta device: call model.to_empty(device=...) before moefuse.load")
    (tmp_path / "less").mkdir()
    gone = "second.experts.3.2.weight"  # of the last rank alone
    less = saved(tmp_path / "less", {**{k: v for k, v in state.items() if k != gone}, "spare": torch.ones(1)})
    for text in two.run(wholes.error_of, less, layers.Listed):
        assert text.startswith("RuntimeError: Error(s) in loading a checkpoint for Model:\n\tMissing key(s) in the checkpoint: ")
        assert gone in text
        assert "Unexpected key(s) in the checkpoint: 'spare'" in text
    for missing, unexpected, lost in two.run(wholes.lenient, less):
        assert (missing, unexpected, lost) == ([gone], ["spare"], 1)
    (tmp_path / "other").mkdir()
    other = saved(tmp_path / "other", {**state, gone: torch.zeros(3, 3)})
    for text in two.run(wholes.error_of, other, layers.Listed):
        assert text.endswith(f"size mismatch for {gone}: the checkpoint has [3, 3], the model [8, 12]")
    for text in two.run(wholes.error_of, str(tmp_path / "nowhere"), layers.Listed):
        assert text.endswith("is no safetensors file, and no folder with any")


def test_buffers_that_no_checkpoint_has(two: Workers, tmp_path: Path) -> None:
    """Warned of, until somebody has written them."""
    path = saved(tmp_path, state_of(wholes.Buffered))
    text = (
        "first.scale is in no checkpoint and was on the meta device: moefuse.load does not know its values, so write them yourself "
        "(2 such buffers)"
    )
    assert two.run(wholes.unknown_buffers, path) == [[text], [text]]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "place"), CASES)
def test_whole_again(two: Workers, kind: type[nn.Module], place: str) -> None:
    """Classes, keys, order, attributes: as before ``parallelize``; and it can be spread anew."""
    how, shape = PLACES[place]
    for gathered, worst in two.run(wholes.undone, kind, how, shape):
        assert gathered == 0
        assert worst <= 1e-5


def test_nothing_to_undo(two: Workers) -> None:
    for warned, refused in two.run(wholes.undone_twice):
        assert warned.startswith("an optimizer (SGD) has Parameters of experts that were spread, and does not train the full ones")
        assert refused == "Model has no experts that moefuse.parallelize has spread"


def test_files_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in two files without an index, an index that is wrong, and no safetensors."""
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.save_file({"weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"two files have a tensor weight: name the one to load, or write an index"):
        opened(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "b.safetensors"}}))
    assert list(opened(tmp_path)) == ["weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"bias": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"says that bias is in b\.safetensors, which does not have it"):
        opened(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"moefuse\.load needs the package safetensors: pip install safetensors"):
        opened(tmp_path)
