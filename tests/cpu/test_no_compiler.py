"""Without a C++ compiler what Inductor has to write C++ for ends in one sentence, and all else works as with one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
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

    {call}
"""


def done(call: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MOEFUSE_CACHE_DIR": str(folder), **(variables or {"CXX": "/nowhere/g++"})}
    program = textwrap.dedent(PROGRAM).format(call=call)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)


def sentence(name: str = "/nowhere/g++") -> str:
    return (
        f"Inductor has C++ to compile for what this graph computes, and there is no C++ compiler (tried: {name}): "
        "install g++ (apt-get install g++), or let CXX name a compiler"
    )


def raised(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 1
    assert "Backend compiler" not in ended.stderr  # Dynamo's words for a backend that is broken
    return ended.stderr.splitlines()[-1]


def test_experts_in_a_graph_of_dynamos_own(tmp_path: Path) -> None:
    ended = done("torch.compile(masked, backend='moefuse')(x)", tmp_path)
    assert raised(ended) == f"moefuse.errors.CompilerError: {sentence()}"


def test_a_loop_that_eager_mode_can_run(tmp_path: Path) -> None:
    """Without moefuse Dynamo leaves all of it to eager mode, which needs no compiler."""
    ended = done("torch.testing.assert_close(torch.compile(layer, backend='moefuse')(x), layer(x))", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (
        f"(not-captured): which rows an expert takes depends on data, and the compiler cannot take the graph ({sentence()})" in ended.stderr
    )
    assert "Backend compiler" not in ended.stderr


@pytest.mark.sampled(1)
def test_a_path_without_a_compiler(tmp_path: Path) -> None:
    ended = done("torch.compile(torch.relu, backend='moefuse')(x)", tmp_path, PATH=str(tmp_path), CXX="no-such-compiler")
    assert raised(ended) == f"moefuse.errors.CompilerError: {sentence('no-such-compiler')}"


def test_what_torch_computes_needs_none(tmp_path: Path) -> None:
    """A backward that is compiled later says what the forward would have said."""
    call = "y = torch.compile(nn.Linear(16, 4), backend='moefuse')(x); print('forward', tuple(y.shape)); y.sum().backward()"
    ended = done(call, tmp_path)
    assert ended.stdout == "forward (6, 4)\n"
    assert raised(ended) == f"moefuse.errors.CompilerError: {sentence()}"


def test_explain_compiles_nothing(tmp_path: Path) -> None:
    ended = done("print(moefuse.explain(layer, x))", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "fused 1 of 1" in ended.stdout


def test_errors_that_torch_is_to_suppress(tmp_path: Path) -> None:
    call = "torch._dynamo.config.suppress_errors = True; torch.testing.assert_close(torch.compile(masked, backend='moefuse')(x), masked(x))"
    ended = done(call, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sentence() in ended.stderr
