"""Without a C++ compiler, or a folder for kernels: what needs one ends in one sentence, and what is slower is in the report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from moefuse.runtime import native
from tests.forked import Done, forked

BEFORE = "import torch, torch._dynamo, torch._inductor.compile_fx"
LAYER = """
import contextlib, json, os, traceback
os.environ |= {variables}
import torch
from torch import nn
from torch.nn import functional as F
import moefuse
from moefuse.runtime import native

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
"""
EXPLAIN = "print(moefuse.explain(layer, x), '| ready:', native.ready())"
RUN = "torch.compile(layer, backend='moefuse')(x); print(moefuse.last_report(), '| ready:', native.ready())"
EACH = """
def masked(x):
    weights, ids = layer.router(x).softmax(-1).topk(2)
    outputs = [F.silu(expert(x)) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(layer.experts)]
    return torch.stack(outputs).sum(0)

raised = {}
for name, call in calls.items():
    torch._dynamo.reset()
    said = folder + "/" + name
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
    "explain": EXPLAIN,
    "suppressed": "torch._dynamo.config.suppress_errors = True; "
    "torch.testing.assert_close(torch.compile(masked, backend='moefuse')(x), masked(x))",
}
"""What one process does in turn. The loop comes first: what is said of it is said once in a process."""


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


def program(text: str, **variables: object) -> str:
    return LAYER.format(variables={name: str(value) for name, value in variables.items()}) + text


def each(calls: dict[str, str], folder: Path) -> str:
    return program(f"folder, calls = {str(folder)!r}, {calls!r}\n{EACH}", MOEFUSE_CACHE_DIR=folder)


def read(done: Done, folder: Path) -> dict[str, Said]:
    """What the calls of one process wrote."""
    assert done.returncode == 0, done.stderr
    raised = json.loads(done.stdout)
    return {name: Said(*((folder / f"{name}.{end}").read_text() for end in ("out", "err")), raised[name]) for name in raised}


def output(*programs: str, **variables: str) -> list[Done]:
    """What forks of one process say, which imports torch for all; Inductor asks for the compiler's name when it is imported."""
    return forked(BEFORE, programs, environment={**os.environ, **variables})


@pytest.fixture(scope="module")
def none(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that cannot be made."""
    file = tmp_path_factory.mktemp("slow") / "file"
    file.write_text("")
    return file / "cache"


@pytest.fixture(scope="module")
def done(none: Path) -> list[Done]:
    """Without a compiler: every call, a folder that cannot be written, and kernels that the user left out."""
    folder = none.parent.parent
    slower = [program(EXPLAIN, MOEFUSE_CACHE_DIR=none), program(EXPLAIN, MOEFUSE_CACHE_DIR=none, MOEFUSE_CPU_KERNEL=0)]
    return output(each(CALLS, folder), *slower, CXX="/nowhere/g++")


@pytest.fixture
def said(done: list[Done], none: Path) -> dict[str, Said]:
    return read(done[0], none.parent.parent)


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
    (found,) = output(
        each({"relu": "torch.compile(torch.relu, backend='moefuse')(x)"}, tmp_path), PATH=str(tmp_path), CXX="no-such-compiler"
    )
    assert read(found, tmp_path)["relu"].error == f"moefuse.errors.CompilerError: {sentence('no-such-compiler')}"


def test_what_torch_computes_needs_none(said: dict[str, Said]) -> None:
    """A backward that is compiled later says what the forward would have said."""
    assert said["linear"].stdout == "forward (6, 4)\n"
    assert said["linear"].error == f"moefuse.errors.CompilerError: {sentence()}"


def test_explain_compiles_nothing(said: dict[str, Said]) -> None:
    """And says that kernels are not there."""
    assert not said["explain"].raised, said["explain"].stderr
    assert "fused 1 of 1" in said["explain"].stdout
    assert "(no C++ compiler: install g++, or let CXX name one)" in said["explain"].stdout


def test_errors_that_torch_is_to_suppress(said: dict[str, Said]) -> None:
    assert not said["suppressed"].raised, said["suppressed"].stderr
    assert sentence() in said["suppressed"].stderr


def told(done: Done, folder: Path) -> None:
    """That kernels are not there, with the remedy."""
    assert "fused 1 of 1" in done.stdout, done.stderr
    assert (
        "  note    experts on the CPU run without the C++ kernels, and more slowly "
        f"({folder} cannot be written: Not a directory; let MOEFUSE_CACHE_DIR name a folder that can)"
    ) in done.stdout
    assert "ready: False" in done.stdout


def test_a_folder_that_cannot_be_written_is_in_the_report(done: list[Done], none: Path) -> None:
    told(done[1], none)


@pytest.mark.thorough
def test_a_folder_that_cannot_be_written_is_in_the_last_report(none: Path) -> None:
    told(output(program(RUN, MOEFUSE_CACHE_DIR=none))[0], none)


def test_kernels_that_the_user_left_out_are_no_note(done: list[Done]) -> None:
    assert "fused 1 of 1" in done[2].stdout, done[2].stderr
    assert "  note" not in done[2].stdout


@pytest.mark.thorough
@pytest.mark.skipif(not native.ready(), reason="no working C++ compiler")
def test_a_folder_with_spaces_and_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "my cache's $HOME"
    (found,) = output(program(EXPLAIN, MOEFUSE_CACHE_DIR=folder))
    assert "ready: True" in found.stdout, found.stderr
    assert "  note" not in found.stdout
    assert list(folder.glob("cpu-kernels/*.so"))
