"""How a weight that a program dequantises is encoded, read from what each of its elements is computed from.

Elements are followed back to the model's own tensors (``elements.py``), the arithmetic must be (value - zero) * scale (``formula.py``),
what codes stand for is found by running the program's operations on each code (``table.py``), and packing and blocks by where elements are
found (``places.py``). ``prove.py`` compares the weight and what was read, on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.alike import Known, signature
from moefuse.passes.encodings.batch import Batch
from moefuse.passes.encodings.elements import expert_stack, ways
from moefuse.passes.encodings.fit import Ways, fitted
from moefuse.passes.encodings.memory import Strided
from moefuse.passes.encodings.part import Coded
from moefuse.passes.encodings.places import Sample, sample
from moefuse.passes.encodings.terms import Read, UnreadError, leaves
from moefuse.passes.encodings.weight import Weight, cone, inputs_of, is_stack, moment, sizes_of, supposed
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.sizes import size_of, supposing
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost

_SMALLER = 4
"""So many times as many weights as scales there must be, to take these as they are computed for all experts in each call."""
_FAR = 128
"""How many operations are looked at for a message."""


def read(
    ctx: Context,
    node: Node,
    order: Sequence[int],
    *,
    reader: Node | None = None,
    rows: Collection[Node] = (),
    fixed: Callable[[Node], Tensor | None] | None = None,
) -> Coded | Lost:
    """How a weight is encoded, or why that is not known, with the operation that is not read. Arguments as of :class:`Weight`.

    What a program takes out of stacks by the number of an expert that stands for all (``RowNumber``, ``rows``) is read as the stack.
    """
    weight = Weight(node, tuple(order), reader, frozenset(rows), fixed or (lambda _: None))
    try:
        with torch.device("cpu"), torch.no_grad():  # whatever the program's default device is
            return _once(ctx, weight)
    except UnreadError as error:
        dtype = str(_held_as(node)).removeprefix("torch.")
        said = f"`{_name(ctx, error.node)}` {error.why}"
        return ctx.lost("encoding-unknown", error.node, dtype=dtype, detail=said)


def _once(ctx: Context, weight: Weight) -> Coded:
    for source in inputs_of(cone(ctx, weight)):
        if ctx.storage[source] is not source:  # nothing guards that it stays there
            raise UnreadError(source, f"lies in the memory of another input, {named(ctx.storage[source])}")
    own, known = signature(ctx, weight), ctx.scratch(Known)
    if own is None:
        return _as_computed(ctx, weight)
    before = known.of(own)
    if before is None:
        before = _as_computed(ctx, weight)
        known.found[own.text] = own, before
    return before


def _as_computed(ctx: Context, weight: Weight) -> Coded:
    """What is read, with scales and zeros as the program computes them where these are no tensors of the model's."""
    first: UnreadError | None = None
    while True:
        try:
            return _for_all_sizes(ctx, weight)
        except UnreadError as error:
            first = first or error
            if error.computed is None or error.computed in weight.given or not _may_be_given(ctx, weight, error.computed):
                raise first from error
            weight = replace(weight, given=weight.given | {error.computed})


def _may_be_given(ctx: Context, weight: Weight, node: Node) -> bool:
    """Whether a node is computed once, for all weights, is small beside them, and stays what it is."""
    value, whole = tensor(node), tensor(weight.node)
    if value is None or whole is None or not value.dtype.is_floating_point:
        return False
    if ctx.storage[node] is not node or ctx.writes.get(node) or node in ctx.given.skipped:
        return False
    if expert_stack(ctx, node, weight.rows) is not None:
        return False
    return bool(_SMALLER * torch.Size(Strided(node).sizes).numel() <= torch.Size(Strided(weight.node).sizes).numel())


def _for_all_sizes(ctx: Context, weight: Weight) -> Coded:
    found = []
    for sizes in supposed(ctx, weight):
        with supposing(sizes):
            found.append(_read(ctx, weight))
    if any(other != found[0] for other in found[1:]):
        raise UnreadError(weight.node, "depends on a size that only the run knows")
    return found[0]


def trees(ctx: Context, weight: Weight, of: Sample) -> Ways:
    """What elements of a weight are computed from.

    Raises:
        UnreadError: an operation on the way is not read.
    """
    expert = of.e if len(weight.order) == 2 and expert_stack(ctx, weight.node, weight.rows) is not None else None
    batch = Batch(len(of.e), expert, weight.rows, weight.fixed, weight.slots(of), weight.given)
    return ways(ctx, weight.node, weight.coords(of), batch, moment(ctx, weight))


def _read(ctx: Context, weight: Weight) -> Coded:
    sizes = sizes_of(ctx, weight)
    if min(sizes) < 1 or min((Strided(weight.node).sizes[d] for d in weight.lead), default=1) < 1:
        raise UnreadError(weight.node, "has no elements")
    of = sample(*sizes)
    pieces = trees(ctx, weight, of)
    every = {leaf.node: leaf for _, term in pieces for leaf in leaves(term) if isinstance(leaf, Read)}
    found = sorted((leaf for leaf in every.values() if _may_be_codes(leaf)), key=lambda leaf: -_bytes(leaf.node))
    if not found:
        raise UnreadError(weight.node, "is made of no codes")
    first: UnreadError | None = None
    for storage in found:
        try:
            return fitted(of, pieces, storage.node, weight.node, stack=is_stack(ctx, weight))
        except UnreadError as error:
            first = first or error
    assert first is not None
    raise first


def _may_be_codes(leaf: Read) -> bool:
    return leaf.dtype != torch.bool and (leaf.dtype.itemsize == 1 or not leaf.dtype.is_floating_point)


def _held_as(node: Node) -> torch.dtype | str:
    """The dtype of the largest input in few bits that a weight is computed from."""
    seen, open_ = {node}, [node]
    while open_ and len(seen) < _FAR:
        new = [n for n in open_.pop().all_input_nodes if n not in seen]
        seen.update(new)
        open_ += new
    values = [tensor(n) for n in seen if n.op in ("placeholder", "get_attr")]
    known = [v for v in values if v is not None and v.dim() and (v.dtype.itemsize == 1 or not v.dtype.is_floating_point)]
    return max(known, key=lambda v: size_of(v.numel()) if isinstance(v.numel(), int) else 0).dtype if known else "few bits"


def _bytes(node: Node) -> int:
    value = tensor(node)
    return 0 if value is None else torch.Size(Strided(node).sizes).numel() * value.dtype.itemsize


def _name(ctx: Context, node: Node) -> str:
    call = ctx.calls.get(node)
    return node.name if call is None else call.name


__all__ = ["Coded", "read", "trees"]
