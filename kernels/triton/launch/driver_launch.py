"""Launching all kernels of a plan with a few foreign calls: the driver reads arguments from memory that was laid out once.

Every argument that the plan fixes is stored once; a call writes the addresses that changed and hands the driver, per kernel, a launch
configuration and an array of pointers to the arguments. No version of Triton is asked for: the machine code itself says how many arguments
of which sizes it takes (its PTX declares them), and where that is not what is laid out here, Triton's own way is taken.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any

from moefuse.kernels.triton.launch.descriptors import Described, TensorMap, element_of
from moefuse.machine import environment

SWITCH = "MOEFUSE_DIRECT_LAUNCH"
"""Environment variable; 0 leaves all launches to Triton."""
_SERIALIZE = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
_POINTER = 8
_MAP = 128

NUMBERS: Mapping[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """The functions of libcuda that are used here.

    Raises:
        NotImplementedError: there is none.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self.launch: Any = library.cuLaunchKernelEx
            self.encode: Any = library.cuTensorMapEncodeTiled
            self._retain, self._make_current = library.cuDevicePrimaryCtxRetain, library.cuCtxSetCurrent
        except (OSError, AttributeError) as error:
            raise NotImplementedError(str(error)) from None

    def enter(self, device: int) -> None:
        """Make the context of a device the current one of this thread, which may have none yet."""
        context = ctypes.c_void_p()
        self._retain(ctypes.byref(context), device)
        self._make_current(context)


@functools.cache
def driver() -> Driver:
    """The driver of this process."""
    return Driver()


