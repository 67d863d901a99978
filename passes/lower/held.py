"""Lowering weights that operations of the program multiply from their storage: the op takes the same storage, and the same scales."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import Node

from moefuse.ops.meaning.encoding import Encoding
from moefuse.passes.graph.calls import fake
from moefuse.passes.ir.evaluate import flat_shapes
from moefuse.passes.ir.expr import Held, Leaf, Linear, walk
from moefuse.passes.lower.operands import Operands
from moefuse.passes.match.templates import Body


class UnsupportedError(ValueError):
    """The op does not take such experts."""


def encoding_of(held: Held, unrounded: bool) -> Encoding:
    """As what the op multiplies a storage: as the program does, or without rounding activations."""
    return replace(held.encoding, activation=None) if unrounded else held.encoding


def codes(lowering: Operands, body: Body) -> tuple[list[Node], list[str]]:
    """The scales of each projection, and how each is held; nothing if no operation of the program multiplies storage.

    Raises:
        UnsupportedError: the op does not take such experts.
    """
    held = [None if p is None else p.weight.held for p in body.projections]
    if not any(held):
        return [], []
    products = [e for e in walk(lowering.region.expr) if isinstance(e, Linear) and e.weight.held is not None]
    computed = {str(fake(e.node).dtype).removeprefix("torch.") for e in products}
    if len(computed) > 1:
        raise UnsupportedError(f"the projections of an expert compute in {', '.join(sorted(computed))}")
    unrounded = lowering.region.unrounded
    scales = [node for h in held if h is not None for node in _scales(lowering, h)]
    return scales, ["" if h is None else str(encoding_of(h, unrounded)) for h in held]


def described(body: Body, unrounded: bool) -> str:
    """How the weights are held, for the report; empty if no operation of the program multiplies storage."""
    return listed([p.weight for p in body.projections if p is not None], unrounded)


def listed(leaves: list[Leaf], unrounded: bool) -> str:
    """The same of some weights."""
    return "; ".join(dict.fromkeys(encoding_of(leaf.held, unrounded).describe() for leaf in leaves if leaf.held is not None))


def multiplied(lowering: Operands, rows: Node, offsets: Node, leaf: Leaf, held: Held) -> Node:
    """Sorted rows times each expert's weights, as these are held.

    Raises:
        UnsupportedError: the program rounds these rows, and no grouped product does.
    """
    encoding = encoding_of(held, lowering.region.unrounded)
    if encoding.activation is not None:
        raise UnsupportedError("between the projections is what no activation of the op computes")
    op = torch.ops.moefuse.grouped_linear_coded.default
    return lowering.emit(op, rows, offsets, lowering.stack(leaf), _scales(lowering, held), [], str(encoding))


def _scales(lowering: Operands, held: Held) -> list[Node]:
    """[E, N / bn, K / bk], or that of each expert; one scale for a matrix may be held with fewer dimensions."""
    if held.nested:
        return _unnested(lowering, held)
    nodes = lowering.storage(lowering.stack(held.scale))
    if held.shape is not None:
        return [lowering.emit(torch.reshape, n, flat_shapes(held)[1]) for n in nodes]
    one = (1, 1) if lowering.apart(held.scale) else (lowering.here(), 1, 1)
    return [n if fake(n).dim() == len(one) else lowering.emit(torch.reshape, n, one) for n in nodes]


def _unnested(lowering: Operands, held: Held) -> list[Node]:
    """Scales that are held as codes, computed for all experts at once: they are few, and each call does, as the program does."""
    codes, scale, table, offset = (lowering.emit(torch.stack, lowering.storage(lowering.sources(of))) for of in held.leaves)
    count, (n, k) = fake(codes).shape[1], flat_shapes(held)[1]
    wide = lowering.emit(torch.narrow, lowering.emit(torch.repeat_interleave, scale, held.every, 1), 1, 0, count)
    found = lowering.emit(torch.gather, table, 1, lowering.emit(torch.Tensor.to, codes, torch.int64))
    found = lowering.emit(torch.add, lowering.emit(torch.mul, found, wide), lowering.emit(torch.unsqueeze, offset, 1))
    parts = lowering.emit(torch.unbind, lowering.emit(torch.reshape, found, (-1, n, k)))
    return [lowering.emit(operator.getitem, parts, e) for e in range(len(held.scale.nodes))]


__all__ = ["UnsupportedError", "codes", "described", "encoding_of", "listed", "multiplied"]
