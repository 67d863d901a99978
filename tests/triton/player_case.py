"""The C++ that plays records, for CPU tensors: memory comes full of NaN, and the driver's launch runs a kernel in the interpreter, from the
addresses that it is given."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse import _torch_private

ADDRESS = ctypes.c_void_p
NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
ITEM = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 15: 2, 23: 1, 24: 1}


class Memory:
    """libtorch's functions that make and release tensors: which of them the op holds, and how many more there is room for. Results are
    libtorch's in the end, and stay listed."""

    def __init__(self, functions: list[int]) -> None:
        where = {name: i for i, name in enumerate(_torch_private.INTERFACE)}
        what, empty, release = (where[f] for f in (*_torch_private.MAY_LACK, "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object"))
        self.data: Any = ctypes.CFUNCTYPE(ctypes.c_int32, ADDRESS, ctypes.POINTER(ADDRESS))(functions[where["aoti_torch_get_data_ptr"]])
        number, code = ctypes.c_int64, ctypes.c_int32
        kinds: dict[int, Any] = {
            what: ctypes.CFUNCTYPE(ADDRESS),
            empty: ctypes.CFUNCTYPE(
                code, number, ctypes.POINTER(number), ctypes.POINTER(number), code, code, code, ctypes.POINTER(ADDRESS)
            ),
            release: ctypes.CFUNCTYPE(code, ADDRESS),
        }
        ours = {what: self.what, empty: self.empty, release: self.release}
        taken = [i for i in kinds if functions[i]]
        self.real: list[Any] = [kinds[i](functions[i]) if functions[i] else None for i in (what, empty, release)]
        self.callbacks = {i: kinds[i](ours[i]) for i in taken}
        for i in taken:
            functions[i] = ctypes.cast(self.callbacks[i], ADDRESS).value or 0
        self.text = ctypes.create_string_buffer(NO_ROOM.encode())
        self.reset()

    def reset(self) -> None:
        self.alive: set[int] = set()
        self.most = 0
        self.room = 1 << 30
        self.full = False

    def what(self) -> int:
        return ctypes.addressof(self.text) if self.full else int(self.real[0]())

    def empty(self, dim: int, sizes: Any, strides: Any, dtype: int, *rest: Any) -> int:
        self.full = not self.room
        if self.full:
            return 1
        self.room -= 1
        error = int(self.real[1](dim, sizes, strides, dtype, *rest))
        if not error:
            handle = rest[-1][0]
            self.alive.add(handle)
            self.most = max(self.most, len(self.alive))
            at = ADDRESS()
            self.data(handle, ctypes.byref(at))
            if at.value:
                last = sum((n - 1) * step for n, step in zip(sizes[:dim], strides[:dim], strict=True))
                ctypes.memset(at.value, 255, 0 if 0 in sizes[:dim] else (1 + last) * ITEM[dtype])
        return error

    def release(self, handle: int) -> int:
        self.alive.discard(handle)
        return int(self.real[2](handle))


def tensor_at(address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))) * dtype.itemsize
    return torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=dtype).as_strided(shape, strides)


