"""Lowering weights that operations of the program multiply from their storage: the op takes the same storage, and the same scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from moefuse.ops.encoding import Encoding
from moefuse.passes.graph.calls import fake
from moefuse.passes.ir.expr import Held, Leaf
from moefuse.passes.match.templates import Body

if TYPE_CHECKING:
    from moefuse.passes.lower.lower import Lowering


class UnsupportedError(ValueError):
    """The op does not take such experts."""


def encoding_of(held: Held, unrounded: bool) -> Encoding:
    """As what the op multiplies a storage: as the program does, or without rounding activations."""
    return replace(held.encoding, activation=None) if unrounded else held.encoding


def held_call(lowering: Lowering, body: Body) -> tuple[Callable[..., Any], list[Any], dict[str, Any]] | None:
    """The op, the scales of each projection, and how each is held; None if no operation of the program multiplies storage.

    Raises:
        UnsupportedError: the op does not take such experts.
    """
    held = [None if p is None else p.weight.held for p in body.projections]
    if not any(held):
        return None
    if lowering.op()[0] is not torch.ops.moefuse.experts.default or any(p is not None and (p.terms or p.added) for p in body.projections):
        raise UnsupportedError("there are low-rank terms beside them, or they are on several ranks")
    unrounded = lowering.region.unrounded
    codes = [node for p, h in zip(body.projections, held, strict=True) if p is not None and h is not None for node in _scales(lowering, h)]
    names = ["" if h is None else str(encoding_of(h, unrounded)) for h in held]
    return torch.ops.moefuse.experts_coded.default, [codes], {"encodings": names}


def described(body: Body, unrounded: bool) -> str:
    """How the weights are held, for the report; empty if no operation of the program multiplies storage."""
    held = [p.weight.held for p in body.projections if p is not None]
    return "; ".join(dict.fromkeys(encoding_of(h, unrounded).describe() for h in held if h is not None))


def detached(lowering: Lowering, leaf: Leaf, nodes: list[Node]) -> list[Node]:
    """The storage, which has no gradients: nor has it in the program, whose operator has none."""
    return [lowering.emit(torch.detach, n) if fake(n).requires_grad else n for n in nodes]


def _scales(lowering: Lowering, held: Held) -> list[Node]:
    """[E, N / bn, K / bk], or that of each expert; one scale for a matrix may be held with fewer dimensions."""
    nodes = detached(lowering, held.scale, lowering.stack(held.scale))
    one = (1, 1) if lowering.apart(held.scale) else (lowering.here(), 1, 1)
    return [n if fake(n).dim() == len(one) else lowering.emit(torch.reshape, n, one) for n in nodes]


__all__ = ["UnsupportedError", "described", "detached", "encoding_of", "held_call"]
