"""``backend="moefuse"`` in a process that never imports moefuse."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import copy
import sys
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


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
