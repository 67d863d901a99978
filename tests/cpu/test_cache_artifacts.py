"""``torch.compiler.save_cache_artifacts`` and ``load_cache_artifacts``: what one machine compiled is not compiled again on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import json, sys
import torch
import moefuse
from torch._dynamo.utils import counters
from tests.cpu.exported_case import Model, tokens

artifacts, save, options = sys.argv[1], sys.argv[2] == "save", json.loads(sys.argv[3])
if not save:
    with open(artifacts, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
model, x = Model("selected"), tokens()
expected = model(x)
compiled = torch.compile(model, backend="moefuse", options=options)
torch.testing.assert_close(compiled(x), expected)
compiled(x).sum().backward()
if save:
    data, _ = torch.compiler.save_cache_artifacts()
    with open(artifacts, "wb") as file:
        file.write(data)
found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([len(moefuse.last_report().fused), found]))
"""


def compiled(folder: Path, what: str, artifacts: Path, **options: object) -> list[int]:
    """(regions fused, hits in torch's caches) of a process with empty caches of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    arguments = [sys.executable, "-c", PROGRAM, str(artifacts), what, json.dumps(options)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    path = folder / "artifacts"
    assert compiled(folder / "cache", "save", path) == [1, 0]
    return path


def test_artifacts_are_taken(artifacts: Path, tmp_path: Path) -> None:
    fused, found = compiled(tmp_path, "load", artifacts)
    assert fused == 1
    assert found > 0


def test_not_by_another_moefuse(artifacts: Path, tmp_path: Path) -> None:
    """Options are part of the key, as moefuse's sources are."""
    assert compiled(tmp_path, "load", artifacts, verify="off") == [1, 0]
