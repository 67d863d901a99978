"""Pointwise operations on elements: which operations are, and the tree of one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.batch import Asked
from moefuse.passes.encodings.memory import Coords, Strided, onto
from moefuse.passes.encodings.terms import Apply, Term, UnreadError, cast, folded
from moefuse.passes.graph.calls import Call, call_target, tensor
from moefuse.passes.graph.op_classes import BINARY, TERNARY, UNARY

POINTWISE = frozenset(
    (
        *UNARY,
        *BINARY,
        *TERNARY,
        *"bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_right_shift bitwise_left_shift rshift lshift and or or_ xor".split(),
        *"__and__ __or__ __xor__ __rshift__ __lshift__ iand ior ixor irshift ilshift".split(),
        *"__iand__ __ior__ __ixor__ __irshift__ __ilshift__".split(),
        *"mod floor_divide trunc ldexp where eq ne lt le gt ge float_power".split(),
    )
)
"""Operations each element of whose result is of the elements of the arguments at its place alone."""


def applied(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    """The tree of elements of a pointwise operation."""
    out = node.kwargs.get("out")
    names = [n for n in node.all_input_nodes if n is not out or n in call.args]
    if any(tensor(n) is None for n in names):
        raise UnreadError(node, "takes a number that only the run knows")
    sizes = [Strided(n).sizes for n in names]
    args = tuple(elements.of(n, onto(coords, s), node) for n, s in zip(names, sizes, strict=True))
    kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}

    def run(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        if call.inplace and out is None:
            given[call.targets[0]] = given[call.targets[0]].clone()
        found: Tensor = call_target(node, *torch.fx.node.map_arg((node.args, kwargs), given.__getitem__))
        return found

    scalars = tuple(not s for s in sizes)
    dtype = Strided(out if isinstance(out, Node) else call.targets[0] if call.inplace else node).dtype
    if out is None:
        wide = _computed_in(call, args, scalars) if call.inplace else dtype
        return folded(Apply(node, call.name, args, scalars, run, dtype, wide))
    wide = run(*(torch.ones((1,) * (not s), dtype=a.dtype) for s, a in zip(scalars, args, strict=True))).dtype
    return cast(node, folded(Apply(node, call.name, args, scalars, run, wide, wide)), dtype)


def _computed_in(call: Call, args: tuple[Term, ...], scalars: tuple[bool, ...]) -> torch.dtype:
    """The dtype in which an operation in place computes, whatever it writes to."""
    numbers = [torch.tensor(a) for a in call.args if isinstance(a, bool | int | float)]
    known: list[Any] = [torch.ones((1,) * (not s), dtype=a.dtype) for s, a in zip(scalars, args, strict=True)]
    return functools.reduce(torch.result_type, known + [n.item() for n in numbers[:1]]) if len(known) + len(numbers) == 2 else args[0].dtype


__all__ = ["POINTWISE", "applied"]
