"""Rows of experts: indexing, projections, row-local operations and their sums, as domain, axes and expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.passes.graph import calls
from moefuse.passes.infer.gates import gate
from moefuse.passes.ir.expr import Token, show, walk
from moefuse.passes.ir.facts import Buffer, Column, Combined, Lost, Rows, Sum, View, Weight
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.lift import lift
from tests.null.rules_case import B, E, H, I, K, T, assign, call, fact_of, letters, lost_code, rows_of, trace

Function = Callable[..., Any]


def tok(ids: Any, e: int = 1) -> Any:
    return torch.where(ids == e)[0]


def both(ids: Any, e: int = 1) -> Any:
    return torch.where(ids == e)


def order(ids: Any) -> Any:
    return torch.argsort(ids.reshape(-1))


def flat(ids: Any) -> Any:
    return ids.reshape(-1)


# --- rows and what belongs to them ----------------------------------------------------------------------------------------------


ROWS: list[tuple[str, Function, tuple[str, str, str]]] = [
    ("index", lambda x, ids: x[tok(ids)], ("selected", "r f", "token(x)")),
    ("ellipsis", lambda x, ids: x[tok(ids), ...], ("selected", "r f", "token(x)")),
    ("index_select", lambda x, ids: x.index_select(0, tok(ids)), ("selected", "r f", "token(x)")),
    ("none_index", lambda x, ids: x[None, tok(ids)][0], ("selected", "r f", "token(x)")),
    ("mask", lambda x, ids: x[(ids == 1).any(-1)], ("selected", "r f", "token(x)")),
    ("masked_select", lambda x, ids: x.masked_select((ids == 1).any(-1)[:, None]).view(-1, H), ("selected", "r f", "token(x)")),
    ("masked_select_flat", lambda x, ids: torch.masked_select(x, (ids == 1).any(-1, keepdim=True)), ("selected", "rf", "token(x)")),
    ("wide_mask", lambda x, ids: x[(ids == 1).any(-1)[:, None].expand(-1, H)].reshape(-1, H), ("selected", "r f", "token(x)")),
    ("weights_masked_select", lambda weights, ids: weights.masked_select(ids == 1), ("selected", "r", "weight")),
    ("gather", lambda x, ids: torch.gather(x, 0, tok(ids)[:, None].expand(-1, H)), ("selected", "r f", "token(x)")),
    ("weights", lambda weights, ids: weights[both(ids)[0], both(ids)[1]], ("selected", "r", "weight")),
    ("weights_turned", lambda weights, ids: weights.t()[both(ids)[1], both(ids)[0]], ("selected", "r", "weight")),
    ("weights_none", lambda weights, ids: weights[both(ids)[0], both(ids)[1], None], ("selected", "r 1", "weight")),
    ("weights_mask", lambda weights, ids: weights[ids == 1], ("selected", "r", "weight")),
    ("sorted_tokens", lambda x, ids: x[order(ids) // K], ("sorted", "r f", "token(x)")),
    ("sorted_repeated", lambda x, ids: x.repeat_interleave(K, dim=0)[order(ids)], ("sorted", "r f", "token(x)")),
    ("sorted_weights", lambda weights, ids: weights.reshape(-1)[order(ids)], ("sorted", "r", "weight")),
    ("cast", lambda x, ids: x[tok(ids)].to(torch.bfloat16), ("selected", "r f", "token(x).to(bfloat16)")),
    ("half", lambda x, ids: x[tok(ids)][:, 2:], ("selected", "r f", "token(x)[2:5:1]")),
    ("odd", lambda x, ids: x[tok(ids)][..., 1::2], ("selected", "r f", "token(x)[1:5:2]")),
]


@pytest.mark.parametrize(("function", "expected"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_rows(function: Function, expected: tuple[str, str, str]) -> None:
    assert rows_of(function) == expected


LAYOUTS: dict[str, Function] = {
    "features_first": lambda image, image_ids: image.permute(0, 2, 1).reshape(-1, H)[tok(image_ids)],
    "features_first_transposed": lambda image, image_ids: image.transpose(1, 2).contiguous().view(-1, H)[tok(image_ids)],
    "tokens_swapped": lambda steps, image_ids: steps.transpose(0, 1).flatten(0, 1)[tok(image_ids)],
    "apart_and_together": lambda image, image_ids: image.permute(0, 2, 1).reshape(8, H).view(2, 4, H).reshape(-1, H)[tok(image_ids)],
    "repeated": lambda image, image_ids: image.permute(0, 2, 1).reshape(-1, H).repeat_interleave(K, dim=0)[order(image_ids)],
    "ids_first": lambda image, ids_first: image.permute(0, 2, 1).reshape(-1, H)[tok(ids_first.permute(0, 2, 1).reshape(-1, K))],
}
"""Rows that a reshape copied out of a tensor in another layout: row t is that of token t, whatever the layout was."""


@pytest.mark.parametrize("function", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_of_another_layout(function: Function) -> None:
    traced = trace(function)
    assert isinstance(traced.fact, Rows)
    assert letters(traced.fact.axes) == "r f"
    (token,) = [e for e in walk(traced.fact.expr) if isinstance(e, Token)]
    copied = next(n for n in traced.graph.nodes if n.target in ("reshape", "view", "flatten") and n.meta["example_value"].shape == (8, H))
    assert token.source is copied, "the rows are those of the copy"


@pytest.mark.parametrize(
    "function",
    [
        lambda image, image_ids: image.permute(0, 2, 1)[tok(image_ids)],  # nobody made rows: there are two of them
        lambda image, ids: image.permute(0, 2, 1).reshape(-1, H)[tok(ids)],  # 8 rows, 7 tokens
        lambda image, image_ids: image.permute(0, 2, 1).reshape(H, -1)[tok(image_ids)],
    ],
)
def test_rows_of_another_layout_that_are_not_the_tokens(function: Function) -> None:
    assert not isinstance(fact_of(function), Rows)


def test_slots_of_another_layout_keep_their_ids() -> None:
    """[T, K] turned over and flattened: numbers of slots are read from the ids, and are in another order than theirs."""
    fact = fact_of(lambda ids: ids.t().reshape(-1))
    assert fact.root.target == "ids"


def test_a_parameter_in_another_order_stays_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op reads it where it is stored; a copy would be made for every call."""

    def function(w_in: Any) -> Any:
        return w_in.permute(0, 2, 1).reshape(E * H, 2 * I).view(E, H, 2 * I)[1]

    assert fact_of(function).root.target != "w_in"
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: torch.nn.Parameter(empty(*args, **options)))
    weight = fact_of(function)
    assert isinstance(weight, Weight)
    assert (weight.root.target, weight.expert) == ("w_in", 1)


