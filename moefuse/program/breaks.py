"""Where Dynamo stopped tracing, with the way there: a break deep in a library belongs to the layer of the user that called it."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

TORCH = str(torch.__path__[0]) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Where moefuse is."""
_BETWEEN = (TORCH, *(os.path.join(PACKAGE, *names, "") for names in (("parallel",), ("capture", "dynamo"))))
"""Where torch's own code is: no line of a user's."""

Kind = Literal["", "skipped", "size", "number", "loop", "write", "requires-grad", "hooks"]


@dataclass(frozen=True)
class Stop:
    """One break of a graph.

    Attributes:
        text: ``reason at file:line``.
        reason: Dynamo's, in words.
        stack: the user's stack there as (file, line), outermost first.
        hint: torch's advice, where that is a setting; empty without one.
        changed: what the program was about to change, by the kind of object that Dynamo knows it as; empty if nothing.
        kind: what Dynamo stopped at, of what moefuse has more to say about: a function that is skipped, a size or a number that depends
            on data, a loop around another break, a write in a function that is run again, ``requires_grad_()``, hooks of backward.
    """

    text: str
    reason: str
    stack: tuple[tuple[str, int], ...] = ()
    hint: str = ""
    changed: str = ""
    kind: Kind = ""

    @property
    def by_data(self) -> bool:
        """Whether it is at a size or a number that depends on data, where Dynamo breaks a graph that capture does not take."""
        return self.kind in ("size", "number")

    @property
    def place(self) -> str:
        """Its ``file:line``; empty where nobody knows it."""
        return "{}:{}".format(*self.stack[-1]) if self.stack else ""

    def inside(self, file: str, lines: Collection[int]) -> str | None:
        """The innermost ``file:line`` of the stack that is among some lines of a file."""
        return next((f"{path}:{line}" for path, line in reversed(self.stack) if path == file and line in lines), None)


_LONGEST = 80


def code_at(place: str) -> str:
    """The statement at a ``file:line``, as far as it stands in that line; empty where nobody has the source."""
    path, _, line = place.rpartition(":")
    text = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    text = text.partition("  # ")[0]
    return text if len(text) <= _LONGEST and "`" not in text else f"{text[:_LONGEST].replace('`', '')}.."


_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(\d+)")


def resumed_at(trace: str) -> str:
    """``file:line`` of the graph break behind which a frame goes on, of a stack trace or else of what runs now; empty if there is none."""
    frames = re.findall(r'File "([^"]+)", line \d+, in (torch_dynamo_resume_in_\w+)', trace)
    running = sys._getframe(1)
    while not frames and running is not None:
        if _RESUMED.fullmatch(running.f_code.co_name):
            frames = [(running.f_code.co_filename, running.f_code.co_name)]
        running = running.f_back  # type: ignore[assignment]
    found = _RESUMED.fullmatch(frames[-1][1]) if frames else None
    return "" if found is None else f"{frames[-1][0]}:{found[1]}"


def parsed(path: str) -> ast.Module | None:
    """The source of a file; None where it is none that Python reads."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(256)
def function_at(place: str) -> str:
    """``file:line`` of the innermost function (or class) that a line is in; empty where nobody has the source."""
    path, _, line = place.rpartition(":")
    tree, kinds = parsed(path), (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    spans = [(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, kinds)] if tree is not None else []
    around = [first for first, last in spans if line.isdigit() and first <= int(line) <= last]
    return f"{path}:{max(around)}" if around else ""


def users_place(stack: Sequence[tuple[str, int]]) -> str:
    """The innermost ``file:line`` of a stack that is a user's; empty without one."""
    return next((f"{path}:{line}" for path, line in reversed(stack) if of_the_user(path)), "")


_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "moefuse"}


def is_the_programs(module: str) -> bool:
    """Whether a module, by its name, is neither Python's, nor torch's, NumPy's or moefuse's."""
    return module.partition(".")[0] not in _FOREIGN


def of_the_user(path: str) -> bool:
    """Whether a file is neither torch's nor what moefuse puts between a module and its caller."""
    return not path.startswith(_BETWEEN)


def place_in(trace: str) -> str:
    """``file:line`` of the innermost line of a stack, of those that are not torch's if there are any; empty for an empty stack."""
    parts = [part.partition('", line ') for part in reversed(trace.split('File "')[1:])]
    path, _, rest = next((part for part in parts if of_the_user(part[0])), parts[0] if parts else ("", "", ""))
    return f"{path}:{rest.partition(',')[0]}" if path else ""


__all__ = [
    "PACKAGE",
    "TORCH",
    "Kind",
    "Stop",
    "code_at",
    "function_at",
    "is_the_programs",
    "of_the_user",
    "parsed",
    "place_in",
    "resumed_at",
    "users_place",
]
