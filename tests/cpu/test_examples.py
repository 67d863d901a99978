"""The examples, each run as its first lines say, with fewer steps; what it prints is what it shows."""

from __future__ import annotations

import ast
import json
import linecache
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BOTH = r"moefuse: fused 2 of 2 MoE layers, 1 graph, 0 graph breaks"
SAID: dict[str, tuple[list[str], str]] = {
    "nanogpt.py": (["--steps", "2"], rf"step 1: loss \d\.\d\d\n{BOTH}"),
    "finetune.py": (["--steps", "4"], rf"loss \d\.\d\d -> \d\.\d\d\n{BOTH}"),
    "lora.py": (["--steps", "2"], r"merged into 8 Parameters, saved and loaded: logits differ by at most \d\.\de-0[6-9]"),
    "server.py": (
        ["--requests", "9"],
        r"compiled: \['model.layers.0.mlp', .*\n9 requests, 1 graph\nmoefuse: fused 2 of 2",
    ),
    "export.py": ([], r"package, 7 tokens: differs by at most \d\.\de-0[7-9]\nmoefuse: fused 1 of 1 MoE layer"),
    "replay.py": (["--steps", "2"], r"'model.layers.1.mlp.experts': \[\[192, 2\]\]"),
    "quantised.py": ([], r"differs by at most \d\.\de-0[7-9]\nmoefuse: fused 1 of 1 MoE layer.*\n.*held as s8"),
}
WITHOUT_CODE = {"finetune.py", "lora.py", "replay.py"}
"""What they show is nothing of Inductor's, and nanogpt.py trains with its code."""
ELSEWHERE = {"demo.py", "expert_parallel.py", "sft.py"}
"""Run by ``make demo``, tests/dist and ``make test-trl``."""
SHORT = 80
"""Lines."""


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAID)
def test_it_shows_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: Any) -> None:
    if name in WITHOUT_CODE:
        request.getfixturevalue("as_traced")
    arguments, said = SAID[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(said, out), out


def test_all_are_run_and_short() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*SAID, *ELSEWHERE}
    long = {file.name for file in EXAMPLES.glob("*.py") if len(file.read_text().splitlines()) > SHORT}
    assert long == {"demo.py", "expert_parallel.py"}


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_notebook() -> None:
    """Its cells give the text that is stored below them; tracebacks of this machine are none of it."""
    cells: list[dict[str, Any]] = json.loads((EXAMPLES / "report.ipynb").read_text())["cells"]
    known: dict[str, Any] = {}
    for number, cell in enumerate(one for one in cells if one["cell_type"] == "code"):
        source, name = "".join(cell["source"]), f"<cell {number + 1}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        body = ast.parse(source).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), known)
        shown = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), known)
        stored = "".join(line for output in cell["outputs"] for line in output.get("data", {}).get("text/plain", []))
        if stored:
            assert _plain(str(shown)) == _plain(stored)
            assert "<html" in shown._repr_html_() or "<div" in shown._repr_html_()


def _plain(text: str) -> str:
    """Without the error that was found, which depends on the machine."""
    return re.sub(r"error [\d.]+", "error", text)
