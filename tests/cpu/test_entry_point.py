"""``backend="moefuse"`` in a process that never imports moefuse."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


torch.manual_seed(0)
model, x = Model(), torch.randn(3, 4)
expected = model(x)
assert "moefuse" not in sys.modules
assert "moefuse" in torch.compiler.list_backends()
assert "moefuse" not in sys.modules, "listing backends must not load them"
HOW
torch.testing.assert_close(compiled(x), expected)
assert torch._dynamo.utils.counters["moefuse"]["graphs"] == 1
"""
HOW = {
    "torch.compile": "compiled = torch.compile(model, backend='moefuse')",
    "module.compile": "model.compile(backend='moefuse'); compiled = model",
    "decorator": "compiled = torch.compile(backend='moefuse', fullgraph=True)(lambda x: model(x))",
    "options": "compiled = torch.compile(model, backend='moefuse', options={'verify': 'off', 'epilogue_fusion': False})",
}


@pytest.mark.parametrize("how", HOW)
def test_the_name_is_enough(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("HOW", HOW[how])], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
