"""C++ that is compiled on the user's machine, as Inductor compiles its own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moefuse._torch_private import failures

INTERFACE = (
    "torch_exception_get_what_without_backtrace",
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
)
"""Functions of libtorch that every op in C++ calls, in the order of ``Interface`` in kernels/libtorch.h."""

MAY_LACK = ("torch_exception_get_what_without_backtrace",)
"""Functions that torch 2.13 brought; what calls them does without."""


def build_cpp(source: str, folder: Path) -> Path:
    """The shared library of a C++ text, compiled for this machine with Inductor's compiler and flags unless ``folder`` has it already.

    Raises whatever goes wrong.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, run_compile_cmd
    from torch.utils._filelock import FileLock

    # Inductor compiles without contraction so that its results equal eager's bit for bit; this has no eager counterpart and gains by FMA.
    # Its loops are vectors already: -O3 takes twice as long and gains nothing.
    # Exceptions have their classes in c10, which Inductor does not link: its own C++ throws none of them.
    options = CppTorchOptions(extra_flags=("-ffp-contract=fast", "-g0", "-O2", "-lc10"))
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    key = hashlib.sha256("\0".join((source, command, torch.__version__, _processor())).encode()).hexdigest()[:24]
    target = folder / f"{key}.so"
    if target.exists():
        return target
    with FileLock(str(folder / f"{key}.lock")):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                (Path(scratch) / "kernel.cpp").write_text(source)
                # Inductor splits the command at spaces, and quotes no path: inside the folder none has any.
                builder = CppBuilder(name="kernel", sources="kernel.cpp", BuildOption=options)
                run_compile_cmd(builder.get_command_line(), cwd=scratch)
                os.replace(Path(scratch) / builder.get_target_file_path(), target)
    return target


def inductor_folder() -> str:
    """Where Inductor keeps what it compiled; the folder is made."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses.

    Raises:
        RuntimeError: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def no_compiler() -> str:
    """What to do where Inductor finds no C++ compiler."""
    from torch._inductor import config

    searched = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else [config.cpp.cxx]
    tried = ", ".join(str(name) for name in searched if name)
    return (
        f"Inductor has C++ to compile for what this graph computes, and there is no C++ compiler (tried: {tried}): "
        "install g++ (apt-get install g++), or let CXX name a compiler"
    )


def file_lock(path: Path) -> contextlib.AbstractContextManager[Any]:
    """A lock between processes; the file stays."""
    from torch.utils._filelock import FileLock

    lock: contextlib.AbstractContextManager[Any] = FileLock(str(path))
    return lock


def _processor() -> str:
    """What -march=native depends on, as far as it can be read without a compiler."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def libtorch_interface(own: Sequence[str]) -> list[int]:
    """The table of functions for an op in C++: those of ``INTERFACE``, ``failures.py`` for the text where libtorch keeps none, and its own.

    Raises as ``libtorch_functions``.
    """
    return [address or failures.what() for address in libtorch_functions((*INTERFACE, *own))]


def libtorch_functions(names: Sequence[str], part: str = "torch_cpu") -> list[int]:
    """Addresses of functions of libtorch's C interface in one of its libraries; 0 for one of ``MAY_LACK`` that this libtorch has not.

    Raises:
        AttributeError: this libtorch has no such function.
        OSError: libtorch is not where it usually is.
    """
    folder = Path(torch.__file__).parent / "lib"
    name = {"darwin": f"lib{part}.dylib", "win32": f"{part}.dll"}.get(sys.platform, f"lib{part}.so")
    library = ctypes.CDLL(str(folder / name))
    return [_address(library, function) for function in names]


def _address(library: ctypes.CDLL, function: str) -> int:
    if function in MAY_LACK and not hasattr(library, function):
        return 0
    return ctypes.cast(getattr(library, function), ctypes.c_void_p).value or 0