def test_rows_of_another_tensor_are_lost() -> None:
    """13 rows indexed by the numbers of 7 tokens."""
    assert lost_code(lambda other, ids: other[tok(ids)]) == "tokens-differ"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids: x[torch.where(ids == 1)[1]],  # slot numbers
        lambda x, ids: x[tok(ids) + 1],
        lambda x, ids: x[tok(ids).flip(0)],
    ],
)
def test_rows_of_other_tokens(function: Function) -> None:
    assert not isinstance(fact_of(function), Rows)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids: x.masked_select((ids == 1).any(-1)[:, None]).view(H, -1),  # elements in another order
        lambda x, ids: x.t().masked_select((ids == 1).any(-1)),  # columns
    ],
)
def test_elements_that_are_no_rows(function: Function) -> None:
    assert not isinstance(fact_of(function), Rows)


def of_one(ids: Any) -> Any:
    """Row numbers of the tokens of expert 1, each once."""
    return torch.where((ids == 1).any(-1))[0]


SLOT_WEIGHTS: list[Callable[[Any, Any], Any]] = [
    lambda weights, ids: (weights[of_one(ids)] * (ids[of_one(ids)] == 1)).sum(-1),
    lambda weights, ids: ((ids == 1)[of_one(ids)].float() * weights[of_one(ids)]).sum(dim=1),
    lambda weights, ids: (weights * (ids == 1))[of_one(ids)].sum(-1),
    lambda weights, ids: torch.where(ids[of_one(ids)] == 1, weights[of_one(ids)], 0.0).sum(-1),
    lambda weights, ids: weights[of_one(ids)].masked_fill(ids[of_one(ids)] != 1, 0.0).sum(-1),
    lambda weights, ids: (weights[(ids == 1).any(-1)] * (ids == 1)[(ids == 1).any(-1)]).sum(-1),
    lambda weights, ids: weights[of_one(ids)].gather(1, (ids == 1)[of_one(ids)].int().argmax(-1, keepdim=True)).squeeze(1),
    lambda weights, ids: weights[of_one(ids), (ids[of_one(ids)] == 1).long().argmax(-1)],
]
"""The weight of a row from the slots of its token."""


@pytest.mark.parametrize("function", SLOT_WEIGHTS)
@pytest.mark.parametrize("chosen", [False, True])
def test_weights_by_the_slots_of_a_row(function: Callable[[Any, Any], Any], chosen: bool) -> None:
    """Whether or not an expert may be twice in a token."""

    def by_topk(scores: Any, weights: Any) -> Any:
        return function(weights, scores.topk(K)[1])

    def given(weights: Any, ids: Any) -> Any:
        return function(weights, ids)

    domain, axes, weight = rows_of(by_topk if chosen else given)
    assert (domain, axes) == ("selected", "r")
    assert weight in ("weight", "gate[1]")


def test_the_weight_of_the_slot_that_rows_were_chosen_in() -> None:
    """``w[tok][:, k]``; of another slot it is a feature like any other."""
    for function in (lambda weights, ids: weights[ids[:, 1] == 2][:, 1], lambda weights, ids: weights[ids[:, 1] == 2][:, 1 - K]):
        assert rows_of(function) == ("selected", "r", "gate[2]")
    for function in (lambda weights, ids: weights[ids[:, 1] == 2][:, 0], lambda weights, ids: weights[(ids == 2).any(-1)][:, 1]):
        found = fact_of(function)
        assert not isinstance(found, Rows) or rows_of(function)[2] not in ("weight", "gate[2]")


@pytest.mark.parametrize(
    "function",
    [
        lambda weights, scores: weights[of_one(scores.topk(K)[1])].gather(
            1, (scores.topk(K)[1] == 1)[of_one(scores.topk(K)[1])].int().argmax(-1, keepdim=True)
        ),  # of another choice
        lambda weights, ids: (weights[of_one(ids)] * (ids[of_one(ids)] != 1)).sum(-1),  # the other slots
        lambda weights, ids: (weights[of_one(ids)] * (ids[of_one(ids)] == 2)).sum(-1),
        lambda weights, ids: (weights[of_one(ids)] * (ids == 2)[of_one(ids)]).sum(-1),
        lambda weights, ids: (weights[of_one(ids)] * (ids[of_one(ids)] == 1)).sum(0),
        lambda weights, ids: (weights[of_one(ids)] * (ids[of_one(ids)] == 1)).sum(),
        lambda weights, ids: torch.where(ids[of_one(ids)] == 1, weights[of_one(ids)], 1.0).sum(-1),
        lambda weights, ids: (weights[tok(ids)] * (ids[tok(ids)] == 1)).sum(-1),  # a row for each slot: both weights twice
        lambda weights, ids: (weights * (ids == 1)).sum(-1)[tok(ids)],
        lambda weights, ids: weights[tok(ids)].gather(1, (ids[tok(ids)] == 1).int().argmax(-1, keepdim=True)),  # the first one twice
        lambda weights, ids: weights[of_one(ids)][ids[of_one(ids)] == 1],  # more weights than rows
        lambda weights, ids: weights[of_one(ids), (ids[of_one(ids)] == 1).int().argmin(-1)],
        lambda weights, ids: weights[of_one(ids), (ids[of_one(ids)] != 1).int().argmax(-1)],
        lambda x, ids: x[of_one(ids)] * (ids[of_one(ids)] == 1).any(-1, keepdim=True),  # nothing reads that yet
    ],
)
def test_weights_of_other_slots(function: Function) -> None:
    fact = fact_of(function)
    assert not isinstance(fact, Rows), show(fact.expr)


