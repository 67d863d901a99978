"""What single elements of a tensor are computed from, as trees: numbers of the graph's inputs, constants, and pointwise operations on them.

A tree stands for many elements at once, all computed by the same operations; what differs between them is where they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import named

CAST, BITS = "cast", "bits"
"""Names of what changes a dtype, and of what reads the same bits as another dtype."""


class UnreadError(Exception):
    """An operation that the reader does not see through. ``computed``: scales or zeros that it might take as the program computes them."""

    def __init__(self, node: Node, why: str, computed: Node | None = None) -> None:
        super().__init__(f"{named(node)}: {why}")
        self.node, self.why, self.computed = node, why, computed


@dataclass(frozen=True, eq=False)
class Const:
    """Numbers that the graph makes itself, one for each element."""

    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


@dataclass(frozen=True, eq=False)
class Read:
    """Numbers of an input of the graph, by their place in its memory: counted from its first element, in elements."""

    node: Node
    place: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Apply:
    """A pointwise operation.

    Attributes:
        node: where the graph has it; ``name``: canonical, or :data:`CAST`, :data:`BITS`.
        args: its tensors, in order; ``scalars``: which of them have no dimensions, so that they say less about the result's dtype.
        run: the program's own operation on these.
        wide: the dtype that it computes in, before it is rounded to ``dtype``.
    """

    node: Node
    name: str
    args: tuple[Term, ...]
    scalars: tuple[bool, ...]
    run: Callable[..., Tensor]
    dtype: torch.dtype
    wide: torch.dtype
    reads: frozenset[Node] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", frozenset().union(*map(reads, self.args)))


Term = Const | Read | Apply


def reads(term: Term) -> frozenset[Node]:
    """The inputs of the graph that a tree reads."""
    return term.reads if isinstance(term, Apply) else frozenset((term.node,) if isinstance(term, Read) else ())


def device_of(term: Term) -> torch.device:
    """Where the program computes a tree, if that is a device of this machine: the bits of a power may be another device's."""
    value = tensor(term.node) if isinstance(term, Apply | Read) else None
    device = torch.device("cpu") if value is None else value.device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        return torch.device("cpu")
    return device


def leaves(term: Term) -> Iterator[Const | Read]:
    """Where a tree ends, from left to right."""
    if isinstance(term, Apply):
        for arg in term.args:
            yield from leaves(arg)
    else:
        yield term


def evaluate(term: Term, leaf: Callable[[Const | Read], Tensor]) -> Tensor:
    """The numbers of a tree, by the program's own operations on what ``leaf`` says that its leaves are: tensors of one dimension.

    Raises:
        UnreadError: an operation cannot run on single numbers.
    """
    if not isinstance(term, Apply):
        return leaf(term)
    given = [evaluate(arg, leaf) for arg in term.args]
    given = [value[0] if scalar else value for value, scalar in zip(given, term.scalars, strict=True)]
    try:
        with torch.no_grad():
            found = term.run(*given)
    except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
        raise UnreadError(term.node, "does not run on single numbers") from error
    if found.dtype != term.dtype:
        raise UnreadError(term.node, f"gives {found.dtype}, where the program has {term.dtype}")
    return found if found.dim() else found[None]


def cast(node: Node, term: Term, dtype: torch.dtype) -> Term:
    """The same numbers, in another dtype."""
    return term if term.dtype == dtype else _changed(node, CAST, term, dtype, lambda value: value.to(dtype))


def bits(node: Node, term: Term, dtype: torch.dtype) -> Term:
    """The same bits, read as another dtype."""
    if term.dtype == dtype:
        return term
    if term.dtype.itemsize != dtype.itemsize:
        raise UnreadError(node, "reads numbers as several, or several as one")
    return _changed(node, BITS, term, dtype, lambda value: value.view(dtype))


def looked_up(node: Node, index: Term, table: Tensor) -> Term:
    """Numbers of a table that codes say which of."""

    def run(codes: Tensor) -> Tensor:
        return table.to(codes.device)[codes]

    return folded(Apply(node, "table", (index,), (False,), run, table.dtype, table.dtype))


def _changed(node: Node, name: str, term: Term, dtype: torch.dtype, run: Callable[[Tensor], Tensor]) -> Term:
    return folded(Apply(node, name, (term,), (False,), run, dtype, dtype))


def folded(term: Apply) -> Term:
    """The numbers that a tree has, where they are all constants."""
    if not all(isinstance(arg, Const) for arg in term.args):
        return term
    counts = [len(arg.values) for arg in term.args if isinstance(arg, Const)]
    found = evaluate(term, lambda leaf: leaf.values)  # type: ignore[union-attr]
    return Const(found.expand(max(counts, default=1)))


__all__ = [
    "BITS", "CAST", "Apply", "Const", "Read", "Term", "UnreadError", "bits", "cast", "device_of", "evaluate", "folded", "leaves",
    "looked_up", "reads",
]  # fmt: skip
