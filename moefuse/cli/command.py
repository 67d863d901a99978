"""What subcommands have in common: how they fail, and how they say what they are doing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


class CommandError(Exception):
    """Something that the user can put right; the text says what and how. The command ends with code 2."""


def doing(what: str) -> None:
    """Say what takes its time, to a person at a terminal and to nobody else."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{what} ...\n")
        sys.stderr.flush()


def check_page(path: str) -> None:
    """Said before a model is built and compiled, which may take minutes."""
    file = Path(path).resolve()
    new = not file.exists()
    with writing(path), file.open("a"):
        pass
    if new:
        file.unlink()


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """A file that is written in the block."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
