"""What the C++ ops say when a Python op that they fall back to has failed, and who wants the exception itself.

The failure passes through libtorch's C interface as a number. So the Python op leaves the text of its exception here, in the form in which
versions from 2.13 on give it, and the C++ asks for it (``what`` in kernels/libtorch.h). C++ has no classes but those of libtorch: what
comes out of it is a RuntimeError where an exception was of another class, which :func:`as_raised` takes back.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any


class _Last(threading.local):
    text = b""
    error: BaseException | None = None
    asked: Any = None
    """Keeps the answer alive until C++ has copied it."""


_last = _Last()


def told(op: Callable[..., Any], *, taken: bool = False) -> Callable[..., Any]:
    """The op, whose exceptions leave their text, and themselves for :func:`as_raised`.

    ``taken``: that always stands above the op. Else what is left is a copy: an exception holds the tensors of the frames that it came
    through, and who tries again with fewer tokens would not have their memory.
    """

    @functools.wraps(op)
    def kernel(*args: Any, **options: Any) -> Any:
        try:
            return op(*args, **options)
        except BaseException as error:
            _last.text, _last.error = f"{type(error).__name__}: {error}".encode(), error if taken else _copied(error)
            raise

    return kernel


def _copied(error: BaseException) -> BaseException | None:
    try:
        return copy.copy(error)
    except Exception:  # whatever the class asks for that its arguments do not say
        return None


def as_raised(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose exceptions are those that Python ops raised below the C++ ops in it."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            last, _last.error = _last.error, None
            has_class = (type(error), str(error)) == (type(last), str(last))
            if last is None or has_class or str(last) not in str(error):
                raise
            raise last from None

    return run


def _what() -> int:
    """Address of the text of this thread's last failure, once; an empty one if the failure was libtorch's own."""
    _last.asked, _last.text = ctypes.create_string_buffer(_last.text), b""
    return ctypes.addressof(_last.asked)


_callback = ctypes.CFUNCTYPE(ctypes.c_void_p)(_what)


def what() -> int:
    """Address of a function that C++ can ask."""
    return ctypes.cast(_callback, ctypes.c_void_p).value or 0


__all__ = ["as_raised", "told", "what"]
