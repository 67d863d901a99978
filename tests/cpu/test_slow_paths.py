"""What is slower on this machine than it could be is in the report, and a folder with a space in its name is no reason."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moefuse.runtime import native

PROGRAM = """
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


def output(call: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    program = textwrap.dedent(PROGRAM).format(call=call)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.skipif(not native.ready(), reason="no working C++ compiler")
def test_a_folder_with_spaces_and_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "my cache's $HOME"
    text = output(EXPLAIN, MOEFUSE_CACHE_DIR=str(folder))
    assert "ready: True" in text
    assert "  note" not in text
    assert list(folder.glob("cpu-kernels/*.so"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", [EXPLAIN, RUN], ids=["explain", "last_report"])
def test_a_folder_that_cannot_be_written_is_in_the_report(tmp_path: Path, call: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    text = output(call, MOEFUSE_CACHE_DIR=str(folder))
    assert "fused 1 of 1" in text
    assert (
        "  note    experts on the CPU run without the C++ kernels, and more slowly "
        f"({folder} cannot be written: Not a directory; let MOEFUSE_CACHE_DIR name a folder that can)"
    ) in text
    assert "ready: False" in text


def test_a_missing_compiler_is_in_the_report(tmp_path: Path) -> None:
    text = output(EXPLAIN, MOEFUSE_CACHE_DIR=str(tmp_path), CXX="no-such-compiler", PATH=str(tmp_path))
    assert "(no C++ compiler: install g++, or let CXX name one)" in text


def test_kernels_that_the_user_left_out_are_no_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = output(EXPLAIN, MOEFUSE_CACHE_DIR=str(tmp_path / "file" / "cache"), MOEFUSE_CPU_KERNEL="0")
    assert "fused 1 of 1" in text
    assert "  note" not in text
