"""Who was chosen: masks, selections, counts, tables and orders, each with spellings that must not be taken for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.infer import routings
from moefuse.passes.ir.facts import Counts, Hit, Index, IndexMatrix, Many, Mask, Occurring, Routing, Sorted, Span, Table, View
from tests.null.rules_case import E, H, K, T, assign, call, fact_of, letters, trace

Function = Callable[..., Any]

MASKS: list[tuple[Function, str, int | None]] = [
    (lambda ids: ids == 1, "t k", 1),
    (lambda ids: torch.eq(ids, 2), "t k", 2),
    (lambda ids: (ids == 1).t(), "k t", 1),
    (lambda ids: (ids == 1).float(), "t k", 1),
    (lambda ids: ~(ids != 1), "t k", 1),
    (lambda ids: (ids == 1) == True, "t k", 1),  # noqa: E712
    (lambda ids: F.one_hot(ids, num_classes=E), "t k e", None),
    (lambda ids: F.one_hot(ids, E).permute(2, 1, 0), "e k t", None),
    (lambda ids: F.one_hot(ids, E).permute(2, 1, 0)[1], "k t", 1),
    (lambda ids: F.one_hot(ids, E)[..., -1], "t k", E - 1),
    (lambda ids: F.one_hot(ids.reshape(-1), E), "tk e", None),
    (lambda ids: ids.unsqueeze(-1) == call(torch.arange, ids, E), "t k e", None),
    (lambda ids: call(torch.arange, ids, E)[:, None, None] == ids, "e t k", None),
]


@pytest.mark.parametrize(("function", "axes", "expert"), MASKS)
def test_masks(function: Function, axes: str, expert: int | None) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Mask)
    assert (letters(fact.axes), fact.expert, fact.negated) == (axes, expert, False)


NO_MASKS: list[Function] = [
    lambda ids: ids > 1,  # several experts at once
    lambda ids: ids == ids.flip(0),
    lambda ids: ids == call(torch.arange, ids, K),  # slot k chose expert k: the numbers run along the slots
    lambda ids: ids.float() == 1.5,
    lambda x: x == 1,
]


@pytest.mark.parametrize("function", NO_MASKS)
def test_comparisons_that_select_no_expert(function: Function) -> None:
    assert not isinstance(fact_of(function), Mask | Table)


def test_not_equal_is_the_opposite_mask() -> None:
    fact = fact_of(lambda ids: ids != 1)
    assert isinstance(fact, Mask)
    assert fact.negated


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (lambda ids: ids.float() == 1, "t k"),
        (lambda ids: ids.float() == 1.0, "t k"),
        (lambda ids: ids.t().double().flatten() == 1, "kt"),
        (lambda ids: ids.half().t() == 1, "k t"),
        (lambda ids: ids.float().unsqueeze(-1) == call(torch.arange, ids, E), "t k e"),
        (lambda scores: scores.topk(K)[1].to(torch.uint8) == 1, "t k"),
    ],
)
def test_ids_in_another_dtype(function: Function, axes: str) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Mask)
    assert letters(fact.axes) == axes


def added_to(ids: Any) -> Any:
    floats = ids.float()
    floats += 1
    return floats


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: ids.to(torch.uint8) == 1,  # 257 is 1, too
        lambda ids: ids.bool() == 1,
        lambda ids: ids.half() == 2048,  # 2049 is 2048, too
        lambda ids: ids.float() == 0.5,
        lambda ids: added_to(ids) == 1,
        lambda weights: weights.half().float() == 1,  # no ids
    ],
)
def test_what_a_dtype_does_not_tell(function: Function) -> None:
    assert fact_of(function) is None


ABOVE: list[tuple[Function, float]] = [
    (lambda ids, weights: (ids[:, 1] == 2) & (weights[:, 1] > 0.25), 0.25),
    (lambda ids, weights: (weights[:, 1] >= 0.25) & (ids[:, 1] == 2), math.nextafter(0.25, 0)),
    (lambda scores: (scores.topk(K)[1] == 2).any(-1) & (scores[:, 2] > 0.25), 0.25),
]


@pytest.mark.parametrize(("function", "least"), ABOVE)
def test_a_condition_beside_one_expert(function: Function, least: float) -> None:
    """The next lower number of 32 bits, where the bound itself is enough."""
    fact = fact_of(function)
    assert isinstance(fact, Table)
    assert (letters(fact.axes), fact.expert, fact.ones) == ("t", 2, True)
    assert fact.routing.above == pytest.approx(least, abs=1e-7)
    assert fact.routing.by_slot == (fact.slot is not None)
    assert (fact.routing.above < 0.25) == (least < 0.25)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids, weights: (ids[:, 1] == 2) & (weights[:, 0] > 0.25),
        lambda ids, weights: (ids[:, 1] == 2) & (weights[:, 1] > -0.25),  # a table's zeros would be above it
        lambda ids, weights: (ids[:, 1] == 2) & (weights[:, 1] >= 0),
        lambda ids, weights: (ids[:, 1] == 2) & (weights[:, 1] < 0.25),
        lambda ids, weights: (ids[:, 1] == 2) & (weights.half()[:, 1] >= 0.3),  # nobody knows what 0.3 is in 16 bits
        lambda ids, weights: (ids[:, 1] != 2) & (weights[:, 1] > 0.25),
    ],
)
def test_a_condition_that_says_something_else(function: Function) -> None:
    assert fact_of(function) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda scores: (scores.topk(K)[1] == 2).any(-1) & (scores[:, 1] > 0.25),  # the score of another expert
        lambda ids, scores: (ids == 2).any(-1) & (scores[:, 2] > 0.25),  # an id may be twice in a token, or beyond the scores
        lambda scores: (scores.topk(K)[1] == 2).any(-1) & (scores.half()[:, 2] >= 0.3),
    ],
)
def test_a_condition_on_tokens_is_of_this_expert_only(function: Function) -> None:
    """Whether a token is valid is one value for all experts; that these differ is found when the sum is complete."""
    fact = fact_of(function)
    assert isinstance(fact, Table)
    assert (fact.routing.kept, fact.routing.valid is not None) == (None, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: (ids == 1).any(dim=-1),
        lambda ids: (ids == 1).sum(-1),
        lambda ids: F.one_hot(ids, E).sum(1)[:, 1],
        lambda ids: F.one_hot(ids, E).sum(dim=1).select(1, 1),
    ],
)
def test_a_mask_without_slots_is_a_column_of_the_table(function: Function) -> None:
    """Which tokens chose the expert in any slot: 1 or 0 when ids are distinct."""
    fact = fact_of(function)
    assert isinstance(fact, Table)
    assert (letters(fact.axes), fact.expert, fact.ones, fact.fill) == ("t", 1, True, 0.0)


def test_top_one_masks_are_tables_at_once() -> None:
    """One slot per token: there is no slot dimension to sum away."""
    fact = fact_of(lambda id: id == 1)  # noqa: A006
    assert isinstance(fact, Table)
    assert (letters(fact.axes), fact.expert, fact.ones) == ("t", 1, True)


SELECTIONS: list[tuple[Function, list[str]]] = [
    (lambda ids: torch.where(ids == 1), ["token", "slot"]),
    (lambda ids: (ids == 1).nonzero(as_tuple=True), ["token", "slot"]),
    (lambda ids: torch.where(F.one_hot(ids, E).permute(2, 1, 0)[1]), ["slot", "token"]),
    (lambda ids: torch.where((ids == 1).any(-1)), ["token"]),
]


@pytest.mark.parametrize(("function", "columns"), SELECTIONS)
def test_row_numbers_of_an_expert(function: Function, columns: list[str]) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Many)
    assert [i.of for i in fact.items] == columns
    assert all(isinstance(i, Index) and i.selection.expert == 1 for i in fact.items)
    assert fact.items[0].selection.by_token == (len(columns) == 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: (ids == 1).any(-1).nonzero().squeeze(-1),
        lambda ids: (ids == 1).any(-1).nonzero().flatten(),
        lambda ids: (ids == 1).any(-1).nonzero()[:, 0],
        lambda ids: torch.nonzero(ids == 1)[:, 0],
        lambda ids: torch.nonzero(ids == 1).t()[0],
        lambda ids: torch.nonzero(ids == 1).unbind(1)[0],
    ],
)
def test_token_numbers_out_of_a_matrix(function: Function) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Index)
    assert fact.of == "token"


def test_the_matrix_itself() -> None:
    fact = fact_of(lambda ids: torch.nonzero(ids == 1))
    assert isinstance(fact, IndexMatrix)
    assert fact.columns == ("token", "slot")


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: torch.where(ids != 1),
        lambda ids: torch.where(ids > 1),
        lambda ids: torch.where(F.one_hot(ids, E)),  # rows of all experts
        lambda ids: torch.where((ids == 1).t().reshape(-1)),  # slots of tokens in another order than tokens with their slots
    ],
)
def test_rows_that_are_not_one_experts(function: Function) -> None:
    assert fact_of(function) is None


def test_numbers_of_slots() -> None:
    """Counted through token by token: no token numbers."""
    fact = fact_of(lambda ids: torch.nonzero((ids == 1).reshape(-1)).squeeze(1))
    assert isinstance(fact, Index)
    assert fact.of == "flat"


COUNTS: list[Function] = [
    lambda ids: torch.bincount(ids.reshape(-1), minlength=E),
    lambda ids: torch.histc(ids.reshape(-1).float(), bins=E, min=0, max=E - 1),
    lambda ids: F.one_hot(ids.reshape(-1), E).sum(0),
    lambda ids: F.one_hot(ids, E).sum(dim=(0, 1)),
    lambda ids: ids.new_zeros(E).scatter_add(0, ids.reshape(-1), torch.ones_like(ids.reshape(-1))),
    lambda ids: torch.histc(ids.float().reshape(-1), bins=E, min=0, max=E - 1),
    lambda ids: torch.histc(ids.double().t().reshape(-1), bins=E, min=0, max=E - 1),  # in any order
    lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E - 1),
    lambda scores: torch.bincount(scores.topk(K)[1].int().reshape(-1), minlength=E),
    lambda ids: torch.bincount(torch.sort(ids.reshape(-1))[0], minlength=E),
    lambda ids: torch.bincount(ids.reshape(-1)[torch.argsort(ids.reshape(-1))], minlength=E),
    lambda ids: torch.stack([(ids == e).sum() for e in range(E)]),
    lambda ids: torch.stack([torch.count_nonzero(ids == e) for e in range(E)]),
    lambda ids: torch.stack([(ids == e).float().sum() for e in range(E)]).int(),
    lambda ids: torch.cat([(ids == e).sum().reshape(1) for e in range(E)]),
    lambda scores: (lambda ids: torch.stack([(ids == e).any(-1).sum() for e in range(E)]))(scores.topk(K)[1]),  # each id is once in a token
]


@pytest.mark.parametrize("function", COUNTS)
def test_tokens_of_each_expert(function: Function) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Counts)
    assert (letters(fact.axes), fact.ends) == ("e", False)


def test_running_sums_of_counts_are_ends() -> None:
    fact = fact_of(lambda ids: torch.bincount(ids.reshape(-1), minlength=E).cumsum(0).to(torch.int32))
    assert isinstance(fact, Counts)
    assert fact.ends


def up_to_the_last(scores: Any) -> Any:
    """Counts that end behind the highest of the chosen experts."""
    return torch.bincount(scores.topk(K)[1].reshape(-1))


def test_counts_may_end_early() -> None:
    """No bound for the ids, no fact; and not one from the back, where the last number may be any expert's."""
    fact = fact_of(up_to_the_last)
    assert isinstance(fact, Occurring)
    assert (fact.count, fact.ends) == (E, False)
    end = fact_of(lambda scores: up_to_the_last(scores).cumsum(0)[1])
    assert isinstance(end, Span)
    assert (end.start, end.stop) == (0, 2)
    for from_the_back in (lambda scores: up_to_the_last(scores)[-1], lambda scores: up_to_the_last(scores) > 0):
        assert not isinstance(fact_of(from_the_back), Span | Hit | Counts)


