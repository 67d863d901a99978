"""The C++ kernel of ``moefuse::experts_infer`` on the CPU: compiled at its first use, once per machine.

It is registered with the dispatcher for CPU tensors, so a compiled model reaches it without any Python. Few slots it computes alone; for
many it leaves the GEMMs to torch and does the rest. Calls it is not made for (weights whose strides fit neither storage order, 16-bit
GEMMs that the CPU has instructions for) go on to ``moefuse::experts_general``. Without a working compiler everything
does: that costs speed and nothing else.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path

import torch

from moefuse import _torch_private
from moefuse.runtime.gemm import WIDENED

log = logging.getLogger(__name__)

SOURCES = ("vectors.h", "project.h", "activations.h", "body.h", "large.h", "op.h")
"""Files of kernels/cpu in the order in which they are put together."""
SWITCH = "MOEFUSE_CPU_KERNEL"
"""Environment variable; 0 leaves the kernel out."""

NAMES = (
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "torch_list_size",
    "torch_list_get_item",
    "torch_delete_list",
    "torch_call_dispatcher",
    "aoti_torch_library_init_impl",
    "torch_library_impl",
    "torch_get_num_threads",
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_cpu_mm_out",
)
"""Functions of libtorch that the kernel calls, in the order of ``Interface`` in kernels/cpu/op.h."""

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_tried = False
_settings = (True, -1)


def source() -> str:
    """The C++ text."""
    folder = Path(__file__).parent.parent / "kernels" / "cpu"
    return "\n".join((folder / name).read_text() for name in SOURCES)


def ready() -> bool:
    """Whether the kernel is registered; the first call compiles and registers it, which takes seconds on a machine that never did."""
    global _library, _tried
    if _tried:
        return _library is not None
    with _lock:
        if not _tried:
            try:
                _library = _load()
            except Exception as error:
                # No compiler, a read-only cache folder, a torch without the interface, ...: all of them mean the same here.
                log.debug("the C++ kernel is not available, experts run in torch: %s", str(error).strip().split("\n")[0])
            _tried = True
    return _library is not None


def configure(enabled: bool, max_slots: int = -1) -> None:
    """Turn the kernel on or off, now and when it is loaded later; ``max_slots`` (-1: as measured) is the most slots that count as few."""
    global _settings
    _settings = (enabled, max_slots)
    if _library is not None:
        _library.moefuse_configure(int(enabled), ctypes.c_int64(max_slots))


def _load() -> ctypes.CDLL | None:
    if os.environ.get(SWITCH) == "0":
        return None
    functions = _torch_private.libtorch_functions(NAMES)
    library = _torch_private.load_cpp(source())
    error = library.moefuse_register((ctypes.c_void_p * len(functions))(*functions))
    if error:
        raise RuntimeError(f"libtorch refused the kernel (error {error})")
    library.moefuse_widen(int(torch.float16 in WIDENED), int(torch.bfloat16 in WIDENED))
    library.moefuse_configure(int(_settings[0]), ctypes.c_int64(_settings[1]))
    return library