def test_rows_by_token_and_by_slot_are_the_same_where_an_expert_is_once_in_a_token() -> None:
    """``w[mask]`` beside rows of ``mask.any(-1)``; not where ids may repeat, or slots come first."""

    def meet(x: Any, weights: Any, ids: Any, rows: Any) -> Any:
        return x[rows(ids)] * weights[ids == 1][:, None]

    def once(x: Any, weights: Any, scores: Any) -> Any:
        return meet(x, weights, scores.topk(K)[1], of_one)

    def again(x: Any, weights: Any, ids: Any) -> Any:
        return meet(x, weights, ids, of_one)

    def turned(x: Any, weights: Any, scores: Any) -> Any:
        return meet(x, weights, scores.topk(K)[1], lambda ids: torch.where((ids == 1).t())[1])

    assert isinstance(fact_of(once), Rows)
    assert lost_code(again) == lost_code(turned) == "experts-differ"


def test_weights_of_two_selections() -> None:
    """Token numbers of one expert and slot numbers of another."""
    assert not isinstance(fact_of(lambda weights, ids: weights[both(ids, 1)[0], both(ids, 2)[1]]), Rows)


def test_one_expert_of_a_stack() -> None:
    fact = fact_of(lambda w_in: w_in[1])
    assert isinstance(fact, Weight)
    assert (fact.expert, letters(fact.axes)) == (1, "w w")


def test_a_stack_by_ids() -> None:
    fact = fact_of(lambda w_in, ids: w_in[ids])
    assert isinstance(fact, Weight)
    assert (fact.expert, letters(fact.axes)) == (None, "t k w w")


def test_a_column_of_the_slots() -> None:
    fact = fact_of(lambda ids: ids[:, 1])
    assert isinstance(fact, Column)
    assert fact.slot == 1


