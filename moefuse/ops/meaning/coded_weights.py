"""Weights held in few bits, each unpacked when it is asked for: what the definitions of the ops on them compute with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import Encoding, dequantise, parse
from moefuse.ops.meaning.reference import count_experts, expert_weight

Lists = Sequence[Tensor]


class Codes(NamedTuple):
    """What belongs to the storage of one projection: one tensor [E, ...] each, or E tensors; ``zero`` may be empty."""

    encoding: Encoding
    scale: Lists
    zero: Lists


class CodedWeights(Sequence[Tensor]):
    """The weights [out, in] of one projection's experts, each unpacked when it is asked for."""

    def __init__(self, storage: Lists, codes: Codes, dtype: torch.dtype) -> None:
        self.storage, self.codes, self.dtype = storage, codes, dtype
        self.shape = codes.encoding.logical(tuple(storage[0].shape[-2:]))

    def __len__(self) -> int:
        return count_experts(self.storage)

    def __getitem__(self, e: Any) -> Any:
        encoding, scale, zero = self.codes
        return dequantise(
            encoding, expert_weight(self.storage, e), expert_weight(scale, e), expert_weight(zero, e) if zero else None, self.dtype
        )


def codes_by(storages: Sequence[Lists], codes: Lists, encodings: Sequence[str]) -> Iterator[Codes | None]:
    """What belongs to the storage of w_in, w_up and w_out, of all that is given.

    Raises:
        ValueError: there is more or less of it.
    """
    at = 0
    if len(encodings) != len(storages):
        _wrong("encodings", f"has {len(encodings)} texts", "three, for w_in, w_up and w_out")
    for name, storage, text in zip(("w_in", "w_up", "w_out"), storages, encodings, strict=True):
        if not text:
            yield None
            continue
        encoding, n = parse(text), len(storage)
        if not n:
            _wrong(name, "is empty", f"a storage, which `encodings` says is held as {text!r}")
        scale, zero = (codes[at + n * i : at + n * (i + 1)] for i in range(2))
        at += n * len(encoding.parts)
        yield Codes(encoding, scale, zero if encoding.zero else ())
    if at < len(codes):
        _wrong("codes", f"has {len(codes)} tensors", f"{at}, the scales and zeros of what `encodings` names")


def _wrong(argument: str, given: str, legal: str) -> NoReturn:
    raise ValueError(f"moefuse::experts_extended: argument `{argument}` {given}; legal: {legal}")


def codes_of(w: Lists, codes: Lists, encoding: str) -> Codes:
    """What belongs to the storage of one projection, of all that is given beside it."""
    count = len(w)
    return Codes(parse(encoding), codes[:count], codes[count:])
