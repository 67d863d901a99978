"""Calls that torch accepts and hardly anybody writes: no rule raises, and a fact has the dimensions of its tensor. No compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.graph.calls import tensor
from moefuse.passes.ir.axes import extent
from moefuse.passes.ir.facts import Combined, Fact, IndexMatrix, Sum
from moefuse.passes.match.lift import lift
from tests.null.rules_case import E, H, T, assign, trace

Function = Callable[..., Any]

ODD: dict[str, Function] = {
    "a filled tensor in another shape": lambda x: x.new_zeros(T, H).view(-1, 5, 7).select(1, 1),
    "zeros in a shape that no dimension survives": lambda x: torch.zeros_like(x).view(-1, 5, 7)[:, 1:2],
    "an index without anything": lambda x: x[()],
    "an ellipsis alone": lambda x: x[...],
    "an index that is true": lambda w_up: w_up[True],
    "an index that is false": lambda w_up: w_up[False],
    "true behind a slice": lambda w_up: w_up[:, True],
    "a mask at true": lambda ids: F.one_hot(ids, E).permute(2, 1, 0)[True],
    "a dimension of a number": lambda x: x.sum().squeeze(0),
    "no dimensions": lambda x: x.squeeze(()),
    "a number turned around": lambda x: x.sum().transpose(0, -1),
    "a number moved": lambda x: x.sum().movedim(0, 0),
    "a number sorted": lambda x: x.sum().sort(0)[0],
    "a number's running sum": lambda ids: torch.bincount(ids.reshape(-1), minlength=E)[1].cumsum(0),
    "a mask over no dimensions": lambda ids: (ids == 1).any(()),
    "a sum over no dimensions": lambda x: x.sum(()),
    "a table summed over no dimensions": lambda ids: F.one_hot(ids, E).sum(()),
    "negative dimensions": lambda x: x.unsqueeze(-3).transpose(-1, -2).permute(-1, -3, -2).movedim(-1, 0),
    "turned onto itself": lambda w_up: w_up.transpose(1, 1),
    "keywords": lambda x: torch.unsqueeze(input=torch.transpose(input=x, dim0=0, dim1=-1), dim=-1),
    "a slice of nothing": lambda w_up: w_up[1:1],
    "a slice with a step": lambda w_up: w_up[::2, ::3],
    "a slice beyond the end": lambda w_up: w_up[2:99],
    "a negative expert": lambda w_up: w_up[-1],
    "None among others": lambda w_up: w_up[None, 0, ..., None],
    "pieces of unequal size": lambda x: torch.split(x, (1, 2, 4), -2)[1],
    "no pieces": lambda x: torch.tensor_split(x, (), 0),
    "repeated nowhere": lambda x: x.repeat(1, 1, 1),
    "nothing repeated": lambda x: x.repeat_interleave(0, 0),
    "a stack at the end": lambda x: torch.stack([x, x], -1),
    "one of one": lambda x: torch.cat((x,), -1),
}


def unlike(function: Function) -> list[tuple[str, str]]:
    """The nodes of a function with a fact whose dimensions are not those of the tensor; whatever raises does so here."""
    traced = trace(function)
    lift(traced.ctx)
    return [(n.name, type(f).__name__) for n, f in traced.ctx.facts.items() if isinstance(f, Fact) and not _fits(f, tensor(n))]


def _fits(fact: Fact, value: torch.Tensor | None) -> bool:
    if value is None or isinstance(fact, Sum | Combined):  # sums are read as plain tensors
        return True
    sizes = [(extent(axis), size) for axis, size in zip(fact.axes, value.shape, strict=False)]
    return len(fact.axes) == value.dim() and all(a == b for a, b in sizes if type(a) is int and type(b) is int)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_call(name: str) -> None:
    assert unlike(ODD[name]) == []


def test_an_assignment_to_everything() -> None:
    """``out[()] = y``."""

    def function(x: Any) -> Any:
        out = torch.zeros_like(x)
        assign(out, (), x)
        return out

    assert unlike(function) == []


def test_dimensions_that_change_places_with_themselves() -> None:
    """The columns of ``nonzero`` stay columns."""
    pairs = trace(lambda ids: (ids == 1).nonzero().transpose(1, 1)).fact
    assert isinstance(pairs, IndexMatrix)
    assert not pairs.transposed
