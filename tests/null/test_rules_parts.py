"""Sums that a loop binds again, bodies that are computed in parts, and rows that are added to rows of a base layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.ir.expr import Linear, Op, walk
from moefuse.passes.ir.facts import Rows, Sum
from tests.null.rules_case import E, assign, trace

BINDS: dict[str, Callable[[Any, Any], Any]] = {
    "to its own dtype": lambda out, y: out.to(torch.float32),
    "to the dtype of the rows": lambda out, y: out.type_as(y),
    "contiguous": lambda out, y: out.contiguous(),
    "clone": lambda out, y: out.clone(),
    "copied by a cast": lambda out, y: out.to(torch.float32, copy=True),
    "the same shape": lambda out, y: out.view_as(out),
}
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "rounded": lambda out, y: out.half().float(),
    "another shape": lambda out, y: out.t().contiguous().t(),
    "scaled": lambda out, y: out * 0.5,
    "cut off": lambda out, y: out.detach(),
}


def summed(bind: Callable[[Any, Any], Any], write: Callable[[Any, Any, Any], Any]) -> int:
    """How many experts' parts the sum has in the end; ``bind`` stands between them, ``write`` adds rows."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        out = torch.zeros_like(x)
        for e in range(E):
            where = torch.where(ids == e)
            tok, slot = where[0], where[1]
            y = F.linear(F.relu(F.linear(x[tok], w_up[e])), w_out[e]) * weights[tok, slot, None]
            out = write(bind(out, y), tok, y)
        return out

    fact = trace(layer).fact
    return len(fact.parts) if isinstance(fact, Sum) else 0


def read_and_write(out: Any, tok: Any, y: Any) -> Any:
    assign(out, tok, out[tok] + y)
    return out


WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "index_add": lambda out, tok, y: out.index_add(0, tok, y),
    "index_add_": lambda out, tok, y: out.index_add_(0, tok, y),
    "read and written": read_and_write,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("bind", BINDS)
def test_a_sum_bound_again_goes_on(bind: str, write: str) -> None:
    assert summed(BINDS[bind], WRITES[write]) == E


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("bind", CHANGES)
def test_a_sum_that_is_changed_does_not(bind: str, write: str) -> None:
    assert summed(CHANGES[bind], WRITES[write]) < E


def body(parts: Callable[[Any, Any], Any]) -> Any:
    """What ``parts`` makes of an expert's rows and its weight."""

    def layer(x: Any, ids: Any, one: Any) -> Any:
        return parts(x[torch.where(ids == 1)[0]], one)

    return trace(layer).fact


WHOLE: dict[str, Callable[[Any, Any], Any]] = {
    "split": lambda h, w: torch.cat([F.linear(h, w.split([4, 7])[i]) for i in range(2)], dim=-1),
    "chunk": lambda h, w: torch.cat([h @ w.chunk(3)[i].t() for i in range(3)], 1),
    "slices": lambda h, w: torch.cat([F.linear(h, w[:5]), F.linear(h, w[5:])], -1),
    "activated": lambda h, w: torch.cat([F.silu(F.linear(h, w.split([4, 7])[i])) * 2 for i in range(2)], -1),
}
OTHER: dict[str, Callable[[Any, Any], Any]] = {
    "another order": lambda h, w: torch.cat([F.linear(h, w.split([4, 7])[i]) for i in (1, 0)], -1),
    "not all": lambda h, w: torch.cat([F.linear(h, w.split([4, 3, 4])[i]) for i in range(2)], -1),
    "one twice": lambda h, w: torch.cat([F.linear(h, w.split([4, 7])[0])] * 2, -1),
    "of other rows": lambda h, w: torch.cat([F.linear(h, w[:5]), F.linear(h * 2, w[5:])], -1),
    "other activations": lambda h, w: torch.cat([F.silu(F.linear(h, w[:5])), F.relu(F.linear(h, w[5:]))], -1),
    "other numbers": lambda h, w: torch.cat([F.linear(h, w[:5]) * 2, F.linear(h, w[5:]) * 3], -1),
}


@pytest.mark.parametrize("parts", WHOLE)
def test_parts_of_a_weight_beside_each_other_are_the_weight(parts: str) -> None:
    fact = body(WHOLE[parts])
    assert isinstance(fact, Rows)
    products = [e for e in walk(fact.expr) if isinstance(e, Linear)]
    assert [e.weight.source.target for e in products] == ["one"]


@pytest.mark.parametrize("parts", OTHER)
def test_other_parts_are_not(parts: str) -> None:
    assert not isinstance(body(OTHER[parts]), Rows)


def added(more: Callable[[Any, Any, Any], Any], into: Callable[[Any], Any] = lambda x: x * 3) -> Any:
    """An expert's rows are put where rows of a base layer stood."""

    def layer(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        out = into(x)
        where = torch.where(ids == 0)
        tok, slot = where[0], where[1]
        y = F.linear(F.linear(x[tok], w_up[0]), w_out[0]) * weights[tok, slot, None]
        assign(out, tok, more(out, tok, y))
        return out

    return trace(layer).fact


@pytest.mark.parametrize("more", [lambda out, tok, y: out[tok] + y, lambda out, tok, y: y + out[tok]], ids=["ahead", "behind"])
def test_rows_are_added_to_rows_of_a_base(more: Callable[[Any, Any, Any], Any]) -> None:
    fact = added(more)
    assert isinstance(fact, Sum)
    assert fact.base is not None
    assert not fact.replaced
    assert not any(isinstance(e, Op) and e.name == "add" for e in walk(fact.parts[0].rows.expr))


@pytest.mark.parametrize(
    "more",
    [
        lambda out, tok, y: out[tok] * 2 + y,
        lambda out, tok, y: out[tok] - y,
        lambda out, tok, y: out[tok] + y * out[tok],
        lambda out, tok, y: out.flip(0)[tok] + y,
    ],
    ids=["scaled", "taken away", "read twice", "other rows"],
)
def test_rows_that_replace_those_of_a_base_are_not_added(more: Callable[[Any, Any, Any], Any]) -> None:
    assert not isinstance(added(more), Sum)
