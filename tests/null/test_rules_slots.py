"""Rules of tensors that experts fill slot by slot, of lists of a table's entries, and of what is refused by name. No compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.ir.facts import Combined, Counts, Entries, Filled, Lost, Rows, Sorted, Sum, Table
from tests.null.rules_case import E, H, K, T, assign, fact_of

Function = Callable[..., Any]


def expert(rows: Any, e: int, w_up: Any, w_out: Any) -> Any:
    return F.linear(F.silu(F.linear(rows, w_up[e])), w_out[e])


def filled(
    x: Any,
    ids: Any,
    w_up: Any,
    w_out: Any,
    *,
    experts: Any = range(E),
    init: Function = lambda x: x.new_zeros(T * K, H),
    rows: Function = lambda x: x.repeat_interleave(K, 0),
    read: Function = lambda ids, e: ids.reshape(-1) == e,
    write: Function | None = None,
) -> Any:
    y, h = init(x), rows(x)
    for e in experts:
        assign(y, (write or read)(ids, e), expert(h[read(ids, e)], e, w_up, w_out))
    return y


def fill(**options: Any) -> Any:
    """What is known of the tensor after the last expert wrote to it."""
    return fact_of(lambda x, ids, w_up, w_out: filled(x, ids, w_up, w_out, **options))


def test_filled_by_every_expert_it_is_all_slots() -> None:
    whole = fill()
    assert isinstance(whole, Rows)
    assert whole.domain.name == "slots"
    assert [a.kind for a in whole.axes[0]] == ["t", "k"]


@pytest.mark.parametrize("init", [lambda x: torch.empty_like(x.repeat_interleave(K, 0)), lambda x: torch.zeros_like(x.repeat(K, 1))])
def test_what_the_tensor_starts_from(init: Function) -> None:
    assert isinstance(fill(init=init), Rows)


def test_in_any_order_of_experts() -> None:
    assert isinstance(fill(experts=reversed(range(E))), Rows)


def test_before_the_last_expert_it_is_not_whole() -> None:
    part = fill(experts=range(E - 1))
    assert isinstance(part, Filled)
    assert [p.rows.domain.expert for p in part.parts] == [0, 1]


def test_reading_it_too_early_names_the_experts() -> None:
    lost = fact_of(lambda x, ids, w_up, w_out: filled(x, ids, w_up, w_out, experts=range(E - 1)) * 2.0)
    assert isinstance(lost, Lost)
    assert (lost.code, lost.details["present"]) == ("missing-experts", "0..1")


NOT_FILLED: dict[str, dict[str, Any]] = {
    "starts from ones": {"init": lambda x: x.new_ones(T * K, H)},
    "starts from values": {"init": lambda x: x.repeat_interleave(K, 0)},
    "another expert's places": {"write": lambda ids, e: ids.reshape(-1) == (e + 1) % E},
    "tokens one after another, twice": {"rows": lambda x: x.repeat(K, 1)},
    "slots before tokens": {"write": lambda ids, e: ids.t().reshape(-1) == e},
    "two columns too many": {"init": lambda x: x.new_zeros(T * K + 2, H)},
    "an expert twice": {"experts": [*range(E), 0]},
}


@pytest.mark.parametrize("options", NOT_FILLED.values(), ids=NOT_FILLED)
def test_what_is_no_tensor_of_all_slots(options: dict[str, Any]) -> None:
    assert isinstance(fill(**options), Lost | None)


def dispatcher(scores: Any, ids: Any, weights: Any, **options: Any) -> tuple[Any, Any]:
    """(table of gates, what sorting the list of its entries gives)."""
    gates = torch.zeros_like(scores).scatter(1, scores.topk(K, dim=1)[1], weights)
    return gates, torch.nonzero(gates).sort(options.get("dim", 0))


def sparse(read: Function, **options: Any) -> Any:
    return fact_of(lambda scores, ids, weights: read(*dispatcher(scores, ids, weights, **options)))


def test_a_list_of_entries_is_of_a_routing_of_its_own() -> None:
    places = sparse(lambda gates, _sorted: torch.nonzero(gates))
    assert isinstance(places, Entries)
    assert not places.routing.whole


def test_counts_and_tokens_of_the_list() -> None:
    counts = sparse(lambda gates, _: (gates != 0).sum(0))
    tokens = sparse(lambda gates, found: torch.nonzero(gates)[found[1][:, 1], 0])
    experts = sparse(lambda _gates, found: found[0][:, 1])
    assert isinstance(counts, Counts)
    assert not counts.routing.whole
    assert isinstance(tokens, Sorted)
    assert (tokens.of, experts.of) == ("token", "ids")


NEVER_NEGATIVE: dict[str, tuple[Function, bool]] = {
    "softmax of the best": (lambda scores: scores.topk(K, dim=1)[0].softmax(1), True),
    "the best of a softmax, normalised": (
        lambda scores: (lambda top: top / (top.sum(1, keepdim=True) + 1e-6))(scores.softmax(1).topk(K)[0]),
        True,
    ),
    "rectified": (lambda scores: torch.relu(scores.topk(K, dim=1)[0] - 1.0), True),
    "the best as they are": (lambda scores: scores.topk(K, dim=1)[0], False),
    "a difference": (lambda scores: scores.topk(K, dim=1)[0].softmax(1) - 0.5, False),
    "a term by keyword": (lambda scores: torch.add(scores.topk(K, dim=1)[0].softmax(1), other=scores.topk(K, dim=1)[0]), False),
    "a factor below zero": (lambda scores: scores.topk(K, dim=1)[0].softmax(1) * -1.0, False),
    "subtracted": (lambda scores: torch.add(scores.softmax(1).topk(K)[0], 0.1, alpha=-1), False),
}


@pytest.mark.parametrize(("weights", "expected"), NEVER_NEGATIVE.values(), ids=NEVER_NEGATIVE)
def test_counts_of_gates_above_zero(weights: Function, expected: bool) -> None:
    """They count the list's entries only if no gate is below zero."""

    def function(scores: Any) -> Any:
        gates = torch.zeros_like(scores).scatter(1, scores.topk(K, dim=1)[1], weights(scores))
        return (gates > 0).sum(0)

    counts = fact_of(function)
    assert isinstance(counts, Counts)
    assert (counts.routing.above is None) is expected


