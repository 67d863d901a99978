"""What subcommands have in common: how they fail, and how they say what they are doing."""

from __future__ import annotations

import sys


class CommandError(Exception):
    """Something that the user can put right; the text says what and how. The command ends with code 2."""


def doing(what: str) -> None:
    """Say what takes its time, to a person at a terminal and to nobody else."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{what} ...\n")
        sys.stderr.flush()
