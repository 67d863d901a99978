"""How a weight that a program dequantises is encoded, read from what each of its elements is computed from.

Elements are followed back to the model's own tensors (``elements.py``), the arithmetic must be (value - zero) * scale (``formula.py``),
what codes stand for is found by running the program's operations on each code (``table.py``), and packing and blocks by where elements are
found (``places.py``). ``prove.py`` compares the weight and what was read, on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.encoding import DTYPES, Encoding
from moefuse.passes.encodings.elements import Batch, expert_stack, ways
from moefuse.passes.encodings.formula import Formula, formula
from moefuse.passes.encodings.memory import Strided
from moefuse.passes.encodings.part import Part
from moefuse.passes.encodings.places import Sample, Strides, blocks, in_blocks, packed, sample
from moefuse.passes.encodings.table import Meaning, meanings
from moefuse.passes.encodings.terms import Apply, Read, Term, UnreadError, leaves, reads
from moefuse.passes.encodings.weight import Weight, cone, inputs_of, is_stack, moment, signature, sizes_of, supposed
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import size_of, supposing
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost

_LARGEST = 256
"""Whole numbers up to which every float has them."""
_FAR = 128
"""As many operations are looked at for a message."""
Ways = list[tuple[Tensor, Term]]


@dataclass(frozen=True)
class Coded:
    """A weight [N, K], or [E, N, K], as its program holds it: what ``dequantise`` makes of its parts is the weight, bit by bit.

    Attributes:
        dtype: of the weight.
        storage, scale, zero: views of the model's tensors; of a weight of one expert without the first dimension.
    """

    encoding: Encoding
    storage: Part
    scale: Part
    zero: Part | None
    dtype: torch.dtype

    @property
    def parts(self) -> tuple[Part, ...]:
        """All views, the storage first, the others in the order of ``Encoding.parts``."""
        return (self.storage, self.scale) if self.zero is None else (self.storage, self.scale, self.zero)


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
        return _once(ctx, weight)
    except UnreadError as error:
        dtype = str(_held_as(node)).removeprefix("torch.")
        said = f"`{_name(ctx, error.node)}` {error.why}"
        return ctx.lost("encoding-unknown", error.node, dtype=dtype, detail=said)


@dataclass
class _Known:
    """What was read in a graph: layers of a model are computed alike."""

    found: dict[str, tuple[list[Node], Coded]] = field(default_factory=dict)


def _once(ctx: Context, weight: Weight) -> Coded:
    key, inputs, known = signature(ctx, weight), inputs_of(cone(ctx, weight)), ctx.scratch(_Known).found
    if key is None or key not in known:
        coded = _for_all_sizes(ctx, weight)
        if key is not None:
            known[key] = inputs, coded
        return coded
    before, coded = known[key]
    own = dict(zip(before, inputs, strict=True))

    def moved(part: Part) -> Part:
        return replace(part, node=own[part.node])

    return replace(coded, storage=moved(coded.storage), scale=moved(coded.scale), zero=None if coded.zero is None else moved(coded.zero))


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
    batch = Batch(len(of.e), expert, weight.rows, weight.fixed)
    return ways(ctx, weight.node, weight.coords(of), batch, moment(ctx, weight))


def _read(ctx: Context, weight: Weight) -> Coded:
    sizes = sizes_of(ctx, weight)
    if min(sizes) < 1:
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
            return _with(ctx, weight, of, pieces, storage.node)
        except UnreadError as error:
            first = first or error
    assert first is not None
    raise first


def _may_be_codes(leaf: Read) -> bool:
    return leaf.dtype != torch.bool and (leaf.dtype.itemsize == 1 or not leaf.dtype.is_floating_point)


def _with(ctx: Context, weight: Weight, of: Sample, pieces: Ways, storage: Node) -> Coded:
    """As :func:`read`, with this input as the storage."""
    own = [(which, formula(term, storage)) for which, term in pieces if storage in reads(term) or _refuse(term, weight.node)]
    first = own[0][1]
    for _, other in own[1:]:
        if _kind(other) != _kind(first):
            raise UnreadError(first.product, "computes some weights in another way than others")
    stack = is_stack(ctx, weight)
    places, shifts, table = _codes(of, own)
    encoding_of = packed(of, places, shifts)
    if encoding_of is None:
        raise UnreadError(_of_codes(first), "gives codes in an order that there is no word for")
    packing, strides = encoding_of
    scale = _gathered(of, [(which, f.scale) for which, f in own])
    zero = _gathered(of, [(which, f.zero) for which, f in own if f.zero is not None]) if first.zero is not None else None
    block, scale_at, zero_at = _blocks(first.product, of, scale, zero)
    arithmetic = next((name for name, dtype in DTYPES.items() if dtype == first.wide), None)
    if arithmetic is None:
        raise UnreadError(first.product, f"computes in {first.wide}")
    encoding = Encoding(table, block, arithmetic, first.kind, zero is not None, packing)
    zero_part = None if zero_at is None or first.zero is None else _part(first.zero.node, zero_at, stack)
    dtype = Strided(weight.node).dtype
    return Coded(encoding, _part(storage, strides, stack), _part(first.scale.node, scale_at, stack), zero_part, dtype)


def _refuse(term: Term, node: Node) -> bool:
    raise UnreadError(getattr(term, "node", node), "makes a part of the weights of something else")


def _of_codes(found: Formula) -> Node:
    """The last operation on codes alone."""
    return found.value.node if isinstance(found.value, Apply | Read) else found.product


def _kind(found: Formula) -> tuple[object, ...]:
    return (found.scale.node, found.zero.node if found.zero else None, found.kind, found.wide, found.whole)


def _codes(of: Sample, own: list[tuple[Tensor, Formula]]) -> tuple[Tensor, Tensor, str | tuple[float, ...]]:
    """Where each element's number in the storage stands, by how much its code is shifted there, and what codes stand for."""
    places, shifts = torch.zeros_like(of.e), torch.zeros_like(of.e)
    known: dict[tuple[str, ...], Meaning] = {}
    for which, found in own:
        at = next(leaf.place for leaf in leaves(found.value) if isinstance(leaf, Read))
        means, of_each = meanings(found.value, found.storage, found.wide, len(which))
        known |= {m.key: m for m in means}
        places[which] = at.expand(len(which))
        shifts[which] = torch.tensor([-1 if m.shift is None else m.shift for m in means])[of_each]
    if len(known) != 1:
        raise UnreadError(_of_codes(own[0][1]), "gives the same codes different values in different places")
    table = next(iter(known.values())).table
    whole = own[0][1].whole and not isinstance(table, str)
    if whole and any(abs(entry) >= _LARGEST or not float(entry).is_integer() for entry in table if isinstance(entry, float)):
        raise UnreadError(own[0][1].product, "is of zeros that are subtracted from large whole numbers")
    return places, shifts, table


def _gathered(of: Sample, found: list[tuple[Tensor, Read]]) -> Tensor:
    places = torch.zeros_like(of.e)
    for which, leaf in found:
        places[which] = leaf.place.expand(len(which))
    return places


def _blocks(product: Node, of: Sample, scale: Tensor, zero: Tensor | None) -> tuple[tuple[int, int], Strides, Strides | None]:
    """Which weights share a scale and a zero, and where these stand. What is shared by more weights is there again for each block."""
    sizes = [blocks(of, places) for places in (scale, zero) if places is not None]
    block = tuple(_finer([size[axis] for size in sizes]) for axis in (0, 1))
    at = in_blocks(of, scale, (block[0], block[1]))
    also = None if zero is None else in_blocks(of, zero, (block[0], block[1]))
    if at is None or (zero is not None and also is None):
        raise UnreadError(product, "has scales or zeros for no regular blocks of weights")
    return (block[0], block[1]), at, also


def _finer(sizes: Sequence[int]) -> int:
    return min((size for size in sizes if size), default=0)


def _part(node: Node, at: Strides, stack: bool) -> Part:
    return Part(node, at.sizes if stack else at.sizes[1:], at.strides if stack else at.strides[1:], at.first)


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
