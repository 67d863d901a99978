"""Without a C++ compiler what Inductor has to write C++ for ends in one sentence, and all else works as with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = """
    import contextlib, json, os, sys, traceback
    import torch
    from torch import nn
    from torch.nn import functional as F
    import moefuse

    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(16, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

        def forward(self, x):
            weights, ids = self.router(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, F.silu(expert(x[token])) * weights[token, slot, None])
            return out

    layer, x = MoE().requires_grad_(False), torch.randn(6, 16)

    def masked(x):
        weights, ids = layer.router(x).softmax(-1).topk(2)
        outputs = [F.silu(expert(x)) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(layer.experts)]
        return torch.stack(outputs).sum(0)

    raised = {}
    for name, call in json.loads(sys.argv[2]).items():
        torch._dynamo.reset()
        said = sys.argv[1] + "/" + name
        with open(said + ".out", "w") as out, open(said + ".err", "w") as err, contextlib.redirect_stdout(out):
            os.dup2(err.fileno(), 2)
            try:
                exec(call)
                raised[name] = False
            except Exception:
                traceback.print_exc()
                raised[name] = True
    print(json.dumps(raised))
"""

CALLS = {
    "loop": "torch.testing.assert_close(torch.compile(layer, backend='moefuse')(x), layer(x))",
    "graph": "torch.compile(masked, backend='moefuse')(x)",
    "linear": "y = torch.compile(nn.Linear(16, 4), backend='moefuse')(x); print('forward', tuple(y.shape)); y.sum().backward()",
    "explain": "print(moefuse.explain(layer, x))",
    "suppressed": "torch._dynamo.config.suppress_errors = True; "
    "torch.testing.assert_close(torch.compile(masked, backend='moefuse')(x), masked(x))",
}
"""What one process does in turn, for torch takes seconds to import. The loop comes first: what is said of it is said once in a process."""


@dataclass(frozen=True)
class Said:
    stdout: str
    stderr: str
    raised: bool

    @property
    def error(self) -> str:
        """What the last exception says, without Dynamo's words for a backend that is broken."""
        assert self.raised
        assert "Backend compiler" not in self.stderr
        return self.stderr.splitlines()[-1]


def done(calls: dict[str, str], folder: Path, **variables: str) -> dict[str, Said]:
    environment = {**os.environ, "MOEFUSE_CACHE_DIR": str(folder), **(variables or {"CXX": "/nowhere/g++"})}
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), json.dumps(calls)]
    ended = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    raised = json.loads(ended.stdout)
    return {name: Said(*((folder / f"{name}.{end}").read_text() for end in ("out", "err")), raised[name]) for name in calls}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    return done(CALLS, tmp_path_factory.mktemp("said"))


def sentence(name: str = "/nowhere/g++") -> str:
    return (
        f"Inductor has C++ to compile for what this graph computes, and there is no C++ compiler (tried: {name}): "
        "install g++ (apt-get install g++), or let CXX name a compiler"
    )


def test_experts_in_a_graph_of_dynamos_own(said: dict[str, Said]) -> None:
    assert said["graph"].error == f"moefuse.errors.CompilerError: {sentence()}"


def test_a_loop_that_eager_mode_can_run(said: dict[str, Said]) -> None:
    """Without moefuse Dynamo leaves all of it to eager mode, which needs no compiler."""
    stderr = said["loop"].stderr
    assert not said["loop"].raised, stderr
    assert f"(not-captured): which rows an expert takes depends on data, and the compiler cannot take the graph ({sentence()})" in stderr
    assert "Backend compiler" not in stderr


@pytest.mark.thorough
def test_a_path_without_a_compiler(tmp_path: Path) -> None:
    calls = {"relu": "torch.compile(torch.relu, backend='moefuse')(x)"}
    said = done(calls, tmp_path, PATH=str(tmp_path), CXX="no-such-compiler")
    assert said["relu"].error == f"moefuse.errors.CompilerError: {sentence('no-such-compiler')}"


def test_what_torch_computes_needs_none(said: dict[str, Said]) -> None:
    """A backward that is compiled later says what the forward would have said."""
    assert said["linear"].stdout == "forward (6, 4)\n"
    assert said["linear"].error == f"moefuse.errors.CompilerError: {sentence()}"


def test_explain_compiles_nothing(said: dict[str, Said]) -> None:
    assert not said["explain"].raised, said["explain"].stderr
    assert "fused 1 of 1" in said["explain"].stdout


def test_errors_that_torch_is_to_suppress(said: dict[str, Said]) -> None:
    assert not said["suppressed"].raised, said["suppressed"].stderr
    assert sentence() in said["suppressed"].stderr
