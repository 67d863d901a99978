"""Equations of einsum read with a letter for every dimension: torch computes the same of what is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx

from moefuse.passes.graph.equations import Equation, equation

_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "ab,bc->ac": ((2, 3), (3, 4)),
    "ab, bc": ((2, 3), (3, 4)),
    "zb,ba": ((2, 3), (3, 4)),
    "...h,...kih->...ki": ((2, 3, 4), (2, 3, 5, 6, 4)),
    "...oi,...i": ((2, 5, 4), (2, 4)),
    "a...b,b->a...": ((2, 3, 4, 5), (5,)),
    "...a,...a->...": ((3, 1, 4), (2, 4)),
    "...a,ab->b": ((2, 3, 4), (4, 5)),
    "...a,...a,...a->...a": ((4,), (3, 4), (2, 3, 4)),
    "...ab->...ba": ((2, 3, 4),),
    "ab...,...": ((2, 3, 4), (4,)),
}


def read(text: Any, shapes: tuple[tuple[int, ...], ...], *, together: bool = False) -> Equation | None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["example_value"] = torch.zeros(shape)
    return equation(text, nodes) if together else equation(text, *nodes)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("text", "shapes"), _SHAPES.items(), ids=_SHAPES)
def test_what_is_read_computes_the_same(text: str, shapes: tuple[tuple[int, ...], ...], together: bool) -> None:
    found = read(text, shapes, together=together)
    assert found is not None
    values = [torch.randn(shape) for shape in shapes]
    again = torch.einsum(f"{','.join(found.labels)}->{found.out}", *values)
    assert torch.equal(again, torch.einsum(text, *values))
    assert all(len(names) == len(shape) for names, shape in zip(found.labels, shapes, strict=True))


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("aa,ab->b", ((3, 3), (3, 4))),  # a diagonal
        ("ab,bc->ac", ((3, 3),)),
        ("ab,bc->ac", ((3, 3, 2), (3, 4))),
        ("...abc->...a", ((3, 3),)),
        ("ab->ad", ((3, 3),)),
        (None, ((3, 3),)),
    ],
)
def test_what_is_not_read(text: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Letters twice in an operand, other numbers of dimensions, and what is no text."""
    assert read(text, shapes) is None
