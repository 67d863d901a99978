"""The C++ kernels of the experts ops on the CPU: compiled at their first use, once per machine.

They are registered with the dispatcher for CPU tensors, so a compiled model reaches them without any Python. Few slots they compute alone;
for many they leave the GEMMs to torch and do the rest. Calls they are not made for (weights whose strides fit neither storage order,
16-bit GEMMs that the CPU has instructions for) go on to the ops' ``_general`` twins. Without a working compiler everything does: that
costs speed and nothing else.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from moefuse import _torch_private
from moefuse.errors import first_line
from moefuse.machine import cache_folder, environment, slow_paths
from moefuse.ops.meaning.activations import limits_pass
from moefuse.runtime.gemm import WIDENED

log = logging.getLogger(__name__)

SWITCH = "MOEFUSE_CPU_KERNEL"
"""Environment variable; 0 leaves the kernels out."""

FOLDER = "cpu-kernels"
SLOW = "experts on the CPU run without the C++ kernels, and more slowly"

NAMES = (
    "torch_get_num_threads",
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_cpu_mm_out",
    "torch_new_list_reserve_size",
    "torch_list_push_back",
)
"""Functions of libtorch that only these kernels call, in the order of ``Functions`` in kernels/cpu/interface.h."""


@dataclass
class Unit:
    """One library: what is compiled, and whether it is there."""

    sources: tuple[str, ...]
    """Files of kernels/cpu in the order in which they are put together."""
    library: ctypes.CDLL | None = None
    tried: bool = False
    enabled: bool = True
    failure: str = ""


_COMMON = ("../libtorch.h", "vectors.h", "project.h", "activations.h", "body.h", "large.h", "interface.h")
UNITS = {
    "infer": Unit((*_COMMON, "op.h")),
    "train": Unit((*_COMMON, "derivative.h", "backward.h", "train.h")),
}
_lock = threading.Lock()
_max_slots = -1


def source(unit: str) -> str:
    """The C++ text."""
    folder = Path(__file__).parent.parent / "kernels" / "cpu"
    text = "\n".join((folder / name).read_text() for name in UNITS[unit].sources)
    return text if unit == "infer" else f"constexpr bool LIMITS_PASS = {str(limits_pass()).lower()};\n{text}"


def ready(unit: str = "infer") -> bool:
    """Whether the kernel is registered; the first call compiles and registers it, which takes seconds on a machine that never did."""
    it = UNITS[unit]
    if it.tried:
        return it.library is not None
    with _lock:
        if not it.tried:
            try:
                it.library = _load(unit)
            except Exception as error:
                # No compiler, a read-only cache folder, a torch without the interface, ...: all of them mean the same here.
                log.debug("the C++ kernel is not available, experts run in torch: %s", first_line(error))
                it.failure = problem() or first_line(error)
                slow_paths.taken(SLOW, it.failure)
            it.tried = True
    return it.library is not None


def problem(folder: str = FOLDER) -> str | None:
    """What keeps C++ from being compiled and kept in a folder of the cache, as far as that can be told at once; None if nothing does."""
    unusable = cache_folder.problem(folder)
    if unusable is not None:
        return unusable
    try:
        _torch_private.cpp_compiler()
    except Exception:
        return "no C++ compiler: install g++, or let CXX name one"
    return None


def start(unit: str) -> None:
    """Have the kernel ready soon: compile it beside whatever this process does next (a C++ compiler runs in a process of its own)."""
    if UNITS[unit].tried or environment.is_off(SWITCH):
        return
    known = problem()
    if known is None:
        threading.Thread(target=ready, args=(unit,), daemon=True).start()
    else:
        slow_paths.taken(SLOW, known)


def configure(enabled: bool, max_slots: int = -1, unit: str | None = None) -> None:
    """Turn the kernels (or one) on or off, now and when they are loaded later.

    ``max_slots`` (-1: as measured) is the most slots that count as few; given, more of them and training go to the general ops.
    """
    global _max_slots
    _max_slots = max_slots
    for name, it in UNITS.items():
        if unit in (None, name):
            it.enabled = enabled
        _apply(it)


def _apply(unit: Unit) -> None:
    if unit.library is not None:
        unit.library.moefuse_configure(int(unit.enabled), ctypes.c_int64(_max_slots))


def widen(half: bool, bfloat: bool) -> None:
    """Whether float16 and bfloat16 GEMMs run in float32."""
    for unit in UNITS.values():
        if unit.library is not None:
            unit.library.moefuse_widen(int(half), int(bfloat))


def _load(unit: str) -> ctypes.CDLL | None:
    if environment.is_off(SWITCH):
        return None
    functions = _torch_private.libtorch_interface(NAMES)
    library = ctypes.CDLL(str(_torch_private.build_cpp(source(unit), cache_folder.make(FOLDER))))
    error = library.moefuse_register((ctypes.c_void_p * len(functions))(*functions))
    if error:
        raise RuntimeError(f"libtorch refused the kernel (error {error})")
    library.moefuse_widen(int(torch.float16 in WIDENED), int(torch.bfloat16 in WIDENED))
    library.moefuse_configure(int(UNITS[unit].enabled), ctypes.c_int64(_max_slots))
    return library
