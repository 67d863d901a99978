"""What Gluon calls by other names from one Triton to the next; all else that the kernels use of it has one name from 3.6 on."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def view_as(buffers: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Buffers in shared memory as others of the same bytes: ``reinterpret``, which had an underscore up to 3.8."""
    reinterpret = getattr(buffers, "reinterpret", None) or buffers._reinterpret
    return reinterpret(dtype, shape, layout, _semantic=_semantic)


@builtin
def wait_for_block(_semantic: Any = None) -> None:
    """All threads of the program arrive here: ``thread_barrier``, which is ``barrier`` from 3.8 on."""
    (getattr(gl, "thread_barrier", None) or gl.barrier)(_semantic=_semantic)


@builtin
def load_block(desc: Any, at: Any, barrier: Any, to: Any, pred: Any = True, _semantic: Any = None) -> None:
    """A block of a tensor into shared memory by the copy engine: ``async_load``, which was ``async_copy_global_to_shared``."""
    copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    copy(desc, at, barrier, to, pred=pred, _semantic=_semantic)


@builtin
def write_block(desc: Any, at: Any, block: Any, _semantic: Any = None) -> None:
    """And back: ``async_store``, which was ``async_copy_shared_to_global``."""
    copy = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    copy(desc, at, block, _semantic=_semantic)
