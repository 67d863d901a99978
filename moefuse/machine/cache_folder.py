"""Where moefuse keeps what it built on this machine: a folder that only the user can write to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "MOEFUSE_CACHE_DIR"
"""Environment variable that names another folder."""


def root() -> Path:
    """``$MOEFUSE_CACHE_DIR``, else ``$XDG_CACHE_HOME/moefuse``, else ``~/.cache/moefuse``. Need not exist."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moefuse"


def problem(name: str) -> str | None:
    """Why nothing can be kept in the folder ``name``, and what to do; None if it can."""
    try:
        folder = make(name)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except PermissionError as error:
        return str(error) if error.errno is None else _unusable(error)
    except OSError as error:
        return _unusable(error)


def _unusable(error: OSError) -> str:
    return f"{root()} cannot be written: {error.strerror}; let {VARIABLE} name a folder that can"


def make(name: str) -> Path:
    """The folder ``name`` of the cache, made with mode 0700.

    Raises:
        PermissionError: it cannot be made, or others can write to it, so that what lies there cannot be trusted.
    """
    folder = root() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if os.name == "posix" and (info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{folder} belongs to somebody else, or others can write to it; nothing is loaded from there")
    return folder