def sorted_ids(ids: Any) -> Any:
    return torch.sort(ids.reshape(-1))[0]


def test_ends_by_search() -> None:
    fact = fact_of(lambda ids: torch.searchsorted(sorted_ids(ids), call(torch.arange, ids, E), right=True))
    assert isinstance(fact, Counts)
    assert (letters(fact.axes), fact.ends) == ("e", True)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: torch.searchsorted(sorted_ids(ids), call(torch.arange, ids, E)),  # where they begin
        lambda ids: torch.searchsorted(ids.reshape(-1), call(torch.arange, ids, E), right=True),
        lambda ids: torch.searchsorted(sorted_ids(ids), call(torch.arange, ids, E) * 2, right=True),
        lambda ids: torch.histc(ids.reshape(-1).float(), bins=E, min=0, max=E),  # the bins are not the experts
        lambda ids: torch.histc(ids.reshape(-1).float(), bins=2 * E, min=0, max=E - 1),
        lambda ids, weights: torch.bincount(ids.reshape(-1), weights=weights.reshape(-1), minlength=E),
        lambda ids: torch.bincount(ids.reshape(-1)),
        lambda ids: torch.bincount(ids.expand(2, T, K).reshape(-1), minlength=E),  # each id twice
        lambda ids: torch.histc((ids.float() / 2).reshape(-1), bins=E, min=0, max=E - 1),
        lambda ids: torch.histc(ids.half().reshape(-1), bins=4096, min=0, max=4095),  # 2049 is 2048 there
        lambda ids: torch.histc(ids.bfloat16().reshape(-1).float(), bins=512, min=0, max=511),
        lambda ids: torch.stack([(ids == e).sum() for e in (0, 2, 1)]),
        lambda ids: torch.stack([(ids == e).sum() for e in (1, 2)]),
        lambda ids: torch.stack([(ids != e).sum() for e in range(E)]),
        lambda ids: torch.stack([(ids == e).any(-1).sum() for e in range(E)]),  # an id may be twice in a token
        lambda ids: torch.stack([(ids[:, 0] == e).sum() for e in range(E)]),  # of one slot
        lambda ids, id: torch.stack([(ids == 0).sum(), (id == 1).sum()]),  # noqa: A006
    ],
)
def test_counts_of_something_else(function: Function) -> None:
    assert not isinstance(fact_of(function), Counts)


