"""Fitting an encoding to a weight of which it is known what each element is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.meaning.encoding import DTYPES, Encoding, Packing, counts_from
from moefuse.passes.encodings.formula import Formula, formula
from moefuse.passes.encodings.memory import Strided
from moefuse.passes.encodings.part import Coded, Part
from moefuse.passes.encodings.places import Sample, Strides, blocks, in_blocks, packed
from moefuse.passes.encodings.table import Meaning, meanings
from moefuse.passes.encodings.terms import Apply, Read, Term, UnreadError, leaves, reads

_LARGEST = 256
"""Whole numbers up to which every float has them."""
_SMALL = 64
"""Whole numbers whose differences every dtype has."""
_SHIFTS = 64
"""Shifts of a code are less."""
Ways = list[tuple[Tensor, Term]]
Formulas = list[tuple[Tensor, Formula]]
Table = str | tuple[float, ...]


@dataclass(frozen=True)
class Codes:
    """Of each element: where its number stands, by how much its code is shifted there (-1: it is the number); and what codes stand for."""

    places: Tensor
    shifts: Tensor
    means: Meaning


def fitted(of: Sample, pieces: Ways, storage: Node, weight: Node, *, stack: bool) -> Coded:
    """The encoding of a weight with codes in ``storage``, and its parts.

    Raises:
        UnreadError: there is none.
    """
    own = _formulas(pieces, storage, weight)
    first = own[0][1]
    codes = _codes(of, [(which, f.value) for which, f in own], storage, first.wide, first.product)
    found = packed(of, codes.places, codes.shifts)
    if found is None:
        raise UnreadError(_last(first.value, first.product), "gives codes in an order that there is no word for")
    table = codes.means.table
    if first.whole and not _whole(table, _LARGEST):
        raise UnreadError(first.product, "is of zeros that are subtracted from large whole numbers")
    scale = _together(of, [(which, f.scale) for which, f in own])
    zeros = _zero_codes(of, own)
    zero = zeros.places * _SHIFTS + zeros.shifts + 1 if zeros is not None else _together(of, [(w, f.zero) for w, f in own if f.zero])
    block = _block(of, [scale] if first.zero is None and zeros is None else [scale, zero])
    scale_at, zero_at = in_blocks(of, scale, block), None if first.zero is None else in_blocks(of, zero, block)
    if scale_at is None or (first.zero is not None and zero_at is None):
        raise UnreadError(first.product, "has scales or zeros for no regular blocks of weights")
    packing = None
    if zeros is not None:
        packing, zero_at = _packed_zeros(of, zeros, block, first)
        table = _less(table, zeros.means, first)
    arithmetic = next((name for name, dtype in DTYPES.items() if dtype == first.wide), None)
    if arithmetic is None:
        raise UnreadError(first.product, f"computes in {first.wide}")
    encoding = Encoding(table, block, arithmetic, first.kind, zero_at is not None, found[0], packing, behind=first.behind)
    return Coded(
        encoding,
        _part(storage, found[1], stack),
        _part(first.scale.node, scale_at, stack),
        None if zero_at is None else _part(_zero_node(first), zero_at, stack),
        Strided(weight).dtype,
    )


def _formulas(pieces: Ways, storage: Node, weight: Node) -> Formulas:
    """What pieces of a weight compute, if they all do alike."""
    found: Formulas = []
    for which, term in pieces:
        if storage not in reads(term):
            raise UnreadError(_last(term, weight), "makes a part of the weights of something else")
        found.append((which, formula(term, storage)))
    first = found[0][1]
    if any(_kind(other) != _kind(first) for _, other in found[1:]):
        raise UnreadError(first.product, "computes some weights in another way than others")
    return found


def _kind(found: Formula) -> tuple[object, ...]:
    zero = None if found.zero is None and found.zeros is None else _zero_node(found)
    return (found.scale.node, zero, found.zeros is None, found.kind, found.wide, found.whole, found.behind)


def _zero_node(found: Formula) -> Node:
    """The input that has the zeros."""
    return found.zero.node if found.zero is not None else next(iter(reads(found.zeros))) if found.zeros is not None else found.product


def _last(term: Term, other: Node) -> Node:
    return term.node if isinstance(term, Apply | Read) else other


def _codes(of: Sample, found: Ways, storage: Node, wide: torch.dtype, product: Node) -> Codes:
    """The codes of each element, if they all mean the same."""
    places, shifts = torch.zeros_like(of.e), torch.zeros_like(of.e)
    known: dict[tuple[str, ...], Meaning] = {}
    for which, term in found:
        at = next(leaf.place for leaf in leaves(term) if isinstance(leaf, Read))
        means, of_each = meanings(term, storage, wide, len(which))
        known |= {m.key: m for m in means}
        places[which] = at.expand(len(which))
        shifts[which] = torch.tensor([-1 if m.shift is None else m.shift for m in means])[of_each]
    if len(known) != 1:
        raise UnreadError(_last(found[0][1], product), "gives the same codes different values in different places")
    return Codes(places, shifts, next(iter(known.values())))


def _zero_codes(of: Sample, own: Formulas) -> Codes | None:
    """The codes that zeros are."""
    first = own[0][1]
    if first.zeros is None:
        return None
    terms = [(which, f.zeros) for which, f in own if f.zeros is not None]
    return _codes(of, terms, _zero_node(first), torch.float64, first.product)


def _packed_zeros(of: Sample, zeros: Codes, block: tuple[int, int], first: Formula) -> tuple[Packing, Strides]:
    """How zeros are packed that are codes, one for each block, and where they stand."""
    sizes = (of.sizes[0], *(-(-n // b) if b else 1 for n, b in zip(of.sizes[1:], block, strict=True)))
    n, k = (i // b if b else torch.zeros_like(i) for i, b in zip((of.n, of.k), block, strict=True))
    found = packed(Sample(of.e, n, k, (sizes[0], sizes[1], sizes[2])), zeros.places, zeros.shifts)
    if found is None or found[0] is None:
        raise UnreadError(first.product, "has packed zeros for no regular blocks of weights")
    return found[0], found[1]


def _less(table: Table, zeros: Meaning, first: Formula) -> Table:
    """The table with what is added to zeros subtracted from it, so that zeros are their codes."""
    start = counts_from(zeros.table)
    if start is None or isinstance(table, str) or not _whole(table, _SMALL) or abs(start) > _SMALL - 16:
        raise UnreadError(first.product, "has zeros that are made of codes, and are not these codes")
    return tuple(entry - start for entry in table)


def _whole(table: Table, most: int) -> bool:
    return isinstance(table, str) or all(float(entry).is_integer() and abs(entry) < most for entry in table)


def _together(of: Sample, found: list[tuple[Tensor, Read]]) -> Tensor:
    places = torch.zeros_like(of.e)
    for which, leaf in found:
        places[which] = leaf.place.expand(len(which))
    return places


def _block(of: Sample, places: Sequence[Tensor]) -> tuple[int, int]:
    """The weights that share a scale and a zero. What more of them share is there again for each block."""
    sizes = [blocks(of, some) for some in places]
    n, k = (min((size[axis] for size in sizes if size[axis]), default=0) for axis in (0, 1))
    return n, k


def _part(node: Node, at: Strides, stack: bool) -> Part:
    return Part(node, at.sizes if stack else at.sizes[1:], at.strides if stack else at.strides[1:], at.first)


__all__ = ["Ways", "fitted"]
