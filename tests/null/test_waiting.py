"""The line that says that compiling takes long: on a terminal alone, and never behind its end."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest

from moefuse.report import waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AFTER", 0.05)
    monkeypatch.setattr(waiting, "EVERY", 0.1)


def test_it_is_said_and_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with waiting.told("compiling"):
        time.sleep(0.4)
    lines = stderr.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"moefuse: compiling \(\d+ s so far\)", line) for line in lines)
    time.sleep(0.15)
    assert stderr.getvalue().splitlines() == lines
    assert "moefuse.waiting" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("terminal", [True, False])
def test_silence(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is quick, and where nobody looks; an error inside goes out as it is."""
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with pytest.raises(ValueError, match="inside"):
        _raises(0 if terminal else 0.2)
    assert stderr.getvalue() == ""


def _raises(seconds: float) -> None:
    with waiting.told("compiling"):
        time.sleep(seconds)
        raise ValueError("inside")