ORDERS: list[tuple[Function, str]] = [
    (lambda ids: torch.argsort(ids.reshape(-1)), "slot"),
    (lambda ids: ids.reshape(-1).argsort(stable=True), "slot"),
    (lambda ids: torch.sort(ids.reshape(-1))[1], "slot"),
    (lambda ids: torch.sort(ids.reshape(-1))[0], "ids"),
    (lambda ids: torch.argsort(ids.flatten()) // K, "token"),
    (lambda ids: torch.div(torch.argsort(ids.flatten()), K, rounding_mode="floor"), "token"),
    (lambda ids: torch.argsort(torch.argsort(ids.flatten())), "inverse"),
    (lambda ids: call(torch.arange, ids, T).repeat_interleave(K)[torch.argsort(ids.flatten())], "token"),
]


@pytest.mark.parametrize(("function", "of"), ORDERS)
def test_orders(function: Function, of: str) -> None:
    fact = fact_of(function)
    assert isinstance(fact, Sorted)
    assert fact.of == of


def inverse_by_assignment(ids: Any) -> Any:
    order = torch.argsort(ids.flatten())
    inverse = torch.empty_like(order)
    assign(inverse, order, call(torch.arange, ids, T * K))
    return inverse


def test_the_inverse_by_assignment() -> None:
    fact = fact_of(inverse_by_assignment)
    assert isinstance(fact, Sorted)
    assert fact.of == "inverse"


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: torch.argsort(ids.flatten(), descending=True),
        lambda ids: torch.argsort(ids),  # within each token
        lambda ids: torch.argsort(ids.flatten())[:4],
        lambda ids: torch.argsort(ids.flatten()) // (K + 1),  # not the number of slots
        lambda ids: torch.argsort(ids.flatten()) % K,
        lambda ids: torch.argsort(ids.t().reshape(-1)),  # slots before tokens
        lambda x: torch.argsort(x.flatten()),
    ],
)
def test_orders_of_something_else(function: Function) -> None:
    assert not isinstance(fact_of(function), Sorted)


