"""Every Python block of the documentation runs, top to bottom, and prints what the text says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies import THOROUGH

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
_BLOCK = re.compile(r"^(?P<output><!-- output -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    line: int
    is_output: bool


def blocks(file: str) -> list[Block]:
    """Fenced blocks of a file, with the line that their body starts on."""
    text = (ROOT / file).read_text()
    return [Block(m["language"], m["body"], text.count("\n", 0, m.start("body")), m["output"] is not None) for m in _BLOCK.finditer(text)]


def normal(text: str) -> str:
    """Text without what differs from run to run: places, errors, alignment."""
    text = re.sub(r"\S+\.(py|md):\d+", "FILE:LINE", text)
    text = re.sub(r"error (at most )?[\d.e-]+", "error N", text)
    return "\n".join(re.sub(r" +", " ", line).rstrip() for line in text.strip().splitlines())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("file", [file for file in FILES if any(b.language == "python" for b in blocks(file))])
def test_python_blocks_run(file: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The README's with Inductor's code under HYPOTHESIS_PROFILE=deep: the examples have it in every run."""
    if file != "README.md" or not THOROUGH:
        request.getfixturevalue("as_traced")
        request.getfixturevalue("no_inductor_code")
    # What the text shows is a machine without a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("MOEFUSE_AUTOTUNE")
    # Dynamo imports the module of a function that is called by one of another module.
    module = types.ModuleType("documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace: dict[str, Any] = vars(module)
    printed = ""
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(file):
            if block.is_output:
                assert normal(printed) == normal(block.body), f"{file}:{block.line}"
            if block.language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile("\n" * block.line + block.body, str(ROOT / file), "exec"), namespace)
                printed = out.getvalue()


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_graph_after_is_as_short_as_the_readme_says() -> None:
    from moefuse import Options
    from moefuse.passes.driver import fuse

    namespace: dict[str, Any] = {"__name__": "documentation", "torch": torch}
    body = next(b.body for b in blocks("README.md") if "class MoE" in b.body)
    exec(body.partition("\nlayer, x =")[0], namespace)
    counts: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        for _ in range(2):
            counts.append([n.name for n in gm.graph.nodes if n.op.startswith("call")])
            if len(counts) == 1:
                fuse(gm, example_inputs, Options())
        return gm.forward

    with torch.no_grad():
        torch.compile(namespace["MoE"](), backend=backend, fullgraph=True)(torch.randn(16, 64))
    before, after = counts
    assert f"has {len(before)} operations before" in (ROOT / "README.md").read_text()
    assert after == ["linear", "softmax", "topk", "weights", "ids", "experts_default"]
