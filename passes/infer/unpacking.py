"""Weights that a program computes from fewer bits: which products read them, and the first operation on the way that no rule reads.

Followed from the model's own tensors to the products, through whatever the program does with nothing but those, writes in place included
(``w = empty(...); w[::2] = packed & 15``). What comes out depends on no token, so it is a weight, however it was packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.op_classes import BINARY, BROADCASTS, CASTS, COPIES, FILLS, LOOKS_AT, METADATA, PRODUCTS, RESHAPES, TURNS
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.state import Context

_KNOWN = ("moefuse::", "_c10d_functional::", "c10d::", "_dtensor::", "torch.")
"""Operators that are no stranger's, though they have a namespace in their names."""
_BODIES = frozenset(("autograd_function_apply", "triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"))
_MULTIPLIES = PRODUCTS | frozenset("baddbmm addbmm grouped_mm scaled_mm _scaled_mm _scaled_grouped_mm conv1d conv2d".split())
_CONSTANTS = FILLS | {"arange", "tensor"}
_READ = TURNS | BROADCASTS | CASTS | COPIES | {"squeeze", "unsqueeze", "getitem", "select", "index_select", "index", "getattr"}
"""What a weight may go through and be read all the same, beside arithmetic."""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_PACKED = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32, *_FLOAT8))
"""Dtypes that hold quantised weights. Numbers of 64 bits count or index, and one of two values is a mask."""


@dataclass(frozen=True)
class Made:
    """A value that is computed from the model's own tensors alone.

    Attributes:
        largest: the largest of these, in bytes; None where there are only constants.
        coded: the first value of few bits that is made of it on the way, as fake quantisation does.
        unread: the first operation, in the order of the program, that a weight is not read through.
        scaled: the first arithmetic.
    """

    largest: Node | None = None
    coded: Node | None = None
    unread: Node | None = None
    scaled: Node | None = None

    @property
    def packed(self) -> torch.dtype | None:
        """The dtype of what it is unpacked from. A mask beside weights is smaller than these, and they are not."""
        values = (tensor(node) for node in (self.largest, self.coded))
        return next((value.dtype for value in values if value is not None and value.dtype in _PACKED), None)


@dataclass(frozen=True)
class Use:
    """An operation that takes packed weights and something computed from tokens; ``foreign``: it is no product that torch has."""

    node: Node
    weight: Made
    foreign: bool

    @property
    def first(self) -> Node:
        """The first operation on the weight that no rule reads."""
        return self.weight.unread or (self.node if self.foreign else self.weight.scaled or self.node)


@dataclass
class Unpacking:
    """What a graph unpacks.

    Attributes:
        made: what is computed from the model's own tensors.
        uses: what reads packed ones, in the order of the program.
        given: whole numbers that the graph is given, and what is computed from those alone.
    """

    made: dict[Node, Made] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    given: set[Node] = field(default_factory=set)
    done: bool = False
    _written: dict[Node, Made | None] = field(default_factory=dict)

    def of(self, ctx: Context, node: Node) -> Made | None:
        """What is known of a value; a write to its memory makes it what was written there, too."""
        own, name = self.made.get(node), ctx.storage[node]
        return self._written.get(name, own)

    def write(self, ctx: Context, call: Call, found: Made | None) -> None:
        for name in (name for target in call.targets for name in ctx.memory.storages(target)):
            self._written[name] = found


def unpacking(ctx: Context) -> Unpacking:
    """What a graph unpacks; found once."""
    known = ctx.scratch(Unpacking)
    if known.done:
        return known
    known.done = True
    known.made |= {n: Made(n) for n in ctx.graph.nodes if n.op in ("placeholder", "get_attr") and _is_own(n)}
    if not any(made.packed for made in known.made.values()) and not any(_is_coded(tensor(n)) for n in ctx.graph.nodes):
        known.made.clear()
        return known
    for node, call in ctx.calls.items():
        if call is not None and (call.name not in METADATA or tensor(node) is not None):
            _follow(ctx, known, node, call)
        elif node.op == "placeholder" and node not in known.made and not _floats(node):
            known.given.add(node)
    return known


def is_unpacked(ctx: Context, value: object) -> bool:
    """Whether a value is a matrix, or a stack of them, that the program makes from the model's own tensors in few bits."""
    if not isinstance(value, Node) or ctx.calls.get(value) is None:
        return False
    shown = tensor(value)
    if shown is None or shown.dim() not in (2, 3) or not shown.dtype.is_floating_point or shown.dtype.itemsize < 2:
        return False
    made = unpacking(ctx).of(ctx, value)
    return made is not None and made.packed is not None


def unpacked_from(ctx: Context, node: Node) -> torch.dtype | None:
    """The dtype of the largest input of the graph that a weight is computed from, where it holds few bits: a caller's argument too."""
    seen, following, inputs = {node}, [node], list[Node]()
    while following:
        at = following.pop()
        inputs += [at] if at.op in ("placeholder", "get_attr") else []
        following += (new := [n for n in at.all_input_nodes if n not in seen])
        seen.update(new)
    largest = max(inputs, key=_bytes, default=None)
    value = None if largest is None else tensor(largest)
    return None if value is None or value.dim() < 2 or value.dtype not in _PACKED else value.dtype


