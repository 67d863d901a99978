"""Launching all kernels of a plan with a few foreign calls: the driver reads arguments from memory that was laid out once.

Every argument that the plan fixes is stored once; a call writes the addresses that changed and hands the driver, per kernel, a launch
configuration and an array of pointers to the arguments. The order of the arguments is the one of the launcher that Triton 3.6 generates
(``triton/backends/nvidia/driver.py``), which a test compares; with any other version, and whenever the driver declines, Triton's own way is
taken.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any

import triton

from moefuse.kernels.triton.launch.launch import Described, Launch
from moefuse.machine import environment

SWITCH = "MOEFUSE_DIRECT_LAUNCH"
"""Environment variable; 0 leaves all launches to Triton."""
_SUPPORTED = tuple(int(n) for n in triton.__version__.split(".")[:2]) == (3, 6)
_SERIALIZE = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
_MAX_MAPS = 64
"""Tensor maps kept per descriptor; an address that is new makes one, which takes a microsecond."""

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


def driver() -> Any:
    """cuLaunchKernelEx, or None."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    return function


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


class _Kernel:
    """One launch in the driver's form. ``cell`` gives the address where the plan keeps the pointer with a name."""

    def __init__(self, launch: Launch, cell: Mapping[str, int]) -> None:
        compiled = launch.compiled
        metas = list(getattr(compiled.metadata, "tensordesc_meta", None) or [])
        ranks = [len(arg.shape) for arg in launch.args if isinstance(arg, Described)]
        signature = list(compiled.src.signature.values())
        if len(metas) != len(ranks) or any(meta is None for meta in metas) or len(signature) != len(launch.args):
            raise NotImplementedError
        if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size or compiled.metadata.num_ctas != 1:
            raise NotImplementedError
        self.maps: list[tuple[int, Described, Any, dict[int, Any]]] = []
        self.kept: list[Any] = []
        entries: list[int] = []
        for at, kind in parameters(signature, ranks):
            arg: Any = launch.args
            for i in at:
                arg = arg[i]
            if kind == "pointer":
                entries.append(cell[arg])
            elif kind == "map":
                self.maps.append((len(entries), arg, metas[len(self.maps)], {}))
                entries.append(0)
            elif kind.startswith("shape"):
                entries.append(self._keep(ctypes.c_int32(arg.shape[int(kind[-1])])))
            elif kind.startswith("stride"):
                entries.append(self._keep(ctypes.c_int64(arg.strides[int(kind[-1])])))
            else:
                entries.append(self._keep(NUMBERS[kind](arg)))
        none = self._keep(ctypes.c_uint64(0))
        self.params = (ctypes.c_void_p * (len(entries) + 2))(*entries, none, none)
        attribute = _Attribute(_SERIALIZE, 0, 1)
        threads = (32 * compiled.metadata.num_warps, 1, 1)
        pdl = bool(compiled.metadata.launch_pdl)
        self.config = _Config(launch.grid, threads, compiled.metadata.shared, None, self._keep(attribute) if pdl else None, int(pdl))
        self.function = ctypes.c_void_p(compiled.function)
        self.call = (ctypes.byref(self.config), self.function, self.params, None)

    def _keep(self, value: Any) -> int:
        self.kept.append(value)
        return ctypes.addressof(value)

    def point(self, at: Mapping[str, int]) -> None:
        """Set the tensor maps of this call."""
        for index, shown, meta, known in self.maps:
            address = at[shown.array]
            tensor_map = known.get(address)
            if tensor_map is None:
                if len(known) >= _MAX_MAPS:
                    known.clear()
                tensor_map = known[address] = _tensor_map(address, shown.shape, shown.strides, meta)
            self.params[index] = tensor_map[1]


def _tensor_map(address: int, shape: Sequence[int], strides: Sequence[int], meta: Any) -> tuple[Any, int]:
    """(Triton's object, the address of the map in it)."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver as runtime

    kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    made = runtime.active.utils.fill_tma_descriptor(
        address, meta["swizzle"], meta["elem_size"], kind, meta["block_size"], shape, strides, 0
    )
    # A Python object's head, then the map at the next multiple of 128 bytes; the object begins at one.
    if id(made) % 128:
        raise NotImplementedError
    return made, id(made) + 128


class Direct:
    """All launches of one plan. Not reentrant, so a lock keeps threads apart from writing the addresses to the last launch."""

    def __init__(self, launches: Sequence[Launch], names: Sequence[str], function: Any = None) -> None:
        """``names``: the order in which :meth:`run` gets addresses.

        Raises:
            NotImplementedError: a launch here is of a kind that only Triton's launcher can make.
        """
        self.function = function or driver()
        if self.function is None or not _SUPPORTED or environment.is_off(SWITCH):
            raise NotImplementedError
        self.names = tuple(names)
        self.cells = (ctypes.c_uint64 * len(names))()
        first = ctypes.addressof(self.cells)
        cell = {name: first + 8 * i for i, name in enumerate(names)}
        self.kernels = [_Kernel(launch, cell) for launch in launches]
        self.calls = [kernel.call for kernel in self.kernels]
        self.mapped = [kernel for kernel in self.kernels if kernel.maps]
        self.pack: Callable[..., None] = Struct(f"{len(names)}Q").pack_into
        self.stream: int | None = None
        self.lock = threading.Lock()

    def run(self, stream: int, addresses: Sequence[int]) -> bool:
        """Launch everything; False if the driver declined the first launch (then nothing ran)."""
        function = self.function
        with self.lock:
            self.pack(self.cells, 0, *addresses)
            if self.mapped:
                at = dict(zip(self.names, addresses, strict=True))
                try:
                    for kernel in self.mapped:
                        kernel.point(at)
                except NotImplementedError:
                    return False
            if stream != self.stream:
                for kernel in self.kernels:
                    kernel.config.stream = stream
                self.stream = stream
            for i, call in enumerate(self.calls):
                code = function(*call)
                if code:
                    if i == 0:
                        return False
                    raise RuntimeError(f"CUDA error {code} at launch {i} of an experts call")
        return True


def launch_again(it: Launch, stream: int, addresses: Sequence[int]) -> None:
    """A launch that has been compiled, with other arrays: by the driver, or where that cannot be by Triton's launcher."""
    if it.driver is None:
        it.driver = _alone(it)
    if not (it.driver and it.driver.run(stream, addresses)):
        it.again(stream, addresses)


def _alone(it: Launch) -> Direct | bool:
    """The launch by the driver's function, or False."""
    try:
        return Direct([it], it.names)
    except NotImplementedError:
        return False
