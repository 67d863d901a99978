"""Whether this Triton compiles kernels in Gluon, whose names are experimental: asked of Triton, not read from its version.

A kernel in Gluon is compiled before it is first launched. Where that fails, all of them are left for the rest of the process, whoever asked
for the call asks again and gets the kernels of Triton, and a note says what was lost and why.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from moefuse.errors import first_line
from moefuse.kernels.triton.launch import player
from moefuse.machine import slow_paths

LOST = "kernels with specialised warps, and those that multiply packed weights, are not used"
_lost: list[str] = []
"""Why, once one was not compiled."""


@functools.cache
def _missing() -> str | None:
    try:
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError as error:
        return first_line(error)
    return None


def unusable() -> str | None:
    """None, or why kernels in Gluon are not used."""
    return _lost[0] if _lost else _missing()


def compile_first(kernel: Any, grid: Sequence[int], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Compile a kernel in Gluon as a launch would; nothing for other kernels.

    Raises:
        slow_paths.LostError: this Triton does not compile it.
    """
    if not (isinstance(kernel, JITFunction) and kernel.is_gluon()):
        return
    try:
        kernel.warmup(*args, grid=grid, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler that is not ours, in any of its layers
        reason = f"{kernel.__name__}: {first_line(error)}"
        _lost.append(reason)
        player.forget()  # plans that have it
        slow_paths.taken(LOST, reason)
        raise slow_paths.LostError(reason) from error
