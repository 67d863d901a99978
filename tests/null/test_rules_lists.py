"""Row numbers of several experts in one list: what they take, and where it may be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefuse.passes.ir.facts import Index, Listed, Many, Rows
from tests.null.rules_case import E, K, fact_of, letters, lost_code

Function = Callable[..., Any]


def of_slots(ids: Any) -> list[tuple[Any, Any]]:
    return [torch.where(ids == e) for e in range(E)]


def of_tokens(ids: Any) -> list[Any]:
    return [torch.where((ids == e).any(-1))[0] for e in range(E)]


def joined(found: list[tuple[Any, Any]], column: int) -> Any:
    return torch.cat([f[column] for f in found])


def test_a_list_takes_what_its_experts_take() -> None:
    taken = [
        fact_of(lambda x, ids: x[joined(of_slots(ids), 0)]),
        fact_of(lambda x, ids: x.index_select(0, torch.cat(of_tokens(ids)))),
        fact_of(lambda ids, weights: weights[joined(of_slots(ids), 0), joined(of_slots(ids), 1)]),
    ]
    assert all(isinstance(fact, Listed) and all(isinstance(item, Rows) for item in fact.items) for fact in taken)
    assert [[item.domain.expert for item in fact.items] for fact in taken] == [[0, 1, 2]] * 3
    assert [letters(fact.axes) for fact in taken] == ["r f", "r f", "r"]


@pytest.mark.parametrize(
    "function",
    [
        lambda ids, weights: weights[joined(of_slots(ids), 0), joined(of_slots(ids)[::-1], 1)],  # another expert's slots
        lambda ids, weights: weights[joined(of_slots(ids), 0), joined(of_slots(ids)[:2], 1)],  # not as many
        lambda x, ids: x[joined(of_slots(ids), 1)],  # numbers of slots are no tokens
        lambda x, ids, other: x[joined(of_slots(ids), 0)][torch.cat(of_tokens(ids))],  # a list of rows, listed again
    ],
)
def test_what_a_list_does_not_take(function: Function) -> None:
    assert fact_of(function) is None


def cut(rows: Any, ids: Any, sizes: Any) -> Any:
    return rows.split([s.item() for s in sizes])


def counts(ids: Any) -> list[Any]:
    return [(ids == e).sum() for e in range(E)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids: cut(x[joined(of_slots(ids), 0)], ids, counts(ids)),
        lambda x, scores: (lambda ids: cut(x[torch.cat(of_tokens(ids))], ids, counts(ids)))(scores.topk(K)[1]),
        lambda ids: cut(joined(of_slots(ids), 0), ids, counts(ids)),  # the list itself
    ],
)
def test_a_list_is_cut_where_an_expert_ends(function: Function) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Many)
    assert all(isinstance(item, Rows | Index) for item in fact.items)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids: cut(x[torch.cat(of_tokens(ids))], ids, counts(ids)),  # an id may be twice in a token, which has one row then
        lambda x, ids: cut(x[joined(of_slots(ids), 0)], ids, counts(ids)[::-1]),
        lambda x, ids: cut(x[joined(of_slots(ids), 0)], ids, counts(ids)[:2]),
        lambda x, ids: cut(x[joined(of_slots(ids)[::-1], 0)], ids, counts(ids)),
        lambda x, ids, scores: cut(x[joined(of_slots(ids), 0)], ids, counts(scores.topk(K)[1])),  # numbers of another routing
    ],
)
def test_a_list_that_is_cut_elsewhere(function: Function) -> None:
    assert lost_code(function) == "tokens-differ"


def test_a_piece_between_two_offsets() -> None:
    """Where the experts stand in order; of one slot of each token there are fewer rows than slots."""

    def second(x: Any, ids: Any, found: list[Any]) -> Any:
        first, next_ = (n.item() for n in counts(ids)[:2])
        return x[torch.cat(found)][first : first + next_]

    fact = fact_of(lambda x, ids: second(x, ids, [t for t, _ in of_slots(ids)]))
    assert isinstance(fact, Rows)
    assert fact.domain.expert == 1
    assert lost_code(lambda x, ids: second(x, ids, [t for t, _ in of_slots(ids)][::-1])) == "tokens-differ"
    assert lost_code(lambda x, ids: second(x, ids, [torch.where(ids[:, 0] == e)[0] for e in range(E)])) == "tokens-differ"
