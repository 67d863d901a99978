"""Ops on CUDA without Python: the C++ of ``player.cpp`` plays the records that ``record.py`` makes.

A Python op costs some 20 microseconds of the host before its first launch, most of them in the dispatcher's way to Python and back, and
what works out its launches many times that. The C++ is compiled at the first use on a machine, beside whatever the process does, by the
compiler that Inductor uses; until it is there, and without one, the Python ops do the same. ``MOEFUSE_DIRECT_LAUNCH=0`` leaves it out.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from moefuse import _torch_private
from moefuse.errors import first_line
from moefuse.kernels.triton.launch.driver_launch import SWITCH, driver
from moefuse.kernels.triton.launch.operations import types_of
from moefuse.machine import cache_folder, environment, slow_paths
from moefuse.runtime import native, providers
from moefuse.runtime.rounding import tf32_allowed

log = logging.getLogger(__name__)

FUNCTIONS = (
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "aoti_torch_get_current_device_index",
    "aoti_torch_get_storage_offset",
    "aoti_torch__reinterpret_tensor",
    "aoti_torch_new_tensor_handle",
    "torch_new_list_reserve_size",
    "torch_list_push_back",
    "torch_string_length",
    "torch_string_c_str",
    "torch_delete_string",
)
"""Functions of libtorch that only this calls, in the order of ``Functions`` in player.cpp; behind them come the stream's, six of the
driver and ours."""

FOLDER = "cuda-launch"
SLOW = "ops on CUDA devices are launched from Python, which takes longer"
NAMESPACE, TWIN = "moefuse", "_general"
"""Ops that have a twin of that name are played; their Python is the twin's."""
KINDS = {"Tensor": "T", "int": "w", "SymInt": "w", "float": "w", "bool": "b", "ScalarType": "d", "str": "s"}
"""How player.cpp reads an argument, by its type in a schema."""


class Player:
    """The compiled library: it plays ops of one namespace. To make one raises whatever goes wrong."""

    def __init__(self, functions: Sequence[int], name: str, dispatch: str, device_type: int) -> None:
        here = Path(__file__).parent
        text = "\n".join(path.read_text() for path in (here.parent.parent / "libtorch.h", here / "player.cpp"))
        self.library = ctypes.CDLL(str(_torch_private.build_cpp(text, cache_folder.make(FOLDER))))
        self.library.moefuse_asked.restype = ctypes.c_void_p
        self.library.moefuse_known.restype = ctypes.c_int64
        self.library.moefuse_start((ctypes.c_void_p * len(functions))(*functions), device_type)
        self.name, self.dispatch = name, dispatch
        self.numbers: dict[str, int] = {}
        self.kept: list[Any] = []

    def play(self, op: str) -> None:
        """From now on the dispatcher runs an op in C++, which asks its ``_general`` twin for what it does not know.

        Raises:
            RuntimeError: libtorch refused.
        """
        given = "".join(map(_kind, types_of(getattr(getattr(torch.ops, self.name), op).default._schema)))
        number = self.library.moefuse_play(self.name.encode(), op.encode(), self.dispatch.encode(), given.encode())
        if number < 0:
            raise RuntimeError(f"libtorch refused the kernel of {op} (error {-number})")
        self.numbers[op] = number

    def enable(self, op: str, enabled: bool) -> None:
        """Whether an op has records, or is its twin's always."""
        if op in self.numbers:
            self.library.moefuse_enable(self.numbers[op], int(enabled))

    def plays(self, op: str, t: torch.Tensor) -> bool:
        """Whether this tensor's calls of an op come here."""
        return op in self.numbers and t.device.type == self.dispatch.lower()

    def asked(self) -> int | None:
        """The kind of the call that C++ has just handed to this thread, if it wants a record of it, for :meth:`remember`."""
        kind: int | None = self.library.moefuse_asked()
        return kind

    def remember(self, kind: int, numbers: Sequence[int] | None, names: Sequence[str] = (), kept: Any = None) -> None:
        """The record of a kind as ``Recorder.finish`` writes it, or None: there is none. ``kept``: memory that it launches from, for good,
        since a launch may be under way whenever it is forgotten."""
        texts = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        words = None if numbers is None else (ctypes.c_int64 * len(numbers))(*numbers)
        self.kept.append(kept)
        self.library.moefuse_record(ctypes.c_void_p(kind), words, texts)

    def decline(self, kind: int) -> None:
        """No record this time."""
        self.library.moefuse_decline(ctypes.c_void_p(kind))

    def forget(self) -> None:
        """Forget all records."""
        self.library.moefuse_forget()


def _kind(of: str) -> str:
    if of.endswith("?"):
        return "?" + _kind(of[:-1])
    if of.endswith("[]"):
        return "[" + _kind(of[:-2])
    return KINDS[of.partition("(")[0]]


_Dict = TypeVar("_Dict", bound=dict[Any, Any])
_until_forgotten: list[dict[Any, Any]] = []
_player: Player | None = None
_tried = False
_lock = threading.Lock()


def active() -> Player | None:
    """Who plays records in this process, once it is there."""
    return _player


def start() -> None:
    """Have it ready soon, once per process."""
    global _tried
    if _tried:
        return
    with _lock:
        if _tried or environment.is_off(SWITCH):
            return
        _tried = True
    threading.Thread(target=_start, daemon=True).start()


def _start() -> None:
    global _player
    try:
        functions = _torch_private.libtorch_interface(FUNCTIONS)
        functions += _torch_private.libtorch_functions(["aoti_torch_get_current_cuda_stream"], "torch_cuda")
        it, own = driver(), _callback()
        functions += [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (it.launch, it.encode, it.fill, it.copy, it.note, it.wait, own)]
        player = Player(functions, NAMESPACE, "CUDA", 1)
        player.kept.append(own)
        for twin in _torch_private.names_of_ops(NAMESPACE):
            if twin.endswith(TWIN):
                op = twin.removesuffix(TWIN)
                player.play(op)
                player.enable(op, providers.is_ours(op))
        _player = player
    except Exception as error:
        # No compiler, a read-only cache folder, a torch without the interface, ...: the Python ops stay.
        log.debug("ops on CUDA are launched from Python: %s", first_line(error))
        slow_paths.taken(SLOW, native.problem(FOLDER) or first_line(error))


def _callback() -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: int(tf32_allowed()))


def configure() -> None:
    """Whose ops may be played, now that providers are what they are."""
    if _player is not None:
        for op in _player.numbers:
            _player.enable(op, providers.is_ours(op))


def until_forgotten(made: _Dict) -> _Dict:
    """A dictionary that is emptied where records are forgotten."""
    _until_forgotten.append(made)
    return made


def forget() -> None:
    """Forget all records."""
    for made in _until_forgotten:
        made.clear()
    if _player is not None:
        _player.forget()
