"""A kernel that Triton has compiled, as the driver launches it: its configuration, and where each argument of the machine code comes from.

What a launch fixes is stored once; addresses and tensor maps are those of each call (``player.cpp``). No version of Triton is asked for:
the machine code itself says how many arguments of which sizes it takes (its PTX declares them), and where that is not what is laid out
here, Triton's own way is taken.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moefuse.kernels.triton.launch.descriptors import Described, element_of, tiled
from moefuse.machine import environment

SWITCH = "MOEFUSE_DIRECT_LAUNCH"
"""Environment variable; 0 leaves all launches to Triton."""
_SERIALIZE = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
_POINTER = 8
_MAP = 128
MEMORY, SLOT, MADE = range(3)
"""``From`` in player.cpp: memory that stays as it is, the address in a slot, a tensor map."""

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
            self.fill: Any = library.cuMemsetD8Async
            self.copy: Any = library.cuMemcpyDtoDAsync_v2
            self.note: Any = library.cuEventRecord
            self.wait: Any = library.cuStreamWaitEvent
        except (OSError, AttributeError) as error:
            raise NotImplementedError(str(error)) from None


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


class Laid(NamedTuple):
    """A launch in numbers (player.cpp has their order), and the memory that they point to."""

    numbers: list[int]
    kept: list[Any]


def laid_out(launch: Any, slots: Sequence[int]) -> Laid:
    """A compiled launch (``launch.Launch``), whose arrays begin at the addresses in these slots.

    Raises:
        NotImplementedError: only Triton's launcher can make it; why.
    """
    if environment.is_off(SWITCH):
        raise NotImplementedError(f"{SWITCH}=0")
    if launch.compiled is None:
        raise NotImplementedError("Triton did not say what it compiled")
    try:
        return _laid_out(launch, dict(zip(launch.names, slots, strict=True)))
    except (AttributeError, LookupError) as error:
        raise NotImplementedError(f"this Triton does not say {error}") from error


def _laid_out(launch: Any, slot: Mapping[str, int]) -> Laid:
    compiled, known = launch.compiled, launch.compiled.metadata
    signature = list(compiled.src.signature.values())
    metas = list(getattr(known, "tensordesc_meta", None) or [])
    kinds = parameters(signature, [len(arg.shape) for arg in launch.args if isinstance(arg, Described)])
    expected = [*[_bytes(kind) for _, kind in kinds], _POINTER, _POINTER]
    if declared(compiled.asm["ptx"]) != expected or len(metas) != len(launch.descs):
        raise NotImplementedError("the machine code takes its arguments in another form")
    if known.global_scratch_size or known.profile_scratch_size or known.num_ctas != 1 or known.launch_cooperative_grid:
        raise NotImplementedError("a kernel that needs scratch memory or clusters")
    kept: list[Any] = []
    params: list[int] = []
    maps: list[int] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return ctypes.addressof(value)

    for at, kind in kinds:
        arg = functools.reduce(operator.getitem, at, launch.args)
        if isinstance(arg, str):
            params += SLOT, slot[arg]
        elif kind == "map":
            params += MADE, len(maps) // 2
            maps += slot[arg.array], keep(tiled(arg, element_of(signature[at[0]]), metas[len(maps) // 2]))
        elif kind.startswith("shape"):
            params += MEMORY, keep(ctypes.c_int32(arg.shape[int(kind[-1])]))
        elif kind.startswith("stride"):
            params += MEMORY, keep(ctypes.c_int64(arg.strides[int(kind[-1])]))
        else:
            params += MEMORY, keep(NUMBERS[kind](arg))
    none = keep(ctypes.c_uint64(0))
    params += MEMORY, none, MEMORY, none
    pdl = bool(known.launch_pdl)
    attribute = keep(_Attribute(_SERIALIZE, 0, 1)) if pdl else None
    config = keep(_Config(launch.grid, (32 * known.num_warps, 1, 1), known.shared, None, attribute, int(pdl)))
    return Laid([config, compiled.function, len(params) // 2, len(maps) // 2, *params, *maps], kept)
