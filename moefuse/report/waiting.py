"""A line on a terminal where compiling takes long, so that nobody takes it for a program that hangs."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

AFTER, EVERY = 10.0, 30.0
"""Seconds until the first line, and between others."""


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Write what is being done to standard error, if that is a terminal, from ten seconds on."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, done), daemon=True, name="moefuse.waiting")
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(what: str, done: threading.Event) -> None:
    begin, pause = time.monotonic(), AFTER
    while not done.wait(pause):
        sys.stderr.write(f"moefuse: {what} ({time.monotonic() - begin:.0f} s so far)\n")
        sys.stderr.flush()
        pause = EVERY
