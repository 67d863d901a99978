"""Weights held in few bits, each unpacked when it is asked for: what the definitions of the ops on them compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops.meaning.call import Stack
from moefuse.ops.meaning.encoding import Encoding, dequantise, parse
from moefuse.ops.meaning.reference import count_experts, expert_weight
from moefuse.ops.meaning.token_codes import Rounding

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


class CodedStack(Stack):
    """A projection whose weights are :class:`CodedWeights`: its sizes are known without unpacking any."""

    __slots__ = ()
    weight: CodedWeights

    @property
    def experts(self) -> int:
        """E."""
        return len(self.weight)

    @property
    def features(self) -> int:
        """Output features of one expert."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """Input features of one expert."""
        return self.weight.shape[1]

    @property
    def rounding(self) -> Rounding | None:
        """How the projection rounds its rows."""
        return self.weight.codes.encoding.activation


def codes_of(w: Lists, codes: Lists, encoding: str) -> Codes:
    """What belongs to the storage of one projection, of all that is given beside it."""
    count = len(w)
    return Codes(parse(encoding), codes[:count], codes[count:])
