"""What is slower on this machine than it could be is in the report, and a folder with a space in its name is no reason."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from moefuse.runtime import native
from tests.forked import printed

BEFORE = "import torch, torch._dynamo, torch._inductor.compile_fx"
PROGRAM = """
    import os
    os.environ.update({variables})
    import torch
    from torch.nn import functional as F
    import moefuse
    from moefuse.runtime import native

    gate, up, down = torch.randn(4, 16), torch.randn(4, 8, 16), torch.randn(4, 16, 8)

    def layer(x):
        weights, ids = (x @ gate.t()).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            out = out + F.silu(x @ up[e].t()) @ down[e].t() * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    x = torch.randn(6, 16)
    with torch.no_grad():
        {call}
    print(report, "| ready:", native.ready())
"""
EXPLAIN = "report = moefuse.explain(layer, x)"
RUN = "torch.compile(layer, backend='moefuse')(x); report = moefuse.last_report()"


def output(*runs: tuple[str, dict[str, str]]) -> list[str]:
    """What processes say, each with variables of its own; one imports torch for all."""
    return printed(BEFORE, [textwrap.dedent(PROGRAM).format(call=call, variables=variables) for call, variables in runs])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that cannot be made."""
    file = tmp_path_factory.mktemp("slow") / "file"
    file.write_text("")
    return file / "cache"


@pytest.fixture(scope="module")
def said(folder: Path) -> list[str]:
    """Of a folder that cannot be written, without a compiler, and without kernels."""
    empty = folder.parent.parent / "empty"
    empty.mkdir()
    without = {"MOEFUSE_CACHE_DIR": str(empty), "CXX": "no-such-compiler", "PATH": str(empty)}
    left_out = {"MOEFUSE_CACHE_DIR": str(folder), "MOEFUSE_CPU_KERNEL": "0"}
    return output((EXPLAIN, {"MOEFUSE_CACHE_DIR": str(folder)}), (EXPLAIN, without), (EXPLAIN, left_out))


@pytest.mark.thorough
@pytest.mark.skipif(not native.ready(), reason="no working C++ compiler")
def test_a_folder_with_spaces_and_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "my cache's $HOME"
    (text,) = output((EXPLAIN, {"MOEFUSE_CACHE_DIR": str(folder)}))
    assert "ready: True" in text
    assert "  note" not in text
    assert list(folder.glob("cpu-kernels/*.so"))


def told(text: str, folder: Path) -> None:
    """That kernels are not there, with the remedy."""
    assert "fused 1 of 1" in text
    assert (
        "  note    experts on the CPU run without the C++ kernels, and more slowly "
        f"({folder} cannot be written: Not a directory; let MOEFUSE_CACHE_DIR name a folder that can)"
    ) in text
    assert "ready: False" in text


def test_a_folder_that_cannot_be_written_is_in_the_report(said: list[str], folder: Path) -> None:
    told(said[0], folder)


@pytest.mark.thorough
def test_a_folder_that_cannot_be_written_is_in_the_last_report(folder: Path) -> None:
    told(output((RUN, {"MOEFUSE_CACHE_DIR": str(folder)}))[0], folder)


def test_a_missing_compiler_is_in_the_report(said: list[str]) -> None:
    assert "(no C++ compiler: install g++, or let CXX name one)" in said[1]


def test_kernels_that_the_user_left_out_are_no_note(said: list[str]) -> None:
    assert "fused 1 of 1" in said[2]
    assert "  note" not in said[2]
