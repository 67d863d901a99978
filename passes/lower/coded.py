"""Lowering experts whose weights are held in few bits: the op takes the storage, with what belongs to it, instead of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from moefuse.passes.encodings.part import Coded, emit, joined
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.ir.expr import Leaf
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.held import UnsupportedError
from moefuse.passes.lower.lower import BySlot, Lowered, Lowering
from moefuse.passes.match.coded_weights import Key, keys_of
from moefuse.passes.match.templates import Body


class Packed(Lowering):
    """The lowering of a region of which some weights were read as encoded: ``coded``."""

    def __init__(self, region: Region, emit: Emitter, coded: Mapping[Key, Coded]) -> None:
        super().__init__(region, emit)
        self.coded = coded

    def run(self) -> Lowered:
        """As of :class:`Lowering`; the report has the encodings.

        Raises:
            UnsupportedError: the op does not take such experts.
        """
        lowered = super().run()
        described = dict.fromkeys(coded.encoding.describe() for coded in self.coded.values())
        return replace(lowered, spec=replace(lowered.spec, encoding="; ".join(described)))

    def by_slot(self, region: Region, top_k: int) -> Lowering:
        """The lowering in which every slot is a token."""
        return PackedBySlot(region, self.emit, self.coded, top_k)

    def multiplied(self, rows: Node, offsets: Node, leaf: Leaf, bias: Sequence[Node] = ()) -> Node:
        """Sorted rows times each expert's weights, as these are held."""
        found = self.read(leaf)
        if found is None:
            return super().multiplied(rows, offsets, leaf, bias)
        codes = [node for i in range(1, len(found[0].parts)) for node in self.shown(found, i)]
        op = torch.ops.moefuse.grouped_linear_coded.default
        return self.emit(op, rows, offsets, self.shown(found, 0), codes, list(bias), str(found[0].encoding))

    def stack(self, leaf: Leaf) -> list[Node]:
        """The storage of a projection, or its weights if they are not encoded."""
        found = self.read(leaf)
        return super().stack(leaf) if found is None else self.shown(found, 0)

    def is_coded(self, leaf: Leaf) -> bool:
        """As of :class:`Lowering`."""
        return super().is_coded(leaf) or any(key in self.coded for key in keys_of(leaf))

    def codes(self, body: Body) -> tuple[list[Node], list[str]]:
        """As of :class:`Lowering`, of what was read."""
        if super().codes(body)[1]:
            raise UnsupportedError("the program unpacks some of their weights, and multiplies others as they are held")
        found = [None if p is None else self.read(p.weight) for p in body.projections]
        codes = [node for read in found if read is not None for i in range(1, len(read[0].parts)) for node in self.shown(read, i)]
        return codes, ["" if read is None else str(read[0].encoding) for read in found]

    def read(self, leaf: Leaf) -> list[Coded] | None:
        """How a projection is encoded: a stack of all experts, or each expert's own; None if it is not."""
        found = [self.coded.get(key) for key in keys_of(leaf)]
        if all(coded is None for coded in found):
            return None
        read = [coded for coded in found if coded is not None]
        if len(read) < len(found) or leaf.zeros or len({str(coded.encoding) for coded in read}) > 1:
            raise UnsupportedError("some experts' weights are held in another way than others'")
        stack = joined([coded.storage for coded in read]) if len(read) > 1 else None
        return read if stack is None else self.one(read)

    def one(self, read: list[Coded]) -> list[Coded]:
        """One stack, where all that experts have is evenly spaced in tensors of all experts."""
        parts = [joined(parts) for parts in zip(*(coded.parts for coded in read), strict=True)]
        if any(part is None for part in parts):
            return read
        storage, scale, *zero = parts
        assert storage is not None
        assert scale is not None
        return [replace(read[0], storage=storage, scale=scale, zero=zero[0] if zero else None)]

    def shown(self, read: list[Coded], which: int) -> list[Node]:
        """The views that a part of a projection is."""
        return [emit(self.emit, coded.parts[which]) for coded in read]


class PackedBySlot(BySlot, Packed):
    """The same where every slot is a token of its own."""

    def __init__(self, region: Region, emit: Emitter, coded: Mapping[Key, Coded], top_k: int) -> None:
        Packed.__init__(self, region, emit, coded)
        self.top_k = top_k


__all__ = ["Packed", "UnsupportedError"]