def slot_by_slot(scores: Any, *, order: tuple[int, ...] = (0, 1), of: int = 0, fill: float = 0.0) -> Any:
    """A table in which the weights of one slot after the other are put; ``of``: how much later the slot of the weights is."""
    weights, ids = scores.topk(K)
    table = torch.full_like(scores, fill)
    for k in order:
        at = (k + of) % K
        table.scatter_(1, ids[:, k : k + 1], weights[:, at : at + 1])
    return table


TABLES: list[tuple[Function, float, bool]] = [
    (lambda ids, weights, scores: torch.zeros_like(scores).scatter(1, ids, weights), 0.0, False),
    (lambda ids, weights, scores: scores.new_zeros((T, E)).scatter_(1, ids, weights), 0.0, False),
    (lambda ids, scores: torch.zeros_like(scores).scatter(1, ids, 1.0), 0.0, True),
    (lambda scores: slot_by_slot(scores), 0.0, False),
    (lambda scores: slot_by_slot(scores, order=(1, 0)), 0.0, False),
    (lambda ids, weights, scores: torch.full_like(scores, -math.inf).scatter(1, ids, weights), -math.inf, False),
    (lambda ids, weights, scores: torch.full_like(scores, -math.inf).scatter(1, ids, weights).softmax(-1), 0.0, False),
    (lambda ids, weights, scores: torch.full_like(scores, -math.inf).scatter(1, ids, weights).sigmoid(), 0.0, False),
    (lambda ids, weights, scores: torch.zeros_like(scores).scatter(1, ids, weights).sigmoid(), 0.5, False),
    (lambda ids, weights, scores: torch.zeros_like(scores).scatter(1, ids, weights) * 2.5, 0.0, False),
    (lambda ids, weights: (F.one_hot(ids, E) * weights.unsqueeze(-1)).sum(1), 0.0, False),
    (lambda ids, weights: torch.einsum("tk,tke->te", weights, F.one_hot(ids, E).float()), 0.0, False),
]