def is_foreign(call: Call) -> bool:
    """Whether an operation is none of torch's, or runs a function that its author wrote a backward pass or a kernel for."""
    return call.name in _BODIES or (("::" in call.name or "." in call.name) and not call.name.startswith(_KNOWN))


def _follow(ctx: Context, known: Unpacking, node: Node, call: Call) -> None:
    inputs = list(_read(node, call))
    parts = [known.of(ctx, n) for n in inputs]
    weights = [p for p in parts if p is not None]
    if _of_tokens(known, inputs, parts) and not _is_lookup(known, ctx, call):
        packed = next((w for w in weights if w.packed is not None), None)
        if packed is not None and (call.name in _MULTIPLIES or is_foreign(call)):
            known.uses.append(Use(node, _flat(ctx, packed) if is_foreign(call) else packed, is_foreign(call)))
        known.write(ctx, call, None)
        return
    if weights or (not inputs and call.name in _CONSTANTS):
        known.made[node] = found = _together(ctx, node, call, weights)
        known.write(ctx, call, found)
    elif any(n in known.given for n in inputs):
        known.given.add(node)


def _flat(ctx: Context, packed: Made) -> Made:
    """Packed weights as an operator takes them that wants them in other dimensions: that is not what makes them unreadable."""
    call = None if packed.unread is None else ctx.calls.get(packed.unread)
    return replace(packed, unread=None) if call is not None and call.name in RESHAPES else packed


def _of_tokens(known: Unpacking, inputs: list[Node], parts: list[Made | None]) -> bool:
    """Whether an operation reads anything computed from tokens. Numbers of tokens take rows of an embedding, those of experts weights."""
    others = [n for n, part in zip(inputs, parts, strict=True) if part is None]
    if any(_floats(n) for n in others):
        return True
    ranks = [value.dim() for n in inputs if n not in others and (value := tensor(n)) is not None]
    return max(ranks, default=0) == 2 and any(n in known.given and tensor(n).dim() for n in others)  # type: ignore[union-attr]


def _is_lookup(known: Unpacking, ctx: Context, call: Call) -> bool:
    """Whether packed numbers say which entries of a table of numbers an operation takes."""
    table = tensor(call.args[0]) if call.name in ("getitem", "index_select", "take") and len(call.args) > 1 else None
    codes = [known.of(ctx, n) for n in call.args[1:] if isinstance(n, Node)]
    return table is not None and table.dim() == 1 and any(c is not None and c.packed is not None for c in codes)


def _read(node: Node, call: Call) -> Iterator[Node]:
    """The tensors whose elements an operation reads."""
    looked_at = call.args[1:] if call.name == "to" else [call.args[i] for i in LOOKS_AT.get(call.name, ()) if i < len(call.args)]
    return (n for n in node.all_input_nodes if n not in looked_at and isinstance(fake(n), torch.Tensor | tuple | list))


def _together(ctx: Context, node: Node, call: Call, parts: list[Made]) -> Made:
    def first(*nodes: Node | None) -> Node | None:
        return min((n for n in nodes if n is not None), key=ctx.position.__getitem__, default=None)

    largest = max((p.largest for p in parts if p.largest is not None), key=_bytes, default=None)
    arithmetic = call.name in BINARY or call.name == "neg"
    unread = None if largest is None or arithmetic or call.name in _READ else node
    coded = node if largest is not None and _is_coded(tensor(node)) else None
    return Made(
        largest,
        first(*(p.coded for p in parts), coded),
        first(*(p.unread for p in parts), unread),
        first(*(p.scaled for p in parts), node if arithmetic else None),
    )


def _is_coded(value: torch.Tensor | None) -> bool:
    return value is not None and value.dim() >= 2 and value.dtype in _PACKED and value.dtype.itemsize == 1


def _is_own(root: Node) -> bool:
    """Whether a graph input is a tensor that the model holds."""
    held = any(part in root.name for part in ("_buffers_", "_parameters_", "_modules_")) or root.name.lower().startswith("l_self_")
    return root.op == "get_attr" or held or isinstance(tensor(root), torch.nn.Parameter)


def _bytes(node: Node) -> tuple[int, bool]:
    """How large a tensor of matrices is, and, of equally large ones, whether it holds few bits."""
    value, size = tensor(node), 1
    for n in () if value is None else shape_of(value):
        size *= n if isinstance(n, int) else 1
    return (0, False) if value is None or value.dim() < 2 else (size * value.dtype.itemsize, value.dtype in _PACKED)


def _floats(node: Node) -> bool:
    value = fake(node)
    return isinstance(value, tuple | list) or (isinstance(value, torch.Tensor) and value.dtype.is_floating_point)


__all__ = ["Made", "Unpacking", "Use", "is_foreign", "is_unpacked", "unpacked_from", "unpacking"]
