"""How those are asked that only explain: reports, diagnosis, names, what warmup remembers. An exception of theirs changes no program.

What is asked is answered, or there is a line in the log, a note in the report, and an answer that says nothing. Errors that a user asked
for (``strict``, ``expect``) and Dynamo's own pass.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from moefuse import _torch_private
from moefuse.errors import FusionError, first_line

log = logging.getLogger("moefuse.backend")

_said: dict[str, None] = {}
_lock = threading.Lock()
_MOST = 20
"""Different failures that are said."""


def quietly(function: Callable[..., Any], *args: Any, otherwise: Any = None, **kwargs: Any) -> Any:
    """What a function that only explains says; ``otherwise`` where it fails."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if isinstance(error, (FusionError, *_torch_private.dynamo_control_flow())):
            raise
        _say(error)
        return otherwise() if callable(otherwise) else otherwise


def guarded(function: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """The function, asked :func:`quietly`."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        return quietly(function, *args, otherwise=otherwise, **kwargs)

    return ask


def notes() -> list[str]:
    """What could not be explained in this process."""
    with _lock:
        return list(_said)


def _say(error: Exception) -> None:
    text = f"moefuse could not explain: {type(error).__name__}: {first_line(error)} (please report it with the logged traceback)"
    with _lock:
        if text in _said or len(_said) >= _MOST:
            return
        _said[text] = None
    log.warning("%s", text, exc_info=error)


class Door:
    """A module whose functions are asked :func:`quietly`. They are looked up when they are asked.

    Args:
        name: of the module, in the package, of which nothing is imported here.
        otherwise: what some of its functions say where they fail; the others say None.
    """

    def __init__(self, name: str, **otherwise: Any) -> None:
        self._name, self._otherwise = name, otherwise

    def __getattr__(self, name: str) -> Any:
        home = importlib.import_module(f"moefuse.{self._name}")
        value = getattr(home, name)
        if isinstance(value, type) or not callable(value):
            return value

        def ask(*args: Any, **kwargs: Any) -> Any:
            otherwise = self._otherwise.get(name)
            return quietly(value, *args, otherwise=(lambda: otherwise(*args)) if callable(otherwise) else otherwise, **kwargs)

        return ask


_torch_private.guard_endings(quietly)
