"""Calls of layers with spread experts that run in pieces, since Dynamo has not made one graph of them: what communicated in them.

Which pieces run depends on a rank's tokens, and so a piece that gathers the weights of one expert has no place in them. All weights are
gathered once in such a call, or experts are fused in one piece of it and tokens travel.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

_made: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("moefuse_made", default=None)


@contextlib.contextmanager
def call() -> Iterator[list[str]]:
    """In this block, a call of a layer: the ops that communicate in it, as they come."""
    made: list[str] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def inside() -> bool:
    """Whether a call of such a layer is running."""
    return _made.get() is not None


def telling(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph with fused experts, which says that it runs: where its ops are played from records, or as a CUDA graph, they do not."""

    def run(*args: Any) -> Any:
        note("experts")
        return compiled(*args)

    return run


def note(op: str) -> None:
    """An op begins to communicate."""
    made = _made.get()
    if made is not None:
        made.append(op)
