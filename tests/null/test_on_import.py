"""Integrations come with their library, before or after ``import moefuse``, which imports none of these libraries itself."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moefuse.integrations import on_import
from tests.forked import printed

pytest.importorskip("accelerate")
ROOT = Path(__file__).parent.parent.parent


BEFORE = """
import sys
import torch._dynamo, torch.onnx, huggingface_hub, jinja2, numpy, regex, safetensors.torch, tokenizers
assert not {"moefuse", "accelerate", "transformers"} & set(sys.modules)
"""
"""What the libraries import themselves: most of the time that they take."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ASK = """
from accelerate.utils import DynamoBackend
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
print("MOEFUSE" in DynamoBackend, "moefuse" in ALL_EXPERTS_FUNCTIONS.keys())
"""
ASK_FP8 = """
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
print("moefuse" in ALL_FP8_EXPERTS_FUNCTIONS.keys())
"""
ASK_EP = """
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
print("moefuse" in EPImplementationInterface(), type(ALL_PARALLEL_STYLES["ep_dispatch_experts"]).__name__)
"""
FIRST = (
    "import moefuse",
    "import transformers.integrations.moe, accelerate, moefuse",
    "import moefuse, transformers.modeling_utils",
    "import moefuse.integrations.transformers, moefuse.integrations.accelerate",
)


def test_either_may_come_first() -> None:
    """And behind moefuse what only some releases have: a registry of float8 experts, the name and the style of expert parallelism."""
    pytest.importorskip("transformers.integrations.moe")
    programs = [f"{first}\n{ASK}" for first in FIRST]
    expected = ["True True"] * len(FIRST)
    with contextlib.suppress(ImportError):
        importlib.import_module("moefuse.integrations.transformers_fp8")
        programs[0] += ASK_FP8
        expected[0] += "\nTrue"
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.distributed.expert_parallel")
        programs[0] += ASK_EP
        expected[0] += "\nTrue MoefuseStyle"
    assert printed(BEFORE, programs, ROOT, ENVIRONMENT) == expected


def test_none_is_imported_for_it_and_none_is_changed() -> None:
    program = """
        import sys
        import moefuse
        print([name for name in ("accelerate", "transformers") if name in sys.modules])
        import accelerate.utils.dataclasses as module
        kind = type(module.__loader__).__name__, type(module.__spec__.loader).__name__, module.__loader__.get_source(module.__name__)[:0]
        print(kind, [finder for finder in sys.meta_path if getattr(finder, "name", "") == module.__name__])
    """
    (said,) = printed("", [program], ROOT, ENVIRONMENT)
    assert said == "[]\n('SourceFileLoader', 'SourceFileLoader', '') []"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A library that nobody has imported yet, and an integration of it that cannot be imported."""
    (tmp_path / "some_library.py").write_text("VALUE = 1\n")
    (tmp_path / "its_integration.py").write_text("import some_library\nassert some_library.VALUE == 2, 'another release'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(on_import, "INTEGRATIONS", {"some_library": "its_integration"})
    yield "some_library"
    for name in ("some_library", "its_integration"):
        sys.modules.pop(name, None)


def test_a_failing_integration_leaves_its_library_alone(library: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moefuse.integrations"):
        on_import.wait()
        assert importlib.import_module(library).VALUE == 1
    assert [record.getMessage() for record in caplog.records] == ["its_integration is not available: another release"]


def test_looking_for_a_library_is_not_importing_it(library: str, tmp_path: Path) -> None:
    before = list(sys.meta_path)
    on_import.wait()
    on_import.wait()
    assert len(sys.meta_path) == len(before) + 1
    assert importlib.util.find_spec(library) is not None
    assert library not in sys.modules
    (tmp_path / "some_library.py").write_text("VALUE = 2\n")
    importlib.import_module(library)
    assert "its_integration" in sys.modules
    assert sys.meta_path == before
