"""The canary of docs/coverage.md: what is fused in the installed transformers is what stands there.

With a release that is recorded, every run looks at a few families, ``HYPOTHESIS_PROFILE=deep`` at all of them; with any other release
every run looks at all of them, and compares with the newest recorded release of the same generation. An older release may lack a family, or
have it in a form that does not run; that is skipped, and shown.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.torch_version import TorchVersion

pytest.importorskip("transformers")

import transformers

from tests.strategies import THOROUGH
from tests.zoo import tiny

ROOT = Path(__file__).parent.parent.parent


def benchmark(name: str) -> ModuleType:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


RUNS = benchmark("zoo_page").read()
VERSION = transformers.__version__
FEW = ("mixtral", "llama4", "jetmoe", "vitpose_backbone", "longcat_flash", "zaya")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def recorded() -> dict[str, Any]:
    """The run of this release, else of the newest one of its generation."""
    own = [r for r in RUNS if r["transformers"].partition(".")[0] == tiny.major()]
    return max(own, key=lambda r: (r["transformers"] == VERSION, TorchVersion(r["transformers"])))  # type: ignore[no-any-return]


KNOWN = recorded()["transformers"] == VERSION
EVERY = THOROUGH or not KNOWN
OLDER = TorchVersion(VERSION) < TorchVersion(recorded()["transformers"])
BREAKS_BEFORE = {"switch_transformers": "5.23", "nllb_moe": "5.23"}
"""Models whose forward moved modules (``.to()``) in older releases: Dynamo breaks the graph there, moefuse or not."""


def cases() -> list[Any]:
    """One row of each family: in evaluation, with the implementation that is chosen by default."""
    rows = [r for r in recorded()["rows"] if r["mode"] == "eval" and r["default"] and "fused" in r]
    return [pytest.param(r, id=r["family"]) for r in rows if EVERY or r["family"] in FEW]


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    return benchmark("zoo_coverage")


def difference(old: dict[str, Any], new: dict[str, Any] | None, version: str) -> str | None:
    """What has become worse, with the line in transformers; None if nothing has."""
    name = f"{old['family']} ({old['implementation']}, {old['mode']})"
    if new is None:
        return f"{name}: transformers {VERSION} does not have it any more"
    if "fused" not in new:
        return f"{name}: {new.get('failed') or new.get('unusable')}"
    if new["fused"] == old["fused"] and new["graphs"] <= old["graphs"]:
        return None
    lines = [f"  {r['code']} at {r['line']}: {r['message']}" for r in new["reasons"]]
    counts = f"{new['fused']} of {new['present']} layers fused in {new['graphs']} graphs"
    was = f"{old['fused']} in {old['graphs']} with transformers {version} at {', '.join(old['where']) or 'no line'}"
    return "\n".join([f"{name}: {counts}, was {was}", *lines])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("old", cases())
def test_as_many_layers_as_recorded(coverage: ModuleType, old: dict[str, Any]) -> None:
    new = coverage.row(old["family"], old["implementation"], old["mode"])
    if OLDER and (new is None or "fused" not in new):
        pytest.skip(f"not in transformers {VERSION}, or not in a form that runs")
    if TorchVersion(VERSION) < TorchVersion(BREAKS_BEFORE.get(old["family"], "0")):
        assert new["fused"] <= old["fused"]
        assert new["output"] < 1e-4
        return
    assert difference(old, new, recorded()["transformers"]) is None, difference(old, new, recorded()["transformers"])
    assert new["output"] < 1e-4


def test_what_the_canary_says() -> None:
    old = {
        "family": "mixtral",
        "implementation": "eager",
        "mode": "eval",
        "fused": 2,
        "present": 2,
        "graphs": 1,
        "where": ["modeling.py:7"],
    }
    assert difference(old, {**old, "reasons": []}, "5.0") is None
    lost = {**old, "fused": 1, "reasons": [{"code": "no-rule", "line": "modeling.py:9", "message": "no rule for `roll`"}]}
    assert difference(old, lost, "5.0") == (
        "mixtral (eager, eval): 1 of 2 layers fused in 1 graphs, was 2 in 1 with transformers 5.0 at modeling.py:7\n"
        "  no-rule at modeling.py:9: no rule for `roll`"
    )
    assert "does not have it any more" in str(difference(old, None, "5.0"))


@pytest.mark.skipif(tiny.major() == "4", reason="the registry of experts came with transformers 5")
def test_no_family_is_forgotten() -> None:
    """Every folder of transformers with registered experts has a tiny model here."""
    models = Path(transformers.__file__).parent / "models"
    registered = {p.parent.name for p in models.glob("*/modeling_*.py") if "use_experts_implementation" in p.read_text()}
    known = {(family.folder or name).rpartition("/")[2] for name, family in tiny.FAMILIES.items()}
    assert len(registered) > 50
    assert registered - known == set()


def test_the_page_says_what_was_measured(coverage: ModuleType) -> None:
    page = (ROOT / "docs" / "coverage.md").read_text()
    assert page == coverage.zoo_page.page(RUNS), "make zoo-coverage writes docs/coverage.md"


def test_what_is_written_is_read(coverage: ModuleType) -> None:
    assert coverage.zoo_page.as_text(RUNS) == coverage.zoo_page.RESULTS.read_text()
