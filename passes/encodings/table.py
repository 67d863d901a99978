"""What the codes of a storage stand for: the program's own operations on every code, so that they need not be understood."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.meaning.encoding import BITS, NAMED
from moefuse.passes.encodings.terms import Apply, Const, Read, Term, UnreadError, device_of, evaluate, leaves

_CODES = 1 << BITS
_MIXED = 997
"""So many words with other codes beside the one that is asked for."""


@dataclass(frozen=True)
class Meaning:
    """What numbers of a storage stand for: a table, and by how many bits codes are shifted; None where the whole number is one code."""

    table: str | tuple[float, ...]
    shift: int | None

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal tables, the sign of zero included."""
        return tuple(map(str, self.table))


def all_bytes(dtype: torch.dtype) -> Tensor:
    """Every number of a dtype of one byte."""
    return torch.arange(256).to(torch.uint8).view(dtype)


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether numbers are the same, bit by bit; one NaN is like another."""
    return one.dtype == other.dtype and one.shape == other.shape and bool(same_bits(one, other).all())


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Where numbers are the same."""
    one, other = one.double(), other.double()
    return ((one == other) & (one.signbit() == other.signbit())) | (one.isnan() & other.isnan())


def meanings(value: Term, storage: Node, wide: torch.dtype, count: int) -> tuple[list[Meaning], Tensor]:
    """What elements of a batch are, which are computed alike but for their constants, and for each of them which.

    Raises:
        UnreadError: it is no code of a table, or there are too many tables.
    """
    own = [leaf for leaf in leaves(value) if isinstance(leaf, Const)]
    reads = [leaf for leaf in leaves(value) if isinstance(leaf, Read)]
    if any(not torch.equal(leaf.place, reads[0].place) for leaf in reads[1:]):
        raise UnreadError(_last(value, storage), "makes a weight of several numbers of its storage")
    which = torch.zeros(count, dtype=torch.int64)
    for leaf in own:
        kinds, at = leaf.values.expand(count).unique(return_inverse=True)
        which = (which * len(kinds) + at).unique(return_inverse=True)[1]
    kinds = which.unique()
    if len(kinds) > _CODES:
        raise UnreadError(_last(value, storage), "gives codes another meaning in many places")
    return [_meaning(value, storage, wide, int((which == kind).nonzero()[0])) for kind in kinds], which


def _last(value: Term, storage: Node) -> Node:
    return value.node if isinstance(value, Apply) else storage


def _meaning(value: Term, storage: Node, wide: torch.dtype, at: int) -> Meaning:
    """What the element ``at`` of a batch is."""

    device = device_of(value)

    def run(codes: Tensor) -> Tensor:
        found = evaluate(value, lambda leaf: (_constant(leaf, at) if isinstance(leaf, Const) else codes).to(device))
        return found.to(wide).cpu()

    dtype = next(leaf.dtype for leaf in leaves(value) if isinstance(leaf, Read))
    if dtype.itemsize == 1:
        codes = all_bytes(dtype)
        found = run(codes).expand(256)
        named = next((name for name, kind in NAMED.items() if equal(codes.view(kind).to(wide), found)), None)
        if named is not None:
            return Meaning(named, None)
        words, numbers = torch.arange(256), found
    elif not dtype.is_floating_point and dtype != torch.bool:
        words = _words(dtype)
        numbers = run(words).expand(len(words))
        words = words.long()
    else:
        raise UnreadError(_last(value, storage), f"computes with numbers of {dtype} that are no codes")
    for shift in range(0, 8 * dtype.itemsize, BITS):
        codes = words >> shift & _CODES - 1
        first = torch.stack([(codes == code).nonzero()[0, 0] for code in range(_CODES)])
        table = numbers[first]
        if equal(table[codes], numbers) and not equal(table, table[:1].expand(_CODES)):
            if table.isnan().any():
                raise UnreadError(_last(value, storage), "gives codes that are no numbers")
            return Meaning(tuple(table.double().tolist()), shift)
    raise UnreadError(_last(value, storage), "is no value of four bits, nor a plain number")


def _constant(leaf: Const, at: int) -> Tensor:
    return leaf.values if len(leaf.values) == 1 else leaf.values[at : at + 1]


def _words(dtype: torch.dtype) -> Tensor:
    """Words of a dtype with every code at every place, alone and beside others."""
    bits = 8 * dtype.itemsize
    mixed = torch.randint(-(1 << 62), 1 << 62, (_MIXED,), generator=torch.Generator("cpu").manual_seed(0)) >> 63 - bits
    places = torch.tensor([code << shift for shift in range(0, bits, BITS) for code in range(_CODES) if code << shift < 1 << 63])
    return torch.cat([places, ~places, mixed, (mixed[:, None] ^ places).flatten()]).to(dtype)


__all__ = ["Meaning", "all_bytes", "equal", "meanings", "same_bits"]