def test_weights_of_the_list() -> None:
    def read(gates: Any, found: Any) -> Any:
        tokens = torch.nonzero(gates)[found[1][:, 1], 0]
        return torch.gather(gates[tokens], 1, found[0].split(1, dim=1)[1])

    assert isinstance(sparse(read), Rows)


NOT_A_LIST: list[Function] = [
    lambda _gates, found: found[0][:, 0],  # sorted tokens, beside which no expert stands any more
    lambda _gates, found: found[1][:, 0],
    lambda gates, found: torch.nonzero(gates)[found[1][:, 0], 0],
    lambda gates, _found: gates > -0.5,  # what no expert was chosen for, too
    lambda gates, _found: gates >= 0,
    lambda gates, _found: gates > float("nan"),
    lambda gates, _found: gates < 0,
    lambda gates, _found: gates == 0,
]


@pytest.mark.parametrize("read", NOT_A_LIST)
def test_what_is_no_such_list(read: Function) -> None:
    assert sparse(read) is None


def test_a_turned_table_is_listed_expert_by_expert() -> None:
    """Its columns are the experts, and the tokens of each: nothing has to be sorted."""
    columns = [sparse(lambda gates, _found, at=at: torch.nonzero(gates.t())[:, at]) for at in (0, 1)]
    assert [c.of for c in columns] == ["ids", "token"]
    assert columns[0].order is not None


def test_sorted_along_its_columns_it_says_nothing() -> None:
    assert sparse(lambda _gates, found: found[0], dim=1) is None


def test_a_gate_above_zero_is_a_mask() -> None:
    mask = sparse(lambda gates, _: gates != 0)
    assert isinstance(mask, Table)
    assert mask.ones
    assert mask.slots is None


def combine(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any, add: Function) -> Any:
    tok, slot = torch.where(ids == 1)
    return add(torch.zeros_like(x), tok, expert(x[tok], 1, w_up, w_out) * weights[tok, slot, None])


ADDS: list[Function] = [
    lambda out, tok, y: torch.scatter_reduce(out, 0, tok.view(-1, 1).repeat(1, H), y, reduce="sum"),
    lambda out, tok, y: out.scatter_add(0, tok[:, None].repeat(1, H), y),
    lambda out, tok, y: out + torch.zeros_like(out).index_add(0, tok, y),
    lambda out, tok, y: torch.zeros_like(out).index_add(0, tok, y) + out,
]


@pytest.mark.parametrize("add", ADDS)
def test_ways_to_add_rows(add: Function) -> None:
    assert isinstance(fact_of(lambda x, ids, weights, w_up, w_out: combine(x, ids, weights, w_up, w_out, add)), Sum)


NOT_ADDED: list[Function] = [
    lambda out, tok, y: torch.scatter_reduce(out, 0, tok.view(-1, 1).repeat(1, H), y, reduce="amax"),
    lambda out, tok, y: torch.scatter_reduce(out, 0, tok.view(-1, 1).repeat(1, H), y, reduce="sum", include_self=False),
    lambda out, tok, y: out.scatter_add(0, tok.view(-1, 1).repeat(1, H // 2), y),
    lambda out, tok, y: torch.ones_like(out) + torch.zeros_like(out).index_add(0, tok, y),
]


@pytest.mark.parametrize("add", NOT_ADDED)
def test_what_only_looks_like_adding(add: Function) -> None:
    assert not isinstance(fact_of(lambda x, ids, weights, w_up, w_out: combine(x, ids, weights, w_up, w_out, add)), Sum)


@pytest.mark.parametrize("order", ["tkho,tko,tk->th", "tk,tkho,tko->th", "tko,tk,tkho->th"])
def test_einsum_of_three(order: str) -> None:
    """The last projection and the weighted sum, in any order of operands."""

    def function(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        values = {"tkho": w_out[ids], "tko": F.silu(torch.einsum("tkoh,th->tko", w_up[ids], x)), "tk": weights}
        return torch.einsum(order, *(values[name] for name in order.partition("->")[0].split(",")))

    assert isinstance(fact_of(function), Combined)


def test_einsum_of_three_with_a_sum_of_its_own() -> None:
    def function(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        h = F.silu(torch.einsum("tkoh,th->tko", w_up[ids], x))
        return torch.einsum("tkho,tko,tl->th", w_out[ids], h, weights)

    assert isinstance(fact_of(function), Lost)


def places(x: Any, id: Any, condition: Function) -> Any:  # noqa: A002  (the names of rules_case)
    mask = F.one_hot(id, num_classes=E)
    return torch.einsum("sec,sm->ecm", F.one_hot(condition(mask), num_classes=4).float() * mask[:, :, None], x)


def test_tokens_in_places_are_refused() -> None:
    lost = fact_of(lambda x, id: places(x, id, lambda mask: torch.cumsum(mask, dim=0) * mask))  # noqa: A006
    assert isinstance(lost, Lost)
    assert lost.code == "capacity"


def test_places_that_are_no_queue() -> None:
    """Every token at the place that its expert's number says: nobody's capacity."""
    assert fact_of(lambda x, id: places(x, id, lambda mask: mask * 2)) is None  # noqa: A006
