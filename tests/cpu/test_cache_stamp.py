"""torch's on-disk caches: hit when nothing changed, never stale when a source file did (pytorch#144344)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moefuse
from moefuse import Options, cache

# Trains one step through moefuse::experts and prints the gradient of x and the cache counters.
PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
import moefuse

assert moefuse.__file__.startswith(sys.argv[1]), moefuse.__file__
torch.manual_seed(0)
ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.full((3, 2), 0.5)
w_in, w_out = torch.randn(3, 8, 4), torch.randn(3, 4, 4)


def model(x):
    return torch.ops.moefuse.experts(x, ids, weights, [w_in], [], [w_out], [], [], []).sum()


x = torch.randn(3, 4, requires_grad=True)
torch.compile(model, backend="moefuse")(x).backward()
caches = {f"{group}.{name}": n for group in ("inductor", "aot_autograd") for name, n in counters[group].items() if "cache" in name}
print(json.dumps({"grad": x.grad.tolist(), "caches": caches}))
"""
# Added at the end of the file that holds the gradient formula.
EDIT = """
_original = _Experts.backward
_Experts.backward = staticmethod(lambda ctx, grad: tuple(None if g is None else 3 * g for g in _original(ctx, grad)))
"""


def run(source: Path, caches: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(source), "TORCHINDUCTOR_CACHE_DIR": str(caches), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source)], cwd=source, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.thorough
def test_an_edited_gradient_formula_is_not_served_from_the_cache(tmp_path: Path) -> None:
    source, caches = tmp_path / "source", tmp_path / "caches"
    # Following the links, so that an edit cannot reach the real files.
    shutil.copytree(Path(moefuse.__file__).parent, source / "moefuse", ignore=shutil.ignore_patterns("__pycache__"))

    first = run(source, caches)
    assert first["caches"].get("aot_autograd.autograd_cache_miss") == 1, first["caches"]

    again = run(source, caches)
    assert again["grad"] == first["grad"]
    assert again["caches"].get("aot_autograd.autograd_cache_hit") == 1, again["caches"]
    assert not [name for result in (first, again) for name in result["caches"] if "bypass" in name]

    with (source / "moefuse" / "ops" / "autograd.py").open("a") as file:
        file.write(EDIT)
    edited = run(source, caches)
    assert edited["caches"].get("aot_autograd.autograd_cache_hit", 0) == 0, edited["caches"]
    expected = [[3 * value for value in row] for row in first["grad"]]
    assert [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected] == edited["grad"]


def copied_hash(folder: Path) -> str:
    spec = importlib.util.spec_from_file_location("copied_cache", folder / "moefuse" / "cache.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.source_hash()  # type: ignore[no-any-return]


def test_any_edit_changes_the_hash(tmp_path: Path) -> None:
    shutil.copytree(Path(moefuse.__file__).parent, tmp_path / "moefuse", ignore=shutil.ignore_patterns("__pycache__"))
    hashes = {copied_hash(tmp_path)}
    # A checkout has links and an installation has folders: the same sources give the same hash.
    assert hashes == {cache.source_hash()}
    for path in ("runtime/providers.py", "passes/ir/facts.py"):
        with (tmp_path / "moefuse" / path).open("a") as file:
            file.write("\n# edited\n")
        hashes.add(copied_hash(tmp_path))
    assert len(hashes) == 3
    assert copied_hash(tmp_path) in hashes


def test_the_key_depends_on_the_options() -> None:
    keys = [cache.key(options) for options in (Options(), Options(strict=True), Options(verify="off"), Options(exclude="a"))]
    assert len(set(keys)) == len(keys)
    assert cache.key(Options()) == cache.key(Options())


def test_the_passes_have_a_key_and_can_be_pickled() -> None:
    import pickle

    from moefuse.inductor_pass import CacheStamp

    assert pickle.loads(pickle.dumps(CacheStamp("a key"))).uuid() == "a key"
    fusion = moefuse.MoEFusionPass({"verify": "off"})
    assert pickle.loads(pickle.dumps(fusion)).uuid() == fusion.uuid()
    assert fusion.uuid() != moefuse.MoEFusionPass().uuid()
