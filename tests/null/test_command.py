"""The command ``moefuse``: help without torch, and otherwise what ``python -m moefuse`` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import moefuse
from moefuse.cli import words

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import sys
import moefuse_command

for line in sys.stdin.read().splitlines():
    sys.argv[1:] = line.split()
    try:
        moefuse_command.main()
    except SystemExit as stopped:
        print("code", stopped.code, sorted({"torch", "moefuse", "numpy"} & sys.modules.keys()))
"""
"""What the script that pip writes does, for several lines of words in one process."""


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, cwd=ROOT, input="\n".join(lines), capture_output=True, text=True, timeout=120, check=True)


def test_help_and_wrong_words_need_no_torch() -> None:
    lines = ["--help", "--version", *(f"{name} --help" for name in words.COMMANDS), "explane"]
    said = run(*lines)
    assert [line for line in said.stdout.splitlines() if line.startswith("code")] == ["code 0 []"] * (len(lines) - 1) + ["code 2 []"]
    assert f"moefuse {moefuse.__version__}\n" in said.stdout
    assert said.stdout.startswith("usage: moefuse [-h]"), "not the name of python -m"
    assert "usage: moefuse warmup" in said.stdout
    assert "invalid choice: 'explane'" in said.stderr


def test_the_rest_is_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import moefuse_command

    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/moefuse", "explain", "my_models"])
    assert moefuse_command.main() == 2
    assert capsys.readouterr().err.startswith("moefuse explain: 'my_models' names nothing to build")