@pytest.mark.parametrize(("function", "fill", "ones"), TABLES)
def test_dense_tables(function: Function, fill: float, ones: bool) -> None:
    """What stands where an expert was not chosen decides whether the table selects."""
    fact = fact_of(function)
    assert isinstance(fact, Table)
    assert (letters(fact.axes), fact.fill, fact.ones) == ("t e", fill, ones)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids, weights, scores: scores.scatter(1, ids, weights),  # what was there stays
        lambda ids, weights, scores: torch.zeros_like(scores).scatter(1, ids, weights) + scores,
        lambda scores: scores.softmax(-1),
        lambda scores: slot_by_slot(scores, order=(0,)),  # the other slot is missing
        lambda scores: slot_by_slot(scores, order=(0, 0)),
        lambda scores: slot_by_slot(scores, of=1),  # the weights of the other slot
        lambda scores: slot_by_slot(scores, fill=1.0),
        lambda ids, weights, scores: (
            torch.zeros_like(scores).scatter(1, ids[:, :1], weights[:, :1]).scatter(1, ids[:, 1:], weights[:, 1:])
        ),  # twice
    ],
)
def test_tables_with_something_everywhere(function: Function) -> None:
    fact = fact_of(function)
    assert not isinstance(fact, Table)


def test_softmax_over_a_table_of_zeros_selects_nothing() -> None:
    """Only -inf becomes exactly zero."""
    fact = fact_of(lambda ids, weights, scores: torch.zeros_like(scores).scatter(1, ids, weights).softmax(-1))
    assert fact is None


def routing_of(function: Function) -> Routing:
    traced = trace(function)
    view = traced.ctx.fact(traced.returned)
    assert isinstance(view, View)
    found = routings.routing_of(traced.ctx, view)
    assert found is not None
    return found


def test_ids_of_topk_are_distinct() -> None:
    assert routing_of(lambda scores: torch.topk(scores, K)[1]).distinct
    assert routing_of(lambda scores: scores.topk(K, dim=-1)[1]).distinct


