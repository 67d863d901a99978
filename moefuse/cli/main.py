"""The command line: ``main(argv)`` gives the exit code. 0: done; 1: the answer is no; 2: the command could not be carried out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moefuse._version import __version__
from moefuse.cli import cache, doctor, explain, warmup
from moefuse.cli.command import CommandError


class Command(NamedTuple):
    """A subcommand: what adds its arguments, what carries it out, and what it is for."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    text: str


COMMANDS = {
    "explain": Command(
        explain.arguments, explain.run, "say which mixture-of-experts layers of a model are fused, and what is in the way of the others"
    ),
    "doctor": Command(doctor.arguments, doctor.run, "look whether this machine has what moefuse needs, and how to repair what is missing"),
    "warmup": Command(warmup.arguments, warmup.run, "measure the kernels on this GPU, for a model or for sizes"),
    "cache": Command(cache.arguments, cache.run, "show or remove what moefuse keeps on this machine"),
}


def parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    top = argparse.ArgumentParser(prog="python -m moefuse", description="Fuse mixture-of-experts code under torch.compile.")
    top.add_argument("--version", action="version", version=f"moefuse {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = f"{command.text[0].upper()}{command.text[1:]}."
        command.arguments(commands.add_parser(name, help=command.text, description=text))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words behind ``python -m moefuse``; those of this process by default.

    Returns:
        The exit code.
    """
    arguments = parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except CommandError as error:
        sys.stderr.write(f"python -m moefuse {arguments.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
