"""Lowering experts whose weights are held in few bits: the op takes the storage, with what belongs to it, instead of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.encodings.part import Coded, emit, joined
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.ir.expr import Leaf
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.held import UnsupportedError
from moefuse.passes.lower.lower import Lowered, Lowering
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

    def grouped(self) -> Lowered:
        raise UnsupportedError("between the projections is what no activation of the op computes")

    def by_slot(self, region: Region, top_k: int) -> Lowering:
        raise UnsupportedError("rows come or go one for each slot")

    def stack(self, leaf: Leaf) -> list[Node]:
        """The storage of a projection, or its weights if they are not encoded."""
        found = self.read(leaf)
        return super().stack(leaf) if found is None else self.shown(found, 0)

    def call_of(self, body: Body) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """The op, what belongs to the storage of each projection, and how each is held."""
        op, beside, _ = super().call_of(body)
        if beside or op is not torch.ops.moefuse.experts.default:
            raise UnsupportedError("there are low-rank terms beside them")
        found = [None if p is None else self.read(p.weight) for p in (body.first, body.up, body.last)]
        codes = [node for read in found if read is not None for i in range(1, len(read[0].parts)) for node in self.shown(read, i)]
        names = ["" if read is None else str(read[0].encoding) for read in found]
        return torch.ops.moefuse.experts_coded.default, [codes], {"encodings": names}

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


__all__ = ["Packed", "UnsupportedError"]
