"""``torch.compiler.save_cache_artifacts`` and ``load_cache_artifacts``: what one machine compiled is not compiled again on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import json, sys
import torch
import moefuse
from torch._dynamo.utils import counters
from tests.cpu import exported_case

exported_case.EXPERTS = 3
artifacts, save = sys.argv[1], sys.argv[2] == "save"
if not save:
    with open(artifacts, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
for options in json.loads(sys.argv[3]):
    torch._dynamo.reset()
    counters.clear()
    model, x = exported_case.Model("selected"), exported_case.tokens()
    expected = model(x)
    compiled = torch.compile(model, backend="moefuse", options=options)
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(json.dumps([len(moefuse.last_report().fused), found]))
if save:
    data, _ = torch.compiler.save_cache_artifacts()
    with open(artifacts, "wb") as file:
        file.write(data)
"""


def compiled(folder: Path, what: str, artifacts: Path, *options: dict[str, str]) -> list[list[int]]:
    """For each of these options (regions fused, hits in torch's caches), in a process with empty caches of its own."""
    arguments = [sys.executable, "-c", PROGRAM, str(artifacts), what, json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(options) :]]


def test_artifacts_are_taken_and_not_by_another_moefuse(tmp_path: Path) -> None:
    """Options are part of the key, as moefuse's sources are: other ones find nothing in the same process."""
    artifacts = tmp_path / "artifacts"
    assert compiled(tmp_path / "first", "save", artifacts, {}) == [[1, 0]]
    (fused, found), others = compiled(tmp_path / "second", "load", artifacts, {}, {"verify": "off"})
    assert fused == 1
    assert found > 0
    assert others == [1, 0]
