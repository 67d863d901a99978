"""Weights that are computed alike: layers of a model, and experts of a loop, are read once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.encodings.elements import is_number
from moefuse.passes.encodings.part import Coded, Part
from moefuse.passes.encodings.weight import Weight, cone, inputs_of
from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context


@dataclass(frozen=True)
class Signature:
    """How a weight is computed.

    Attributes:
        text: the same for all weights that are computed alike, from inputs of the same shapes.
        inputs: those of the graph that it is computed from.
        begins: of each of them, where what is read begins: at which expert's part, where it is one expert's.
        nodes: all that it is computed by.
    """

    text: str
    inputs: tuple[Node, ...]
    begins: tuple[int, ...]
    nodes: tuple[Node, ...]

    def plain(self, coded: Coded) -> tuple[object, ...]:
        """What was read of a weight, as it is for every weight of this text."""
        at = [self.nodes.index(part.node) for part in coded.parts]
        places = [(i, p.sizes, p.strides, p.first - self._begin(p.node)) for i, p in zip(at, coded.parts, strict=True)]
        return (str(coded.encoding), coded.dtype, *places)

    def moved(self, part: Part, other: Signature) -> Part:
        """A part of a weight of this signature, of the weight of another one with the same text."""
        node = other.nodes[self.nodes.index(part.node)]
        return replace(part, node=node, first=part.first - self._begin(part.node) + other._begin(node))

    def _begin(self, node: Node) -> int:
        """Where what is read of a part begins; none of what the program computes is one expert's of several."""
        return self.begins[self.inputs.index(node)] if node in self.inputs else 0


@dataclass
class Known:
    """What was read in a graph."""

    found: dict[str, tuple[Signature, Coded]] = field(default_factory=dict)

    def of(self, own: Signature) -> Coded | None:
        """What is known of a weight, since one that is computed alike was read."""
        if own.text not in self.found:
            return None
        before, coded = self.found[own.text]
        zero = None if coded.zero is None else before.moved(coded.zero, own)
        return replace(coded, storage=before.moved(coded.storage, own), scale=before.moved(coded.scale, own), zero=zero)


def signature(ctx: Context, weight: Weight) -> Signature | None:
    """The signature of a weight; None where values of inputs count.

    Raises:
        UnreadError: it is computed by too many operations.
    """
    nodes = cone(ctx, weight)
    inputs = tuple(inputs_of(nodes))
    if any(weight.fixed(n) is not None for n in inputs):
        return None
    number = {node: i for i, node in enumerate(nodes)}
    rows = {source: _rows(ctx, source, number) for source in inputs}
    begins = {source: offset for source in inputs if (offset := _begin(source, rows[source])) is not None}
    if len(begins) != len(inputs):
        return None

    def named(value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda n: f"%{number.get(n, n.name)}")

    chosen = {row for some in rows.values() for row in some}
    lines = [f"{weight.order} {number[weight.node]}"]
    for node in nodes:
        value, call, root = tensor(node), ctx.calls[node], ctx.storage[node]
        begin = begins.get(root, 0) if node is not root else 0
        kind = (
            "" if value is None else f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset() - begin} {value.device}"
        )
        memory = f"{number.get(root)} {[number.get(w) for w in ctx.writes.get(root, ())]}"
        is_row = is_number(ctx, node, weight.rows)
        args = node.args[:-1] if node in chosen else node.args
        does = "" if call is None or is_row else f"{node.target} {named(args)} {named(node.kwargs)}"
        lines.append(f"{node.op if call is None else call.name} {kind} {memory} {is_row} {does}")
    return Signature("\n".join(lines), inputs, tuple(begins[source] for source in inputs), tuple(nodes))


def _rows(ctx: Context, source: Node, inside: dict[Node, int]) -> list[Node]:
    """The views of one expert, through which alone a weight reads an input: ``Q[3]``, or ``Q.unbind()[3]``; none if it reads more."""
    users = [n for n in source.users if n in inside]
    call = ctx.calls.get(users[0]) if len(users) == 1 else None
    if call is not None and call.name == "unbind" and len(call.args) == 1 and not call.kwargs:
        source, users = users[0], [n for n in users[0].users if n in inside]
    chosen = {_index(ctx, source, user) for user in users}
    return users if len(chosen) == 1 and None not in chosen else []


def _index(ctx: Context, source: Node, user: Node) -> int | None:
    """Which part of a stack, or item of a tuple, an operation takes."""
    call = ctx.calls.get(user)
    if call is None or call.kwargs or not call.args or call.args[0] is not source or user.args[-1] is not call.args[-1]:
        return None
    by_select = call.name == "select" and len(call.args) == 3 and call.args[1] == 0
    is_row = by_select or (call.name == "getitem" and len(call.args) == 2)
    return call.args[-1] if is_row and type(call.args[-1]) is int else None


def _begin(source: Node, rows: list[Node]) -> int | None:
    """At which element of an input its views of one expert begin; None where the run alone knows."""
    whole, part = tensor(source), tensor(rows[0]) if rows else None
    if part is None or whole is None:
        return 0
    begin = part.storage_offset() - whole.storage_offset()
    return begin if type(begin) is int else None


__all__ = ["Known", "Signature", "signature"]
