"""``moefuse::experts_infer`` on CUDA without Python: the C++ of ``dispatcher.cpp`` launches the plans that are remembered here.

A Python op costs some 20 microseconds of the host before its first launch, most of them in the dispatcher's way to Python and back. The C++
is compiled at the first use on a machine, beside whatever the process does, by the compiler that Inductor uses; until it is there, and
without one, the Python op of ``provide/experts.py`` does the same. ``MOEFUSE_DIRECT_LAUNCH=0`` leaves it out.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.errors import first_line
from moefuse.kernels.triton.launch.driver_launch import SWITCH, Direct, driver
from moefuse.machine import cache_folder, environment, slow_paths

log = logging.getLogger(__name__)

FUNCTIONS = ("aoti_torch_get_device_index", "aoti_torch_get_current_device_index")
"""Functions of libtorch that only this calls, in the order of ``Functions`` in dispatcher.cpp; behind them come the stream's and two of
the driver."""

FOLDER = "cuda-launch"
SLOW = "experts on CUDA devices are launched from Python, which takes longer"

CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15,
}  # fmt: skip
"""How libtorch numbers the dtypes that a call may have."""

_library: ctypes.CDLL | None = None
_tried = False
_lock = threading.Lock()
_kept: list[Any] = []
"""Memory that plans launch from, with the tables of addresses that are theirs."""


def load(functions: Sequence[int], name: str, dispatch: str, op: str, fallback: str, device_type: int) -> ctypes.CDLL:
    """The compiled library, registered for ``name::op`` on tensors of ``dispatch``; calls that it does not know go to ``name::fallback``.

    Raises whatever goes wrong.
    """
    here = Path(__file__).parent
    text = "\n".join(path.read_text() for path in (here.parent.parent / "libtorch.h", here / "dispatcher.cpp"))
    library = ctypes.CDLL(str(_torch_private.build_cpp(text, cache_folder.make(FOLDER))))
    table = (ctypes.c_void_p * len(functions))(*functions)
    error = library.moefuse_register(table, name.encode(), dispatch.encode(), op.encode(), fallback.encode(), device_type)
    if error:
        raise RuntimeError(f"libtorch refused the kernel (error {error})")
    return library


def start() -> None:
    """Have the library ready soon, once per process."""
    global _tried
    if _tried:
        return
    with _lock:
        if _tried or environment.is_off(SWITCH):
            return
        _tried = True
    threading.Thread(target=_start, daemon=True).start()


def _start() -> None:
    global _library
    try:
        functions = _torch_private.libtorch_interface(FUNCTIONS)
        functions += _torch_private.libtorch_functions(["aoti_torch_get_current_cuda_stream"], "torch_cuda")
        functions += [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (driver().launch, driver().encode)]
        library = load(functions, "moefuse", "CUDA", "experts_infer", "experts_infer_general", 1)
    except Exception as error:
        # No compiler, a read-only cache folder, a torch without the interface, ...: the Python op stays.
        log.debug("experts are launched from Python: %s", first_line(error))
        slow_paths.taken(SLOW, cache_folder.problem(FOLDER) or first_line(error))
        return
    _library = library


def ready() -> bool:
    """Whether plans can be handed over."""
    return _library is not None


def key_of(
    tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype
) -> tuple[int, ...] | None:
    """What ``describe`` in dispatcher.cpp makes of a call; None if a dtype has no number here."""
    if out_dtype not in CODES or any(t.dtype not in CODES for t in tensors):
        return None
    words = [body, *struct.unpack("2q", struct.pack("2d", arg0, arg1)), CODES[out_dtype], *counts]
    separate = [False] * (len(tensors) - sum(counts)) + [n > 1 for n in counts for _ in range(n)]
    for t, whole in zip(tensors, separate, strict=True):
        address = t.data_ptr()
        words += [CODES[t.dtype] << 8 | t.dim(), address if whole else address & 15, *t.shape, *t.stride()]
    return (*words, tensors[0].get_device())


def remember(
    key: tuple[int, ...] | None,
    plan: Any,
    positions: Sequence[int],
    tables: Mapping[int, Tensor] | None = None,
    library: ctypes.CDLL | None = None,
    lib: Any = None,
) -> bool:
    """Hand over a plan that launches directly; False if that cannot be done.

    ``positions``: of its inputs among the call's tensors; ``tables``: what takes the place of an input, by the index of that input: the
    device's table of the addresses of separate Parameters, which is kept for good.
    """
    library = library or _library
    # float32 depends on a global switch as well, and lists of unequal strides are stacked in Python.
    if key is None or library is None or plan.dtype == torch.float32 or any(plan.stacked):
        return False
    try:
        # Its own memory: Python and C++ guard what they write with different locks.
        direct = Direct(plan.steps, plan.names, plan.index, lib)
    except NotImplementedError:
        return False
    sections = [offset for offset, _, _ in plan.workspace.parts.values()]
    launches = [
        address
        for kernel in direct.kernels
        for address in (ctypes.addressof(kernel.config), kernel.function.value or 0, ctypes.addressof(kernel.params))
    ]
    numbers = [plan.tokens, plan.out, plan.workspace.size, CODES[plan.out_dtype], CODES[torch.uint8]]
    constants = [table.data_ptr() for table in (tables or {}).values()]
    places = list(positions)
    for k, at in enumerate(tables or ()):
        places[at] = -1 - k
    maps = [ctypes.addressof(made.tiled) for kernel in direct.mapped for _, _, made in kernel.maps]
    counts = [len(places), len(sections), len(constants), len(direct.kernels), len(maps)]
    numbers += [*counts, *places, *sections, *constants, *launches, *maps]
    words = (ctypes.c_uint64 * len(key))(*(word & 0xFFFFFFFFFFFFFFFF for word in key))
    _kept.append((direct, tables))
    library.moefuse_remember(words, ctypes.c_int64(len(key)), (ctypes.c_int64 * len(numbers))(*numbers), direct.cells)
    return True


def forget() -> None:
    """Forget all plans; the memory that they launch from stays, since a launch may be under way."""
    if _library is not None:
        _library.moefuse_forget()