def parameters(signature: Sequence[Any], ranks: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
    """(where it is among the Python arguments, its kind) of each argument of the machine code, without the two scratch pointers at the end.

    Arguments that are tuples are passed field by field; (3, 1) is field 1 of argument 3. Kinds: "pointer", "map" (a tensor map), "shape i"
    and "stride i" of a descriptor, or a key of :data:`NUMBERS`. ``ranks``: dimensions of each descriptor in order.
    """
    found: list[tuple[tuple[int, ...], str]] = []
    rank = iter(ranks)

    def visit(kind: Any, at: tuple[int, ...]) -> None:
        if isinstance(kind, tuple):
            for i, part in enumerate(kind):
                visit(part, (*at, i))
        elif kind.startswith("tensordesc"):
            n = next(rank)
            found.extend([(at, "map"), *((at, f"shape {d}") for d in range(n)), *((at, f"stride {d}") for d in range(n))])
        elif kind != "constexpr":
            found.append((at, "pointer" if kind.startswith("*") else kind))

    visit(tuple(signature), ())
    return found


def declared(ptx: str) -> list[int]:
    """Bytes of each argument that a kernel's PTX declares."""
    found = re.search(r"\.entry\s+[\w$.]+\s*\((.*?)\)", ptx, re.DOTALL)
    parts = re.findall(r"\.param\b[^,]*?\.([busf])(\d+)\b[^,]*?(?:\[(\d+)\])?\s*(?:,|$)", found[1] if found else "")
    return [int(bits) // 8 * int(count or 1) for _, bits, count in parts]


def _bytes(kind: str) -> int:
    if kind in NUMBERS:
        return ctypes.sizeof(NUMBERS[kind])
    return {"map": _MAP, "shape": 4}.get(kind.split()[0], _POINTER)


class _Kernel:
    """One launch in the driver's form. ``cell`` gives the address where the plan keeps the pointer, or the number, with a name."""

    def __init__(self, launch: Any, cell: Mapping[str, int], encode: Any) -> None:
        compiled = launch.compiled
        known = compiled.metadata
        signature = list(compiled.src.signature.values())
        metas = list(getattr(known, "tensordesc_meta", None) or [])
        kinds = parameters(signature, [len(arg.shape) for arg in launch.args if isinstance(arg, Described)])
        expected = [*[_bytes(kind) for _, kind in kinds], _POINTER, _POINTER]
        if declared(compiled.asm["ptx"]) != expected or len(metas) != len(launch.descs):
            raise NotImplementedError("the machine code takes its arguments in another form")
        if known.global_scratch_size or known.profile_scratch_size or known.num_ctas != 1 or known.launch_cooperative_grid:
            raise NotImplementedError("a kernel that needs scratch memory or clusters")
        self.maps: list[tuple[int, str, TensorMap]] = []
        self.kept: list[Any] = []
        entries: list[int] = []
        for at, kind in kinds:
            arg = functools.reduce(operator.getitem, at, launch.args)
            if isinstance(arg, str):
                entries.append(cell[arg])
            elif kind == "map":
                meta = metas[len(self.maps)]
                made = TensorMap(arg, element_of(signature[at[0]]), meta, cell[arg.array], encode)
                self.maps.append((len(entries), arg.array, made))
                entries.append(made.tiled.at)
            elif kind.startswith("shape"):
                entries.append(self._keep(ctypes.c_int32(arg.shape[int(kind[-1])])))
            elif kind.startswith("stride"):
                entries.append(self._keep(ctypes.c_int64(arg.strides[int(kind[-1])])))
            else:
                entries.append(self._keep(NUMBERS[kind](arg)))
        none = self._keep(ctypes.c_uint64(0))
        self.params = (ctypes.c_void_p * len(expected))(*entries, none, none)
        attribute = _Attribute(_SERIALIZE, 0, 1)
        threads = (32 * known.num_warps, 1, 1)
        pdl = bool(known.launch_pdl)
        self.config = _Config(launch.grid, threads, known.shared, None, self._keep(attribute) if pdl else None, int(pdl))
        self.function = ctypes.c_void_p(compiled.function)
        self.call = (ctypes.byref(self.config), self.function, self.params, None)

    def _keep(self, value: Any) -> int:
        self.kept.append(value)
        return ctypes.addressof(value)

    def point(self, at: Mapping[str, int]) -> None:
        """Set the tensor maps of this call."""
        for index, name, made in self.maps:
            self.params[index] = made.of(at[name])


class Direct:
    """All launches of one plan. Not reentrant, so a lock keeps threads apart from writing the addresses to the last launch."""

    def __init__(self, launches: Iterable[Any], names: Sequence[str], device: int, lib: Any = None) -> None:
        """Args:
            launches: compiled ones (``launch.Launch``).
            names: the order in which :meth:`run` gets addresses.
            lib: for tests, in the place of :class:`Driver`.

        Raises:
            NotImplementedError: a launch here is of a kind that only Triton's launcher can make; why.
        """
        if environment.is_off(SWITCH):
            raise NotImplementedError(f"{SWITCH}=0")
        self.lib, self.device = lib or driver(), device
        self.names = tuple(names)
        self.cells = (ctypes.c_uint64 * len(names))()
        first = ctypes.addressof(self.cells)
        cell = {name: first + 8 * i for i, name in enumerate(names)}
        try:
            self.kernels = [_Kernel(launch, cell, self.lib.encode) for launch in launches]
        except (AttributeError, LookupError) as error:
            raise NotImplementedError(f"this Triton does not say {error}") from error
        self.calls = [kernel.call for kernel in self.kernels]
        self.mapped = [kernel for kernel in self.kernels if kernel.maps]
        self.pack: Callable[..., None] = Struct(f"{len(names)}Q").pack_into
        self.stream: int | None = None
        self.lock = threading.Lock()

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch everything."""
        launch = self.lib.launch
        with self.lock:
            self.pack(self.cells, 0, *addresses)
            if self.mapped:
                at = dict(zip(self.names, addresses, strict=True))
                for kernel in self.mapped:
                    kernel.point(at)
            if stream != self.stream:
                for kernel in self.kernels:
                    kernel.config.stream = stream
                self.stream = stream
            for i, call in enumerate(self.calls):
                code = launch(*call)
                if code and not i:
                    self.lib.enter(self.device)
                    code = launch(*call)
                if code:
                    raise RuntimeError(f"CUDA error {code} at launch {i} of an experts call")
