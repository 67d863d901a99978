"""DistributedDataParallel: Dynamo splits a graph at the buckets of gradients, so that they are sent while backward goes on.

Each piece goes to the backend by itself, and an expert loop that is cut is none. So the order is turned round: the backend gets the whole
graph, and what it hands to its compiler is split.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

_CompiledFn = Callable[..., Any]

_splitter: contextvars.ContextVar[Any] = contextvars.ContextVar("moefuse_ddp", default=None)


def splitter_of(compiler_fn: Any) -> Any:
    """The DDPOptimizer that stands between Dynamo and a backend, or None."""
    owner = getattr(compiler_fn, "__self__", None)
    if owner is None:
        return None
    try:
        from torch._dynamo.backends.distributed import DDPOptimizer
    except ImportError:
        return None
    return owner if isinstance(owner, DDPOptimizer) and hasattr(owner, "backend_compile_fn") else None


@contextlib.contextmanager
def split_last(output: Any) -> Iterator[None]:
    """In this block Dynamo gives the whole graph to the backend that it would give pieces to; the backend has to call :func:`in_buckets`.

    Args:
        output: Dynamo's OutputGraph, about to call its compiler.
    """
    compiler_fn = getattr(output, "compiler_fn", None)
    splitter = splitter_of(compiler_fn)
    if splitter is None:
        yield
        return
    token = _splitter.set(splitter)
    output.compiler_fn = splitter.backend_compile_fn
    try:
        yield
    finally:
        output.compiler_fn = compiler_fn
        _splitter.reset(token)


def in_buckets(compiler: Callable[..., _CompiledFn]) -> Callable[..., _CompiledFn]:
    """A compiler that has a graph split first where Dynamo would have split it; ``compiler`` itself outside of :func:`split_last`."""
    splitter = _splitter.get()
    if splitter is None:
        return compiler
    counted = type(splitter).add_param_args

    def add_param_args(bucket: Any, node: Any) -> None:
        # torch counts parameters among the arguments themselves; experts are in lists.
        counted(splitter, bucket, types.SimpleNamespace(args=node.all_input_nodes))

    # One of its own: Dynamo asks the other one again who the backend is, when the compiler has it start the frame anew.
    own = copy.copy(splitter)
    own.backend_compile_fn, own.add_param_args = compiler, add_param_args
    split: Callable[..., _CompiledFn] = own.compile_fn
    return split
