"""transformers' Trainer trains and saves a model whose experts are spread as it does one of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.workers import Workers

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")
trained = pytest.importorskip("tests.dist.trained")


def test_checkpoints(two: Workers, tmp_path: Path) -> None:
    """All ranks gather, one writes: the model, and no states of an optimizer, which would be those of one rank's experts."""
    found = {spread: two.run(trained.run, str(tmp_path / str(spread)), spread) for spread in (False, True)}
    for (loss, off, files, said), (wanted, exact, theirs, _) in zip(found[True], found[False], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert (off, exact) == (0, 0)
        assert set(theirs) - set(files) == {"optimizer.pt", "scheduler.pt"}
        assert "model.safetensors" in files
        assert all("begins with a fresh optimizer" in text for text in said)
    assert [bool(said) for _, _, _, said in found[True]] == [True, False]
