"""``torch.compiler.save_cache_artifacts`` and ``load_cache_artifacts``: what one machine compiled is not compiled again on another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests import forked

ROOT = Path(__file__).parent.parent.parent

BEFORE = """
import json, os
import torch, torch._inductor.compile_fx
import moefuse
from torch._dynamo.utils import counters
from tests.cpu import exported_case

exported_case.EXPERTS = 3
"""
PROGRAM = """
folder, artifacts, save, every = {!r}
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
if not save:
    with open(artifacts, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
found = []
for options in every:
    torch._dynamo.reset()
    counters.clear()
    model, x = exported_case.Model("selected"), exported_case.tokens()
    expected = model(x)
    compiled = torch.compile(model, backend="moefuse", options=options)
    torch.testing.assert_close(compiled(x), expected)
    if not options:
        compiled(x).sum().backward()
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    found.append([len(moefuse.last_report().fused), hits])
print(json.dumps(found))
if save:
    data, _ = torch.compiler.save_cache_artifacts()
    with open(artifacts, "wb") as file:
        file.write(data)
"""


def compiled(*runs: tuple[str, str, bool, list[dict[str, str]]]) -> list[Any]:
    """For each (folder of caches, artifacts, whether they are saved, options) a process: for each of the options (regions fused, hits in
    torch's caches)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answers = forked.printed(BEFORE, [PROGRAM.format(run) for run in runs], ROOT, environment)
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def test_artifacts_are_taken_and_not_by_another_moefuse(tmp_path: Path) -> None:
    """Options are part of the key, as moefuse's sources are: other ones find nothing in the same process."""
    artifacts, first, second = (str(tmp_path / name) for name in ("artifacts", "first", "second"))
    saved, loaded = compiled((first, artifacts, True, [{}]), (second, artifacts, False, [{}, {"verify": "off"}]))
    assert saved == [[1, 0]]
    (fused, found), others = loaded
    assert fused == 1
    assert found > 0
    assert others == [1, 0]
