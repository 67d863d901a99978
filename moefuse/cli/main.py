"""The command line: ``main(argv)`` gives the exit code. 0: done; 1: the answer is no; 2: the command could not be carried out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moefuse._version import __version__
from moefuse.cli import bench, cache, doctor, explain, warmup, words
from moefuse.cli.command import CommandError

RUN = {"explain": explain.run, "bench": bench.run, "doctor": doctor.run, "warmup": warmup.run, "cache": cache.run}


def main(argv: Sequence[str] | None = None, program: str = "python -m moefuse") -> int:
    """Run one command.

    Args:
        argv: the words behind the program's name; those of this process by default.
        program: how the command was called, for help and errors.

    Returns:
        The exit code.
    """
    arguments = words.parser(program, __version__).parse_args(argv)
    try:
        return RUN[arguments.command](arguments)
    except CommandError as error:
        sys.stderr.write(f"{program} {arguments.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
