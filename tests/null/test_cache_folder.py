"""Where compiled kernels lie, and whom moefuse trusts there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from moefuse.machine import cache_folder


def test_the_variable_then_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "mine"))
    assert cache_folder.root() == tmp_path / "mine"
    monkeypatch.delenv(cache_folder.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.root() == tmp_path / "moefuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder.root() == Path.home() / ".cache" / "moefuse"


def test_the_folder_is_the_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    folder = cache_folder.make("kernels")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_folder.make("kernels") == folder


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever can write there could make this process load their library."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    cache_folder.make("kernels").chmod(0o777)
    with pytest.raises(PermissionError, match="others can write to it; nothing is loaded from there"):
        cache_folder.make("kernels")