class World:
    """The library over a driver that interprets, and what came to it."""

    def __init__(self) -> None:
        from moefuse.kernels.triton.launch import player, recorded  # noqa: F401  (defines its op)
        from moefuse.kernels.triton.launch.launch import Launch

        functions = _torch_private.libtorch_interface(player.FUNCTIONS)
        self.memory = Memory(functions)
        self.interpret = Launch.run
        code, number = ctypes.c_int32, ctypes.c_uint64
        self.callbacks = (
            ctypes.CFUNCTYPE(code, code, ctypes.POINTER(ADDRESS))(self._stream),
            ctypes.CFUNCTYPE(code, ADDRESS, number, ctypes.POINTER(ADDRESS), ADDRESS)(self._launch),
            ctypes.CFUNCTYPE(code, ADDRESS, code, ctypes.c_uint32, *[ADDRESS] * 5, *[code] * 4)(self._encode),
            ctypes.CFUNCTYPE(code, number, ctypes.c_uint8, ctypes.c_size_t, ADDRESS)(self._fill),
            ctypes.CFUNCTYPE(code, number, number, ctypes.c_size_t, ADDRESS)(self._copy),
            ctypes.CFUNCTYPE(code, ADDRESS, ADDRESS)(lambda event, stream: self._turned(1, event, stream)),
            ctypes.CFUNCTYPE(code, ADDRESS, ADDRESS, ctypes.c_uint32)(lambda stream, event, flags: self._turned(2, event, stream)),
            ctypes.CFUNCTYPE(code)(self._tf32),
        )
        functions += [ctypes.cast(f, ADDRESS).value or 0 for f in self.callbacks]
        self.functions = functions
        self.player = player.Player(functions, "moefuse", "CPU", 0)
        self.native: Callable[[int, int, Any], int] | None = None
        self.played: set[str] = set()
        self.kernels: list[tuple[Any, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.player.forget()
        self.memory.reset()
        self.launched: list[tuple[int, int, list[int]]] = []
        self.python: list[str] = []
        self.filled: list[int] = []
        self.copied: list[int] = []
        self.turned: list[tuple[int, int, int]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.refusals: list[str] = []
        self.errors: list[int] = []
        self.wrong: list[BaseException] = []
        self.refuses_maps = 0
        self.stream, self.tf32 = 7, 0

    @property
    def known(self) -> int:
        return int(self.player.library.moefuse_known())

    def play(self, *ops: str) -> None:
        """Let C++ have these ops until the test is over."""
        for op in ops:
            if op not in self.player.numbers:
                self.player.play(op)
            self.player.enable(op, True)
            self.played.add(op)

    def laid_out(self, it: Any, slots: Any) -> Any:
        """A kernel in the interpreter as a launch: its number in the place of the machine code."""
        from moefuse.kernels.triton.launch import driver_launch

        config = driver_launch._Config((*it.grid,), (32, 1, 1), 0, None, None, 0)
        self.kernels.append((it, it.compiled))
        pairs = [n for slot in slots for n in (driver_launch.SLOT, slot)]
        return driver_launch.Laid([ctypes.addressof(config), len(self.kernels), len(slots), 0, *pairs], [config])

    def _stream(self, device: int, out: Any) -> int:
        out[0] = self.stream
        return 0

    def _launch(self, config: int, function: int, params: Any, extra: Any) -> int:
        try:
            return self._interpreted(config, function, params) if self.native is None else self.native(config, function, params)
        except BaseException as wrong:
            self.wrong.append(wrong)
            return 0

    def _interpreted(self, config: int, function: int, params: Any) -> int:
        from moefuse.kernels.triton.launch.driver_launch import _Config

        it, kinds = self.kernels[function - 1]
        at = [ctypes.c_uint64.from_address(params[i]).value for i in range(len(kinds))]
        self.launched.append((function, _Config.from_address(config).stream, at))
        error = self.errors.pop(0) if self.errors else 0
        if not error:
            self.interpret(it, [tensor_at(address, *kind) for address, kind in zip(at, kinds, strict=True)])
        return error

    def _encode(self, at: int, kind: int, rank: int, begin: int, *rest: Any) -> int:
        self.encoded.append((at, kind, rank, begin, *[(ctypes.c_uint64 * rank).from_address(r)[:] for r in rest[:2]], *rest[4:]))
        return self.refuses_maps

    def _fill(self, at: int, value: int, size: int, stream: Any) -> int:
        self.filled.append(size)
        ctypes.memset(at, value, size)
        return self.errors.pop(0) if self.errors else 0

    def _copy(self, target: int, source: int, size: int, stream: Any) -> int:
        self.copied.append(size)
        ctypes.memmove(target, source, size)
        return 0

    def _turned(self, what: int, event: Any, stream: Any) -> int:
        """An event was recorded (1) on a stream, or a stream waits for it (2)."""
        self.turned.append((what, event or 0, stream or 0))
        return 0

    def _tf32(self) -> int:
        return self.tf32


@functools.cache
def the_world() -> World:
    """One for a process, like the library."""
    return World()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    from moefuse.kernels.triton.launch import player, record, steps
    from moefuse.kernels.triton.launch.launch import Launch

    it, refuse = the_world(), record.Recorder.refuse
    it.reset()
    it.play("recorded")

    def run(self: Launch, tensors: Any) -> None:
        it.python.append(self.kernel.__name__)
        it.interpret(self, tensors)
        self.compiled = [(t.dtype, t.shape, t.stride()) for t in tensors]

    def noted(self: record.Recorder, reason: str) -> None:
        it.refusals.append(reason)
        refuse(self, reason)

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(steps, "laid_out", it.laid_out)
    monkeypatch.setattr(record.Recorder, "refuse", noted)
    monkeypatch.setattr(player, "_player", it.player)
    yield it
    for op in it.played:
        it.player.enable(op, False)
    it.played.clear()
    assert not it.wrong


def unplayed(monkeypatch: pytest.MonkeyPatch, call: Any) -> Any:
    """What it gives without any record."""
    from moefuse.kernels.triton.launch import player

    with monkeypatch.context() as patch:
        patch.setattr(player, "_player", None)
        return call()