def test_other_ids_may_repeat() -> None:
    assert not routing_of(lambda ids: ids).distinct
    assert not routing_of(lambda scores: torch.topk(scores, K)[1] // 2).distinct


def test_one_id_per_token_cannot_repeat() -> None:
    found = routing_of(lambda scores: scores.argmax(-1))
    assert (found.distinct, found.top_k, found.has_slots) == (True, 1, False)


def test_the_best_of_a_projection_of_rows_is_one_id_for_each() -> None:
    """[batch, length] ids of a router that saw [batch, length, features] have no dimension of slots."""
    found = routing_of(lambda x, one: F.linear(x[None], one).softmax(-1).argmax(-1))
    assert (found.tokens, found.top_k, found.has_slots) == ((1, T), 1, False)


SCORED: list[Callable[[Any, Any], Any]] = [
    lambda scores, bias: (scores.sigmoid() + bias).argmax(-1),  # a bias that balances experts
    lambda scores, bias: (bias + scores / 2).max(-1)[1],
    lambda scores, bias: (scores + torch.rand_like(scores)).argmax(-1),  # noise
    lambda scores, bias: scores.masked_fill(bias > 9, -1.0).softmax(-1).argmax(-1),
]


@pytest.mark.parametrize("choose", SCORED)
def test_what_is_done_to_each_score_leaves_one_id_for_each_row(choose: Callable[[Any, Any], Any]) -> None:
    found = routing_of(lambda x, one, two: choose(F.linear(x[None], one), two[0]))
    assert (found.tokens, found.top_k, found.has_slots) == ((1, T), 1, False)


def test_scores_that_are_spread_over_another_dimension_are_no_projection_of_rows() -> None:
    """[T, 1, I] scores of a projection beside [heads, I]: the dimension in the middle is none of its rows."""
    found = routing_of(lambda x, one, two: (F.linear(x, one)[:, None] + two).argmax(-1))
    assert (found.tokens, found.top_k, found.has_slots) == ((T,), H, True)


def test_the_best_of_each_head_is_a_slot() -> None:
    """[tokens, heads] ids behind a reshape of the projection: each head chooses an expert of its own."""
    found = routing_of(lambda x, w_in: F.linear(x, w_in[0]).view(T, 2, -1).softmax(-1).argmax(-1))
    assert (found.tokens, found.top_k, found.has_slots) == ((T,), 2, True)


def test_a_mask_read_as_ids_is_a_routing_of_its_own() -> None:
    """``one_hot`` of a 0/1 mask: every entry is a slot, whose expert is 0 or 1."""
    found = fact_of(lambda id: F.one_hot(F.one_hot(id, E), E))  # noqa: A006
    assert isinstance(found, Mask)
    assert (found.routing.tokens, found.routing.top_k, found.routing.distinct) == ((T,), E, False)


OF_ONE_SLOT: list[Function] = [
    lambda ids: ids[:, 1] == 2,
    lambda ids: ids.t()[1] == 2,
    lambda ids: ids.unbind(-1)[1] == 2,
    lambda ids: F.one_hot(ids[:, 1], E)[:, 2],
    lambda ids: F.one_hot(ids[:, 1], E).t()[2],
    lambda ids: F.one_hot(ids[:, 1], E).float()[:, 2] > 0,
    lambda ids: F.one_hot(ids[..., 1], E)[:, 2] >= 1,
    lambda ids: F.one_hot(ids.t()[1], E)[:, 2] > 0.5,
    lambda ids: (ids[:, 1].unsqueeze(-1) == call(torch.arange, ids, E))[:, 2],
]


@pytest.mark.parametrize("function", OF_ONE_SLOT)
def test_masks_of_one_slot(function: Function) -> None:
    """They are of the routing of all slots, and not of one of their own."""
    fact = fact_of(function)
    assert isinstance(fact, Table)
    assert (letters(fact.axes), fact.expert, fact.slot, fact.ones, fact.routing.top_k) == ("t", 2, 1, True, K)


@pytest.mark.parametrize(
    "function",
    [
        lambda ids: F.one_hot(ids[:, 1], E)[:, 2] > 1,
        lambda ids: F.one_hot(ids[:, 1], E)[:, 2] >= 0,
        lambda ids: F.one_hot(ids[:, 1], E)[:, 2] < 1,  # those that did not choose it
        lambda ids: (F.one_hot(ids[:, 1], E)[:, 2] == 0) > 0,
        lambda ids: ids[:, 1] == call(torch.arange, ids, T),  # token t chose expert t
        lambda ids: F.one_hot(ids, E)[:, 1, 2] * 2 > 0,
    ],
)
def test_masks_of_one_slot_that_say_something_else(function: Function) -> None:
    fact = fact_of(function)
    assert not isinstance(fact, Table) or fact.negated or not fact.ones or fact.slot is None


def test_one_slots_share_of_a_one_hot_says_who_was_chosen_and_counts_nothing() -> None:
    fact = fact_of(lambda ids: F.one_hot(ids[:, 1], E).sum(0))
    assert isinstance(fact, Hit)
    assert fact.slot == 1
