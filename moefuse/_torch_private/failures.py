"""What the C++ ops say when a Python op that they fall back to has failed, in a libtorch that keeps no text (before 2.13).

The failure passes through libtorch's C interface as a number. So the Python op leaves the text of its exception here, in the form in which
newer versions give it, and the C++ asks for it (``what`` in kernels/libtorch.h).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any


class _Last(threading.local):
    text = b""
    asked: Any = None
    """Keeps the answer alive until C++ has copied it."""


_last = _Last()


def told(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, whose exceptions leave their text."""

    @functools.wraps(op)
    def kernel(*args: Any, **options: Any) -> Any:
        try:
            return op(*args, **options)
        except BaseException as error:
            _last.text = f"{type(error).__name__}: {error}".encode()
            raise

    return kernel


def _what() -> int:
    """Address of the text of this thread's last failure, once; an empty one if the failure was libtorch's own."""
    _last.asked, _last.text = ctypes.create_string_buffer(_last.text), b""
    return ctypes.addressof(_last.asked)


_callback = ctypes.CFUNCTYPE(ctypes.c_void_p)(_what)


def what() -> int:
    """Address of a function that C++ can ask."""
    return ctypes.cast(_callback, ctypes.c_void_p).value or 0


__all__ = ["told", "what"]