def by_sorted_ids(x: Any, ids: Any, w: Any, perm: Any) -> Any:
    return torch.bmm(w[flat(ids)[perm]], x[perm // K].unsqueeze(-1)).squeeze(-1)


# --- projections ----------------------------------------------------------------------------------------------------------------


PROJECTIONS: list[tuple[str, Function, tuple[str, str, str]]] = [
    ("linear", lambda x, ids, w_in: F.linear(x[tok(ids)], w_in[1]), ("selected", "r f", "linear(token(x), w_in)")),
    ("matmul", lambda x, ids, w_in: x[tok(ids)] @ w_in[1].t(), ("selected", "r f", "linear(token(x), w_in)")),
    ("mm", lambda x, ids, w_in: torch.mm(x[tok(ids)], w_in[1].T), ("selected", "r f", "linear(token(x), w_in)")),
    ("einsum", lambda x, ids, w_in: torch.einsum("rh,ih->ri", x[tok(ids)], w_in[1]), ("selected", "r f", "linear(token(x), w_in)")),
    ("own", lambda x, ids, one: F.linear(x[tok(ids)], one), ("selected", "r f", "linear(token(x), one)")),
    (
        "bias",
        lambda x, ids, w_out, b_out, w_up: F.linear(F.linear(x[tok(ids)], w_up[1]), w_out[1], b_out[1]),
        ("selected", "r f", "add(linear(linear(token(x), w_up), w_out), vector(b_out))"),
    ),
    ("bmm", lambda x, w_in: torch.bmm(x.expand(E, T, H), w_in.transpose(1, 2)), ("dense", "e t f", "linear(token(x), w_in)")),
    ("dense_einsum", lambda x, w_in: torch.einsum("th,eih->tei", x, w_in), ("dense", "t e f", "linear(token(x), w_in)")),
    ("dense_matmul", lambda x, w_in: torch.matmul(x, w_in.mT), ("dense", "e t f", "linear(token(x), w_in)")),
    ("slots_grid", lambda x, ids, w_in: torch.einsum("th,tkih->tki", x, w_in[ids]), ("slots", "t k f", "linear(token(x), w_in)")),
    (
        "slots_weight_first",
        lambda x, ids, w_in: torch.einsum("tkih,th->tki", w_in[ids, ...], x),
        ("slots", "t k f", "linear(token(x), w_in)"),
    ),
    (
        "slots_of_each_sequence",
        lambda steps, ids_of_steps, w_in: torch.einsum("bskih,bsh->bski", w_in[ids_of_steps, ...], steps),
        ("slots", "t t k f", "linear(token(steps), w_in)"),
    ),
    (
        "slots_ellipsis",
        lambda steps, ids_of_steps, w_in: torch.einsum("...h,...kih->...ki", steps, w_in[ids_of_steps]),
        ("slots", "t t k f", "linear(token(steps), w_in)"),
    ),
    (
        "slots_without_an_arrow",
        lambda x, ids, w_in: torch.einsum("...z,...abz", x, w_in[ids, :, ...]),
        ("slots", "t k f", "linear(token(x), w_in)"),
    ),
    (
        "slots_flat",
        lambda x, ids, w_in: torch.bmm(w_in[flat(ids)], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1),
        ("slots", "tk f", "linear(token(x), w_in)"),
    ),
    (
        "sorted_gathered",
        lambda x, ids, w_in: by_sorted_ids(x, ids, w_in, order(ids)),
        ("sorted", "r f", "linear(token(x), w_in)"),
    ),
]


@pytest.mark.parametrize(("function", "expected"), [p[1:] for p in PROJECTIONS], ids=[p[0] for p in PROJECTIONS])
def test_projections(function: Function, expected: tuple[str, str, str]) -> None:
    """However it is written: a row times the weight of its expert."""
    assert rows_of(function) == expected


def test_the_weight_of_another_expert_is_a_matrix_as_any() -> None:
    assert rows_of(lambda x, ids, w_in: F.linear(x[tok(ids)], w_in[2])) == ("selected", "r f", "linear(token(x), getitem_2)")


def test_the_weight_of_another_expert_out_of_a_view_is_refused() -> None:
    assert lost_code(lambda x, ids, w_in: F.linear(x[tok(ids)], w_in.transpose(1, 2)[2].t())) == "experts-differ"


def test_rows_beside_weights_of_other_slots_are_refused() -> None:
    """`repeat` puts slots before tokens, the gathered weights have tokens before slots."""
    assert lost_code(lambda x, ids, w_in: torch.bmm(w_in[flat(ids)], x.repeat(K, 1).unsqueeze(-1))) == "tokens-differ"


def test_sorted_weights_beside_rows_in_token_order_are_refused() -> None:
    function = lambda x, ids, w_in: torch.bmm(w_in[flat(ids)[order(ids)]], x.repeat_interleave(K, 0).unsqueeze(-1))  # noqa: E731
    assert lost_code(function) == "tokens-differ"


def test_an_index_behind_an_ellipsis_is_of_the_last_dimension() -> None:
    """``w[..., ids]`` takes columns, of whatever the ids are."""
    assert not isinstance(fact_of(lambda w_in, ids: w_in[..., ids]), Weight)


def test_weights_of_other_slots_beside_rows_by_an_ellipsis_are_refused() -> None:
    assert lost_code(lambda x, ids, w_in: torch.einsum("...h,...ih->...i", x.repeat(K, 1), w_in[flat(ids), ...])) == "tokens-differ"


def test_a_contraction_over_experts_is_no_projection() -> None:
    """Summing weights over experts mixes them."""
    assert not isinstance(fact_of(lambda x, w_in: torch.einsum("th,eih->ti", x, w_in)), Rows)


def grouped(ids: Any, x: Any, w: Any, offsets: Any) -> Any:
    return call(torch.ops.moefuse_test.grouped_mm, x, x[order(ids) // K], w.transpose(1, 2), offs=offsets)


def ends(ids: Any) -> Any:
    return torch.bincount(flat(ids), minlength=E).cumsum(0).to(torch.int32)


@pytest.fixture(scope="module", autouse=True)
def _grouped_mm() -> Any:
    """An operator of the name `grouped_mm`, so that the rule can be tested in float32 on a CPU."""
    patch = pytest.MonkeyPatch()
    patch.setattr(calls, "_NAMESPACES", calls._NAMESPACES | {"moefuse_test"})  # else it would be a stranger's operator
    library = torch.library.Library("moefuse_test", "FRAGMENT")
    library.define("grouped_mm(Tensor x, Tensor w, *, Tensor offs) -> Tensor")
    library.impl("grouped_mm", lambda x, w, *, offs: x.new_empty((x.shape[0], w.shape[2])), "CompositeExplicitAutograd")
    library._register_fake("grouped_mm", lambda x, w, *, offs: x.new_empty((x.shape[0], w.shape[2])))
    yield
    library._destroy()
    patch.undo()


def test_grouped_products() -> None:
    found = rows_of(lambda x, ids, w_in: grouped(ids, x, w_in, ends(ids)))
    assert found == ("sorted", "r f", "linear(token(x), w_in)")


def test_grouped_products_with_other_offsets_are_refused() -> None:
    """Counts are not ends."""
    counts = lambda ids: torch.bincount(flat(ids), minlength=E).to(torch.int32)  # noqa: E731
    assert lost_code(lambda x, ids, w_in: grouped(ids, x, w_in, counts(ids))) == "tokens-differ"


# --- row-local operations -------------------------------------------------------------------------------------------------------


POINTWISE: list[tuple[str, Function, str]] = [
    ("silu", lambda h: F.silu(h), "silu({h})"),
    ("gelu", lambda h: F.gelu(h, approximate="tanh"), "gelu({h}, approximate=tanh)"),
    ("clamp", lambda h: h.clamp(max=7.0), "clamp({h}, max=7.0)"),
    ("scalar", lambda h: h * 2.0 + 1, "add(mul({h}, 2.0), 1)"),
    ("minus", lambda h: h - 1.0, "sub({h}, 1.0)"),
    ("power", lambda h: h**2, "pow({h}, 2)"),
    ("with_itself", lambda h: h * torch.sigmoid(h), "mul({h}, sigmoid({h}))"),
    ("softmax", lambda h: h.softmax(-1), "softmax({h}, dim=-1)"),
    ("mean", lambda h: h - h.mean(-1, keepdim=True), "sub({h}, mean({h}, dim=-1, keepdim=True))"),
    ("layer_norm", lambda h: F.layer_norm(h, (I,)), "layer_norm({h}, (11,), eps=1e-05)"),
    ("no_dropout", lambda h: F.dropout(h, 0.5, training=False), "{h}"),
    ("in_place", lambda h: F.silu(h, inplace=True), "silu({h})"),
    ("picked", lambda h: torch.where(h > 0, h, h * 0.1), "where(gt({h}, 0), {h}, mul({h}, 0.1))"),
    ("or_zeros", lambda h: torch.where(h > 0, h, torch.zeros_like(h)), "where(gt({h}, 0), {h}, full_like({h}, 0.0))"),
    ("times_a_condition", lambda h: h * (h >= 0), "mul({h}, ge({h}, 0))"),
    ("its_numbers", lambda h: h * (h != 0).to(h.dtype), "mul({h}, ne({h}, 0).to(float32))"),
    (
        "filled",
        lambda h: h.masked_fill(h.isnan() | ~(h < 1), 0.0),
        "masked_fill({h}, bitwise_or(isnan({h}), bitwise_not(lt({h}, 1))), 0.0)",
    ),
    ("both", lambda h: torch.where((h > 0) & (h == 2), 0.0, h), "where(bitwise_and(gt({h}, 0), eq({h}, 2)), 0.0, {h})"),
    ("above_the_mean", lambda h: h * (h > h.mean(-1, keepdim=True)), "mul({h}, gt({h}, mean({h}, dim=-1, keepdim=True)))"),
]


@pytest.mark.parametrize(("function", "expected"), [p[1:] for p in POINTWISE], ids=[p[0] for p in POINTWISE])
def test_row_local_operations(function: Function, expected: str) -> None:
    domain, axes, expr = rows_of(lambda x, ids, w_up: function(slots(x, ids, w_up)))
    assert (domain, axes) == ("slots", "t k f")
    assert expr == expected.replace("{h}", "linear(token(x), w_up)")


def with_weights(function: Callable[[Any, Any], Any]) -> Function:
    """What a function makes of an expert's rows [R, 2 I] and their weights [R]."""

    def program(x: Any, ids: Any, weights: Any, w_in: Any) -> Any:
        token, slot = both(ids)
        return function(x[token] @ w_in[1].t(), weights[token, slot])

    return program


WEIGHED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("expand", lambda y, w: y * w[:, None].expand(-1, 2 * I)),
    ("expand_as", lambda y, w: y * w.unsqueeze(1).expand_as(y)),
    ("broadcast_to", lambda y, w: y * w[:, None].broadcast_to(w.shape[0], 2 * I)),
    ("repeat", lambda y, w: y * w[:, None].repeat(1, 2 * I)),
    ("tile", lambda y, w: y * w[:, None].tile(1, 2 * I)),
    ("einsum", lambda y, w: torch.einsum("ri,r->ri", y, w)),
    ("einsum_dots", lambda y, w: torch.einsum("...i,...->...i", y, w)),
]


@pytest.mark.parametrize("function", [f for _, f in WEIGHED], ids=[n for n, _ in WEIGHED])
def test_a_weight_for_each_feature(function: Callable[[Any, Any], Any]) -> None:
    """Of a slot, given to all features before or as it is multiplied: found in public repositories."""
    found = rows_of(with_weights(function))
    assert found == ("selected", "r f", "mul(linear(token(x), w_in), weight)")


@pytest.mark.parametrize(
    "function",
    [
        lambda y, w: y * w[:1, None].expand_as(y),  # the first row's for all
        lambda y, w: torch.einsum("ri,r->ir", y, w),  # in another order
        lambda y, w: w[:, None].expand(-1, 2 * I).mean(-1, keepdim=True) * y.sum(0),  # rows meet
    ],
)
def test_weights_that_are_not_the_rows_own(function: Callable[[Any, Any], Any]) -> None:
    fact = fact_of(with_weights(function))
    assert not isinstance(fact, Rows) or letters(fact.axes) != "r f" or "weight" not in show(fact.expr)


LOST: list[tuple[str, Function, str]] = [
    ("mean_of_tokens", lambda h: h - h.mean(0), "not-row-local"),
    ("softmax_of_tokens", lambda h: h.softmax(0), "not-row-local"),
    ("softmax_of_slots", lambda h: h.softmax(1), "not-row-local"),
    ("sum_of_tokens", lambda h: h.sum(0), "not-row-local"),
    ("sum_of_all", lambda h: h.sum(), "not-row-local"),
    ("dropout", lambda h: F.alpha_dropout(h, 0.5, True), "random"),
    ("noise", lambda h: h * torch.rand_like(h), "random"),
    ("digamma", lambda h: torch.digamma(h), "no-rule"),
    ("flip", lambda h: h.flip(0), "no-rule"),
    ("roll", lambda h: h.roll(1, 0), "no-rule"),
    ("cumsum", lambda h: h.cumsum(0), "not-row-local"),
    ("sort", lambda h: h.sort(0)[0], "no-rule"),
    ("detach", lambda h: h.detach(), "no-rule"),
    ("above_the_mean_of_tokens", lambda h: torch.where(h > h.mean(0), h, 0.1 * h), "not-row-local"),
    ("any_token", lambda h: torch.where((h > 0).any(0), h, 0.1 * h), "no-rule"),
    ("so_many_tokens", lambda h: torch.where((h > 0).sum(0) > 2, h, 0.1 * h), "not-row-local"),
    ("numbers_as_conditions", lambda h: h * torch.logical_and(h, h), "no-rule"),
    ("no_numbers_as_conditions", lambda h: h * torch.logical_not(h), "no-rule"),
    ("numbers_for_conditions", lambda h: h.gt_(0), "no-rule"),
]


@pytest.mark.parametrize(("function", "code"), [p[1:] for p in LOST], ids=[p[0] for p in LOST])
def test_operations_that_lose_the_rows(function: Function, code: str) -> None:
    assert lost_code(lambda x, ids, w_up: function(slots(x, ids, w_up))) == code


@pytest.mark.parametrize("function", [f for _, f, _ in LOST], ids=[n for n, _, _ in LOST])
def test_what_was_lost_is_no_rows(function: Function) -> None:
    """Behind the loss stands a plain tensor; a sum over it is no region of its own."""
    fact = fact_of(lambda x, ids, w_up: function(slots(x, ids, w_up)))
    assert not isinstance(fact, Combined | Sum)


def test_rows_of_two_experts_do_not_meet() -> None:
    function = lambda x, ids, w_up: F.linear(x[tok(ids, 1)], w_up[1]) + F.linear(x[tok(ids, 2)], w_up[2])  # noqa: E731
    assert lost_code(function) == "experts-differ"


def test_a_value_per_token_is_none_per_row() -> None:
    """7 tokens beside the rows of one expert: torch would broadcast only by accident."""
    function = lambda x, ids, w_up, weight: F.linear(x.repeat_interleave(K, 0)[order(ids)], w_up[1]) * weight[:1]  # noqa: E731
    assert not isinstance(fact_of(function), Rows)


def behind(y: Any, ids: Any) -> Any:
    return y[tok(ids)]


def in_steps(y: Any, ids: Any) -> Any:
    sequence, step, _slot = torch.where(ids == 1)
    return y[sequence, step]


BEHIND: list[tuple[str, Function, str]] = [
    ("stack", lambda x, ids, w_up: behind(F.linear(x, w_up[1]), ids), "linear(token(x), w_up)"),
    ("own", lambda x, ids, one: behind(F.silu(F.linear(x, one)), ids), "silu(linear(token(x), one))"),
    ("two", lambda x, ids, one, two: behind(F.linear(F.linear(x, one), two), ids), "linear(linear(token(x), one), two)"),
    (
        "picked",
        lambda x, ids, one: behind((h := F.linear(x, one)).masked_fill(h < 0, 0.0) + torch.zeros_like(h), ids),
        "add(masked_fill({h}, lt({h}, 0), 0.0), full_like({h}, 0.0, dtype=torch.float32))".replace("{h}", "linear(token(x), one)"),
    ),
    ("in the middle", lambda x, ids, one, two: F.linear(behind(F.linear(x, one), ids), two), "linear(linear(token(x), one), two)"),
    ("mask", lambda x, ids, one: F.linear(x, one)[(ids == 1).any(-1)], "linear(token(x), one)"),
    ("mask, stack", lambda x, ids, w_up: F.linear(x, w_up[1])[(ids == 1).any(-1)], "linear(token(x), w_up)"),
    ("gather", lambda x, ids, one: F.linear(x, one).gather(0, tok(ids)[:, None].expand(-1, I)), "linear(token(x), one)"),
    ("index_select", lambda x, ids, w_up: F.linear(x, w_up[1]).index_select(0, tok(ids)), "linear(token(x), w_up)"),
    (
        "two dimensions of tokens",
        lambda steps, ids_of_steps, w_up: in_steps(F.linear(steps, w_up[1]), ids_of_steps),
        "linear(token(steps), w_up)",
    ),
    (
        "flattened behind the expert",
        lambda steps, image_ids, one: behind(F.linear(steps, one).view(-1, I), image_ids),
        "linear(token(steps), one)",
    ),
]


@pytest.mark.parametrize(("function", "expected"), [p[1:] for p in BEHIND], ids=[p[0] for p in BEHIND])
def test_rows_taken_behind_an_expert(function: Function, expected: str) -> None:
    """It computes each row by itself: that it runs on every token changes nothing of the rows of those that chose it."""
    domain, axes, expr = rows_of(function)
    assert (domain, axes, expr) == ("selected", "r f", expected)


def with_two_readers(y: Any, ids: Any) -> Any:
    return y[tok(ids, 1)], y[tok(ids, 2)]


NOT_BEHIND: list[tuple[str, Function]] = [
    ("the weight of another expert", lambda x, ids, w_up: behind(F.linear(x, w_up[2]), ids)),
    ("two experts read it", lambda x, ids, one: with_two_readers(F.linear(x, one), ids)[0]),
    ("written to in between", lambda x, ids, one: behind(F.linear(x, one).add_(1.0).mul(2.0), ids)),
    ("all tokens are mixed", lambda x, ids, one: behind(F.linear(x, one).cumsum(0), ids)),
    ("tokens of another batch", lambda other, ids, w_up: behind(F.linear(other, w_up[1]), ids)),
    ("tokens in another order", lambda steps, image_ids, w_up: behind(F.linear(steps, w_up[1]).transpose(0, 1).reshape(-1, I), image_ids)),
]


@pytest.mark.parametrize("function", [f for _, f in NOT_BEHIND], ids=[n for n, _ in NOT_BEHIND])
def test_what_is_no_expert_behind_which_rows_are_taken(function: Function) -> None:
    fact = fact_of(function)
    assert not isinstance(fact, Rows) or "linear(" not in show(fact.expr)


# --- sums -----------------------------------------------------------------------------------------------------------------------


def expert(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any, e: int) -> Any:
    t, k = both(ids, e)
    return t, F.linear(F.silu(F.linear(x[t], w_up[e])), w_out[e]) * weights[t, k, None]


def accumulated(add: Callable[[Any, Any, Any], Any], experts: Any = range(E)) -> Any:
    def function(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        out = torch.zeros_like(x)
        for e in experts:
            out = add(out, *expert(x, ids, weights, w_up, w_out, e))
        return out

    return fact_of(function)


def by_assignment(out: Any, t: Any, y: Any) -> Any:
    assign(out, t, out[t] + y)
    return out


def by_assignment_behind(out: Any, t: Any, y: Any) -> Any:
    assign(out, (t, ...), out[t, ...] + y)
    return out


ADDS: list[tuple[str, Callable[[Any, Any, Any], Any]]] = [
    ("index_add_", lambda out, t, y: out.index_add_(0, t, y)),
    ("assigned with an ellipsis", by_assignment_behind),
    ("index_add", lambda out, t, y: torch.index_add(out, 0, t, y)),
    ("index_put_", lambda out, t, y: out.index_put_((t,), y, accumulate=True)),
    ("scatter_add", lambda out, t, y: out.scatter_add(0, t[:, None].expand(-1, H), y)),
    ("assignment", by_assignment),
]


@pytest.mark.parametrize("add", [a for _, a in ADDS], ids=[n for n, _ in ADDS])
def test_accumulators(add: Callable[[Any, Any, Any], Any]) -> None:
    fact = accumulated(add)
    assert isinstance(fact, Sum)
    assert [p.rows.domain.expert for p in fact.parts] == [0, 1, 2]
    assert show(fact.parts[1].rows.expr) == "mul(linear(silu(linear(token(x), w_up)), w_out), weight)"
    assert fact.base is None


def test_a_scaled_accumulation_is_a_sum_of_scaled_rows() -> None:
    fact = accumulated(lambda out, t, y: out.index_add_(0, t, y, alpha=2.0))
    assert isinstance(fact, Sum)
    assert show(fact.parts[1].rows.expr) == "mul(mul(linear(silu(linear(token(x), w_up)), w_out), weight), 2.0)"


def test_rows_added_to_other_tokens_are_no_sum() -> None:
    assert not isinstance(accumulated(lambda out, t, y: out.index_add_(0, t.flip(0), y)), Sum)


def test_half_done_assignment_is_a_buffer() -> None:
    fact = fact_of(lambda x, ids: torch.zeros_like(x)[tok(ids)])
    assert isinstance(fact, Buffer)


def slots(x: Any, ids: Any, w_in: Any) -> Any:
    return torch.einsum("th,tkih->tki", x, w_in[ids])


COMBINED: list[tuple[str, Function]] = [
    ("sum", lambda x, ids, w_in, weights: (slots(x, ids, w_in) * weights[..., None]).sum(1)),
    ("einsum", lambda x, ids, w_in, weights: torch.einsum("tki,tk->ti", slots(x, ids, w_in), weights)),
    ("matmul", lambda x, ids, w_in, weights: (weights[:, None, :] @ slots(x, ids, w_in)).squeeze(1)),
]


@pytest.mark.parametrize("function", [f for _, f in COMBINED], ids=[n for n, _ in COMBINED])
def test_weighted_sums_over_slots(function: Function) -> None:
    (fact,) = [f for f in trace(function).ctx.facts.values() if isinstance(f, Combined)]
    assert letters(fact.axes).replace("1 ", "") == "t f"
    assert show(fact.rows.expr) == "mul(linear(token(x), w_in), weight)"


def arange(anchor: Any, count: int = T) -> Any:
    return call(torch.arange, anchor, count)


def numbers(anchor: Any, count: int = T) -> Any:
    return arange(anchor, count).view(1, -1).expand(E, -1)


def wide(index: Any) -> Any:
    return index.reshape(-1, 1).expand(-1, H)


def weighed(x: Any, scores: Any, ids: Any, weights: Any, w_out: Any, w_up: Any, rows: Function) -> Any:
    """Every expert on every token, times its weight, one expert behind the other: [E * T, H]."""
    table = torch.zeros_like(scores).scatter(1, ids, weights).t()
    given = (rows(x) * table.reshape(-1, 1)).view(E, T, H)
    return torch.bmm(torch.bmm(given, w_up.mT), w_out.mT).reshape(-1, H)


GIVEN: dict[str, Function] = {
    "gather": lambda x: torch.gather(x, 0, wide(numbers(x))),
    "two dimensions": lambda x: x[numbers(x)].reshape(-1, H),
    "index_select": lambda x: x.index_select(0, numbers(x).flatten()),
    "repeat": lambda x: x[arange(x).repeat(E)],
}
INTO: dict[str, Callable[[Any, Any], Any]] = {
    "scatter_add": lambda out, y: out.scatter_add(0, wide(numbers(out)), y),
    "index_add": lambda out, y: out.index_add(0, numbers(out).reshape(-1), y),
    "index_put": lambda out, y: out.index_put((arange(out).repeat(E),), y, accumulate=True),
}
NOT_INTO: dict[str, Callable[[Any, Any], Any]] = {
    "tokens before experts": lambda out, y: out.scatter_add(0, wide(arange(out).repeat_interleave(E)), y),
    "the next token": lambda out, y: out.index_add(0, (arange(out) + 1).repeat(E) % T, y),
    "more rows than tokens": lambda out, y: torch.cat([out, out]).index_add(0, numbers(out).reshape(-1), y),
    "not all features": lambda out, y: out.scatter_add(0, wide(numbers(out))[:, :2], y),
}


def of_every_expert(given: Function, into: Callable[[Any, Any], Any]) -> Any:
    def function(x: Any, x2: Any, scores: Any, ids: Any, weights: Any, w_out: Any, w_up: Any) -> Any:
        return into(x2, weighed(x, scores, ids, weights, w_out, w_up, given))

    return fact_of(function)


@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("given", GIVEN)
def test_rows_and_sums_by_the_numbers_of_tokens(given: str, into: str) -> None:
    """Llama 4's reference: tokens are gathered once for each expert by their numbers, and added by the same numbers."""
    fact = of_every_expert(GIVEN[given], INTO[into])
    assert isinstance(fact, Combined)
    assert (fact.rows.domain.name, letters(fact.axes), fact.base is not None) == ("dense", "t f", True)
    assert show(fact.rows.expr) == "linear(linear(mul(token(x), gate[e]), w_up), w_out)"


@pytest.mark.parametrize("into", NOT_INTO)
def test_sums_by_other_numbers(into: str) -> None:
    assert not isinstance(of_every_expert(GIVEN["gather"], NOT_INTO[into]), Combined)


def test_rows_by_numbers_of_other_tokens() -> None:
    """More tokens than numbers: the rows are of the first ones."""
    assert not isinstance(fact_of(lambda other: other[numbers(other, T)]), View)
    assert isinstance(fact_of(lambda other: other[numbers(other, B)]), View)


TURNED: dict[str, tuple[Function, bool | None]] = {
    "by token": (lambda table: table.sigmoid(), False),
    "by expert": (lambda table: table.t().sigmoid(), True),
    "by expert, and turned back": (lambda table: table.t().sigmoid().t(), True),
    "turned, and back, then computed": (lambda table: table.t().t().sigmoid(), False),
    "in one dimension": (lambda table: table.reshape(-1).sigmoid().view(T, E), None),
}


@pytest.mark.parametrize(("computed", "turned"), TURNED.values(), ids=TURNED)
def test_where_a_computed_table_has_its_experts(computed: Function, turned: bool | None) -> None:
    """Its values are read from the graph, where they stand as the program left them."""

    def function(scores: Any, ids: Any, weights: Any) -> Any:
        return computed(torch.full_like(scores, -torch.inf).scatter(1, ids, weights))

    table = fact_of(function)
    found = gate(table.root, table)
    assert (None if found is None else found.turned) is turned


def test_a_sum_over_tokens_is_refused() -> None:
    assert lost_code(lambda x, ids, w_in: slots(x, ids, w_in).sum(0)) == "not-row-local"


def test_weights_of_other_slots_are_refused() -> None:
    """[K, T] weights where [T, K] are meant."""
    function = lambda x, ids, w_in, weights: slots(x, ids, w_in).reshape(T * K, -1) * weights.t().reshape(-1, 1)  # noqa: E731
    assert lost_code(function) == "tokens-differ"


def test_every_expert_weighted_by_the_dense_table() -> None:
    def function(x: Any, w_in: Any, ids: Any, weights: Any, scores: Any) -> Any:
        table = torch.zeros_like(scores).scatter(1, ids, weights)
        return torch.einsum("tei,te->ti", torch.einsum("th,eih->tei", x, w_in), table)

    fact = fact_of(function)
    assert isinstance(fact, Combined)
    assert (fact.rows.domain.name, show(fact.rows.expr)) == ("dense", "mul(linear(token(x), w_in), gate[e])")


def test_a_masked_expert_is_read_backwards() -> None:
    """An expert on every token becomes rows when the mask multiplies it."""

    def function(x: Any, w_up: Any, w_out: Any, ids: Any, weights: Any) -> Any:
        y = F.linear(F.silu(F.linear(x, w_up[1])), w_out[1])
        return y * (weights * (ids == 1)).sum(-1, keepdim=True)

    traced = trace(function)
    assert isinstance(traced.fact, Rows)
    assert (traced.fact.domain.name, traced.fact.domain.expert) == ("masked", 1)
    assert show(traced.fact.expr) == "mul(linear(silu(linear(token(x), w_up)), w_out), gate[1])"


def test_a_computed_dimension_is_not_read() -> None:
    """``x.unsqueeze(n)`` with a number out of the graph: nothing is known about the result, and nothing fails."""
    traced = trace(lambda x, ids: torch.unsqueeze(x[tok(ids)], x.dim() - 2))
    assert traced.fact is None or isinstance(traced.fact, Lost)


def table(x: Any, ids: Any, w_up: Any, w_out: Any, slot: int, rows_of_slot: int | None = None) -> Any:
    """A tensor with each token's row of the one expert that it chose in a slot."""
    out = torch.zeros_like(x)
    for e in range(E):
        mask = ids[:, slot if rows_of_slot is None else rows_of_slot] == e
        assign(out, mask, F.linear(F.silu(F.linear(x[mask], w_up[e])), w_out[e]))
    return out


SLOT_BY_SLOT: list[Callable[..., Any]] = [
    lambda x, ids, weights, w_up, w_out: (
        table(x, ids, w_up, w_out, 0) * weights[:, 0, None] + weights[:, 1].unsqueeze(-1) * table(x, ids, w_up, w_out, 1)
    ),
    lambda x, ids, weights, w_up, w_out: sum(table(x, ids, w_up, w_out, k) * weights[:, k : k + 1] for k in range(K)),
    lambda x, ids, weights, w_up, w_out: sum(table(x, ids, w_up, w_out, k) * weights.t()[k].view(-1, 1) for k in range(K)),
    lambda x, ids, weights, w_up, w_out: torch.stack([table(x, ids, w_up, w_out, k) * weights[:, k, None] for k in range(K)]).sum(0),
]


@pytest.mark.parametrize("function", SLOT_BY_SLOT)
def test_a_table_for_each_slot_times_its_weights(function: Callable[..., Any]) -> None:
    traced = trace(function)
    assert isinstance(traced.fact, Sum)
    assert {(p.rows.domain.slot, p.rows.domain.expert) for p in traced.fact.parts} == {(k, e) for k in range(K) for e in range(E)}
    assert [type(r) for r in lift(traced.ctx)] == [Region]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ids, weights, w_up, w_out: sum(table(x, ids, w_up, w_out, k) * weights[:, 1 - k, None] for k in range(K)),  # other slot's
        lambda x, ids, weights, w_up, w_out: sum(table(x, ids, w_up, w_out, k) * weights[:, 0, None] for k in range(K)),
        lambda x, ids, weights, w_up, w_out: sum(table(x, ids, w_up, w_out, k, 0) * weights[:, k, None] for k in range(K)),
        lambda x, ids, weights, w_up, w_out: table(x, ids, w_up, w_out, 0) * weights[:, 0, None],  # one slot alone
        lambda x, ids, weights, w_up, w_out: sum(table(x, ids, w_up, w_out, k).relu() * weights[:, k, None] for k in range(K)),
        lambda x, ids, w_up, w_out: sum(table(x, ids, w_up, w_out, k) * x[:, k, None] for k in range(K)),  # features are no slots
    ],
)
def test_tables_of_slots_with_other_weights(function: Callable[..., Any]) -> None:
    assert not any(isinstance(r, Region) for r in lift(trace(function).ctx))
