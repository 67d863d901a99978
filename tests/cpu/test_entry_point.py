"""``backend="moefuse"`` in a process that never imports moefuse, and in one where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.forked import printed

PROGRAM = """
import copy
import sys
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


torch.manual_seed(0)
original, x = Model(), torch.randn(3, 4)
expected = original(x)
assert "moefuse" not in sys.modules
assert "moefuse" in torch.compiler.list_backends()
assert "moefuse" not in sys.modules, "listing backends must not load them"


def in_place():
    model.compile(backend="moefuse")
    return model


for way in (
    lambda: torch.compile(model, backend="moefuse"),
    in_place,
    lambda: torch.compile(backend="moefuse", fullgraph=True)(lambda x: model(x)),
    lambda: torch.compile(model, backend="moefuse", options={"verify": "off", "epilogue_fusion": False}),
):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = copy.deepcopy(original)
    torch.testing.assert_close(way()(x), expected)
    assert torch._dynamo.utils.counters["moefuse"]["graphs"] == 1
"""


def test_the_name_is_enough() -> None:
    """``torch.compile``, ``module.compile``, a decorator, and options of both; one process, as starting one is what takes time."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


FOLDER = """
import importlib.metadata
import sys

sys.path.insert(0, {folder!r})
of_all = importlib.metadata.entry_points


def of_others(**given):
    # Without a group: Triton's own backends, which Python 3.11 has in another type.
    return importlib.metadata.EntryPoints(entry for entry in of_all(**given) if entry.name != "moefuse") if given else of_all()


importlib.metadata.entry_points = of_others
import torch
assert "torch._dynamo" not in sys.modules


def names_it():
    return torch.compiler.list_backends().count("moefuse")


def compiled(x):
    return torch.compile(lambda x: x.view(3, 1), backend="moefuse")(x)

"""
"""A process in which the package lies in a folder, and no distribution has its name."""
AND_IT_IS = """
torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3, 1))
assert torch._dynamo.utils.counters["moefuse"]["graphs"] == 1
assert names_it() == 1
from moefuse.backend import backend
assert torch._dynamo.lookup_backend("moefuse") is backend, "capture asks which function it is"
"""

MOEFUSE_FIRST = """
import moefuse
assert "torch._dynamo" not in sys.modules, "it takes a second"
"""
DYNAMO_FIRST = """
assert names_it() == 0
try:
    compiled(torch.ones(3))
except torch._dynamo.exc.InvalidBackend:
    import moefuse
else:
    raise AssertionError("there is an entry point")
"""


def test_a_folder_is_enough_with_an_import(tmp_path: Path) -> None:
    """Of moefuse first, or behind Dynamo."""
    (tmp_path / "moefuse").symlink_to(Path(__file__).parent.parent.parent / "moefuse")
    printed(FOLDER.format(folder=str(tmp_path)), [MOEFUSE_FIRST + AND_IT_IS, DYNAMO_FIRST + AND_IT_IS], cwd=tmp_path)


def test_installed_and_imported_it_is_one_backend() -> None:
    import moefuse  # noqa: F401
    from moefuse.backend import backend

    assert torch.compiler.list_backends().count("moefuse") == 1
    assert torch._dynamo.lookup_backend("moefuse") is backend
