"""An operation of torch in a record: its arguments as libtorch's C interface takes them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WORD, TENSOR, SOME, LIST = range(4)
"""``Argument`` in player.cpp."""
_CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.float64: 7,
    torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24,
}  # fmt: skip
"""How libtorch numbers dtypes."""
_NUMBERS: Mapping[str, Mapping[Any, int]] = {
    "Layout": {torch.strided: 0},
    "MemoryFormat": {torch.contiguous_format: 0, torch.preserve_format: 1},
}


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype.

    Raises:
        LookupError: it has none here.
    """
    if dtype not in _CODES:
        raise LookupError(f"no number for {dtype}")
    return _CODES[dtype]


def types_of(schema: Any) -> list[str]:
    """The types of an op's arguments, as its schema has them."""
    arguments = str(schema).partition("(")[2].rpartition(") ->")[0]
    return [part.split(" ")[0] for part in arguments.replace("*, ", "").split(", ") if part]


def call(op: Any, args: Sequence[Any], named: dict[str, Any], slot: Callable[[Tensor], int]) -> tuple[tuple[str, str], list[int]]:
    """(namespace::name and overload; how many arguments, and these) of an operation, whose tensors are in slots.

    Raises:
        LookupError: an argument that C++ cannot hand on.
    """
    schema, numbers = op._schema, []
    for i, (argument, of) in enumerate(zip(schema.arguments, types_of(schema), strict=True)):
        value = args[i] if i < len(args) else named.get(argument.name, argument.default_value)
        numbers += _argument(of, value, slot)
    return (schema.name, schema.overload_name), [len(schema.arguments), *numbers]


def _argument(of: str, value: Any, slot: Callable[[Tensor], int]) -> list[int]:
    if of.endswith("?"):
        return [WORD, 0] if value is None else [SOME, *_argument(of[:-1], value, slot)]
    if of.endswith("]"):
        inner = of.rpartition("[")[0]
        return [LIST, len(value), *(n for v in value for n in _argument(inner, v, slot))]
    if isinstance(value, Tensor):
        return [TENSOR, slot(value)]
    return [WORD, _word(of, value)]


def _word(of: str, value: Any) -> int:
    if of == "float":
        return int(struct.unpack("q", struct.pack("d", value))[0])
    if of in ("int", "SymInt", "bool"):
        return int(value)
    if of == "ScalarType":
        return dtype_code(value)
    if value not in (known := _NUMBERS.get(of, {})):
        raise LookupError(f"an argument {of} {value}")
    return known[value]
