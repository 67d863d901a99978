"""Operators of libraries that multiply quantised weights: what each means, by its name and its whole signature.

Namespaces have the hash of a build, so the last part of a name counts, and all arguments by name and type: another version that means
something else has others. None of it is taken on trust: every rewrite is compared with the operator itself (``prove/verify.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moefuse import _torch_private
from moefuse.ops.meaning.encoding import MADE, POWERS, Encoding, Packing, Rounding

By = Literal["one", "ids", "ends"]
"""Rows meet the one weight that is given; the weights of their ids; or those of the experts whose rows end there."""
Scheme = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], Encoding | None]
"""From storage, scales and blocks to the encoding; None for what the operator does not take."""

_FLOAT8, _SCALES = torch.float8_e4m3fn, {torch.float32: "", torch.float8_e8m0fnu: POWERS, torch.uint8: POWERS}
_MX = 32


@dataclass(frozen=True)
class Operator:
    """An operator that multiplies ``rows`` by ``storage`` times ``scale``.

    Attributes:
        by: which weight a row meets.
        signature: names and types of its arguments. The rows are A, the storage B, its scales Bs.
        scheme: how the weights are held.
        beyond: what it does besides, which no op of moefuse does; empty if there is nothing.
    """

    by: By
    signature: tuple[tuple[str, str], ...]
    scheme: Scheme
    beyond: str = ""

    def arguments(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments by name, if the target has this signature and changes nothing."""
        return arguments(self.signature, target, args, kwargs)


_TYPES = {
    "Tensor": "tensor", "Optional[Tensor]": "tensor?", "List[int]": "ints", "int": "int", "str": "text", "Optional[int]": "dtype",
    "Optional[ScalarType]": "dtype",
}  # fmt: skip


def arguments(
    signature: tuple[tuple[str, str], ...], target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments by name, if the target has this signature and changes nothing."""
    schema = _schema(target)
    if schema is None or schema.is_mutable or [str(r.type) for r in schema.returns] != ["Tensor"]:
        return None
    if tuple((a.name, _TYPES.get(str(a.type), "")) for a in schema.arguments) != signature:
        return None
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given = defaults | dict(zip((name for name, _ in signature), args, strict=False)) | dict(kwargs)
    return given if len(given) == len(signature) else None


def _schema(target: Any) -> torch.FunctionSchema | None:
    if isinstance(target, _torch_private.OpOverloadPacket):
        target = target.default if target.overloads() == ["default"] else None
    return target._schema if isinstance(target, _torch_private.OpOverload) else None


def _blocks(storage: torch.Tensor, scale: torch.Tensor, block: Sequence[int]) -> Encoding | None:
    """Scales of blocks, float32 or powers of two; activations by as many inputs as a block has."""
    kind = _SCALES.get(scale.dtype)
    if storage.dtype != _FLOAT8 or kind is None or len(block) != 2 or min(block) < 1:
        return None
    return Encoding("e4m3", (block[0], block[1]), scale=kind, activation=Rounding("e4m3", block[1]))


def _tensors(storage: torch.Tensor, scale: torch.Tensor, block: Sequence[int]) -> Encoding | None:
    """One scale for a matrix, and one for a token."""
    known = storage.dtype == _FLOAT8 and scale.dtype == torch.float32
    return Encoding("e4m3", (0, 0), activation=Rounding("e4m3")) if known else None


def _mx(storage: torch.Tensor, scale: torch.Tensor, block: Sequence[int]) -> Encoding | None:
    """Powers of two for 32 inputs, of activations too; weights in eight bits, or in four, two of them in a number."""
    if _SCALES.get(scale.dtype) != POWERS or storage.dtype not in (_FLOAT8, torch.int8):
        return None
    rounding = Rounding("e4m3", _MX, power=True)
    if storage.dtype == _FLOAT8:
        return Encoding("e4m3", (1, _MX), scale=POWERS, activation=rounding)
    return Encoding(MADE["e2m1"], (1, _MX), scale=POWERS, packing=Packing(1, (0, 4)), activation=rounding)


def _operators() -> dict[str, Operator]:
    operands = (("A", "tensor"), ("B", "tensor"), ("Bs", "tensor"))
    rows: dict[By, tuple[tuple[str, str], ...]] = {
        "one": (),
        "ids": (("expert_ids", "tensor"),),
        "ends": (("offsets", "tensor"), ("tokens_per_expert", "tensor")),
    }
    suffixes: dict[By, str] = {"one": "", "ids": "_batched", "ends": "_grouped"}
    kinds = (
        ("w8a8_block_dynamic_fp8_matmul", (("block_size", "ints"),), _blocks),
        ("w8a8_tensor_dynamic_fp8_matmul", (), _tensors),
        ("mxfp_dynamic_matmul", (), _mx),
    )
    found = {
        name + suffixes[by]: Operator(by, (*operands, *given, *block, ("output_dtype", "dtype")), scheme)
        for name, block, scheme in kinds
        for by, given in rows.items()
    }
    static = (*operands, ("As", "tensor"), ("block_size", "ints"), ("output_dtype", "dtype"))
    found["w8a8_block_static_fp8_matmul"] = Operator("one", static, _blocks, "rows are rounded with a scale that the model holds")
    return found


OPERATORS = _operators()
"""The last part of a name -> what it means."""


__all__ = ["OPERATORS", "By", "Operator", "Scheme", "arguments"]
