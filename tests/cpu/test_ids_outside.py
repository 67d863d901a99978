"""Ids that belong to no expert: what each spelling makes of them in eager is what it makes of them compiled, an error included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from torch import Tensor, nn

import moefuse
from moefuse import Options
from tests.programs import check
from tests.programs.model import MoE, build, inputs_for
from tests.programs.program import Dense, Filled, Masked, Program, Routing, Selected, Slots, Sorted
from tests.strategies import PHASES, SPELLINGS, odd_ids

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E = 4
ERRORS = (RuntimeError, IndexError)  # a bounds check is not always the operation's own, and Inductor's is another one
VALUES = {"-1": -1, "-E": -E, "-E - 1": -E - 1, "E": E, "E + 3": E + 3}

NOBODY = dict.fromkeys(VALUES, "nobody")
RAISES = dict.fromkeys(VALUES, "raises")
WRAPS = {"-1": "wraps", "-E": "wraps", "-E - 1": "raises", "E": "raises", "E + 3": "raises"}
SHIFTS = {"-1": "shifts", "-E": "shifts", "-E - 1": "shifts", "E": "nobody", "E + 3": "nobody"}
FIRST = {"-1": "first", "-E": "first", "-E - 1": "first", "E": "nobody", "E + 3": "nobody"}

PADDED = {**RAISES, "E": "nobody"}

MEANINGS: dict[str, tuple[Any, dict[str, str]]] = {
    "where": (Selected(), NOBODY),
    "any mask": (Selected(find="any_where"), NOBODY),
    "slot loop": (Selected(find="slot_loop", combine="iadd"), NOBODY),
    "one_hot": (Selected(find="onehot_where"), RAISES),
    "one_hot, padded": (Selected(find="onehot_padded"), PADDED),
    "sum of the mask": (Masked(), NOBODY),
    "stacked": (Masked(accumulate="stack_einsum"), NOBODY),
    "one_hot table": (Masked(weight="onehot_einsum"), RAISES),
    "one_hot table, padded": (Masked(weight="onehot_padded"), PADDED),
    "index": (Slots(), WRAPS),
    "index, grid": (Slots(ids="grid", combine="einsum"), WRAPS),
    "index_select": (Slots(gather="index_select"), RAISES),
    "histc": (Sorted(), SHIFTS),
    "compare": (Sorted(counts="compare", unsort="index_add_"), SHIFTS),
    "counts of one_hot": (Sorted(counts="one_hot"), RAISES),
    "counts of one_hot, padded": (Sorted(counts="padded"), PADDED),
    "scatter_add": (Sorted(counts="scatter_add"), RAISES),
    "searchsorted": (Sorted(counts="searchsorted"), FIRST),
    "dense, one_hot": (Dense(weights="onehot_sum"), RAISES),
    "dense, one_hot, padded": (Dense(weights="onehot_padded"), PADDED),
    "dense, gathered": (Dense(weights="gather"), WRAPS),
}
"""The table of docs/design/facts.md."""


def program(spelling: Any) -> Program:
    return Program(spelling, Routing("inputs"), experts=E, top_k=2, tokens=(7,))


def means(model: MoE, meaning: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer on ids that are in range, and give what odd ones are said to mean."""
    outside = (ids < 0) | (ids >= E)
    if meaning == "nobody":
        return model(x, ids.masked_fill(outside, 0), weights.masked_fill(outside, 0))[0]  # type: ignore[no-any-return]
    return model(x, ids % E if meaning == "wraps" else ids.clamp(min=0), weights)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MEANINGS)
def test_ids_that_are_inputs(name: str) -> None:
    """Nothing is known of them; the layer is fused all the same, and agrees with eager on what it never saw when it was compiled."""
    spelling, meanings = MEANINGS[name]
    model, outcome = build(program(spelling)), check.Outcome()
    x, ids, weights = inputs_for(model)
    compiled = torch.compile(model, backend=check.light(outcome), fullgraph=True)
    check.compare(check.execute(compiled, model, (x, ids, weights)), *[check.execute(model, model, (x, ids, weights))] * 2)
    assert len(outcome.fused) == 1, str(outcome)
    for what, value in VALUES.items():
        odd = ids.clone()
        odd[0, 0] = odd[3, 1] = value
        if meanings[what] == "raises":
            with pytest.raises(ERRORS):
                model(x, odd, weights)
        if meanings[what] in ("raises", "shifts"):
            with pytest.raises(ERRORS):
                check.execute(compiled, model, (x, odd, weights))
            continue
        eager = check.execute(model, model, (x, odd, weights))
        torch.testing.assert_close(eager.outputs[0], means(model, meanings[what], x, odd, weights))  # what the table says
        check.compare(check.execute(compiled, model, (x, odd, weights)), eager, eager)
    same = ids.clone()
    same[:, 1] = same[:, 0]
    eager = check.execute(model, model, (x, same, weights))
    check.compare(check.execute(compiled, model, (x, same, weights)), eager, eager)
    assert outcome.graphs == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["where", "one_hot", "index", "index_select", "histc", "searchsorted"])
def test_through_inductor(name: str) -> None:
    """The bounds checks are in Inductor's code."""
    spelling, meanings = MEANINGS[name]
    model = build(program(spelling))
    x, ids, weights = inputs_for(model)
    compiled = torch.compile(model, backend="moefuse", fullgraph=True)
    for what, value in {"": 0, **VALUES}.items():
        odd = ids.clone()
        odd[0, 0] = value
        if meanings.get(what) in ("raises", "shifts"):
            with pytest.raises(ERRORS):
                compiled(x, odd, weights)
        else:
            eager = check.execute(model, model, (x, odd, weights))
            check.compare(check.execute(compiled, model, (x, odd, weights)), eager, eager)
    assert len(moefuse.last_report().fused) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda cls: cls.__name__.lower())
def test_ids_that_the_router_changed(spelling: type[Any]) -> None:
    """Any program whose router subtracts from its ids, looks them up, drops some, or casts them: what eager computes, or an error."""

    @settings(phases=PHASES, suppress_health_check=list(HealthCheck))
    @given(odd_ids((spelling,)))
    def run(p: Program) -> None:
        event(p.routing.ids)
        # A tensor that nobody fills has any value for a slot of no expert.
        p = replace(p, spelling=replace(p.spelling, init="zeros")) if isinstance(p.spelling, Filled) else p
        model = build(p)
        try:
            for seed in range(2):  # those that are compared
                inputs = inputs_for(model, seed)
                model(*inputs)
        except ERRORS:
            if p.routing.ids == "int32":
                return  # it may be the dtype that is wrong: one_hot takes no other than int64
            torch._dynamo.reset()
            with pytest.raises(ERRORS):
                torch.compile(model, backend=check.light(check.Outcome(), Options(verify="off")), fullgraph=True)(*inputs)
            return
        check.check_model(model, plain=False)

    run()


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MANY, WIDTH = 300, 4


class Cast(nn.Module):
    """Weights gathered for each slot, by ids that went through another dtype."""

    def __init__(self, change: Callable[[Tensor], Tensor], experts: int = MANY) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))
        self.w_out = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        ids = self.change(ids)
        h = F.silu(torch.einsum("th,tkih->tki", x, self.w_in[ids]))
        return (torch.einsum("tki,tkhi->tkh", h, self.w_out[ids]) * weights[..., None]).sum(1)


def agrees(model: nn.Module, x: Tensor) -> check.Outcome:
    """Without the verification, which sees some of what the facts get wrong."""
    outcome = check.Outcome()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=check.light(outcome, Options(verify="off")), fullgraph=True)(x), model(x))
    return outcome


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOATS], ids=str)
def test_casts_of_more_ids_than_a_byte_holds(dtype: torch.dtype) -> None:
    """256 and 0 are one byte, 257 and 256 one bfloat16; as int8, ids from 128 on are below zero."""
    torch.manual_seed(0)
    outcome = agrees(Cast(lambda ids: ids.to(dtype).long()), torch.randn(200, WIDTH))
    assert dtype not in (torch.int16, torch.int32, torch.int64) or len(outcome.fused) == 1


@pytest.mark.parametrize("change", [lambda ids: ids - 99, lambda ids: ids - 300, lambda ids: torch.where(ids > 9, ids - 300, ids)])
def test_indices_that_count_from_the_end(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert len(agrees(Cast(change), torch.randn(200, WIDTH)).fused) == 1


@pytest.mark.parametrize("change", [lambda ids: ids.remainder(7), lambda ids: (ids + 5) % 300, lambda ids: ids.clamp(3, 9)])
def test_ids_that_arithmetic_keeps_in_range_are_not_mapped(change: Callable[[Tensor], Tensor]) -> None:
    """As for the indices of a top-k, the op takes them as they are."""
    torch.manual_seed(0)
    graphs: list[torch.fx.GraphModule] = []
    light = check.light(check.Outcome())

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(gm)
        return light(gm, example_inputs)

    model, x = Cast(change), torch.randn(20, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    (op,) = [n for n in graphs[0].graph.nodes if n.target is torch.ops.moefuse.experts.default]
    assert str(op.args[1].target) in ("remainder", "clamp", "<built-in function mod>")


class Assigned(nn.Module):
    """``out[tok] += y`` adds once what is chosen twice."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        ids, out = self.change(ids), torch.zeros_like(x)
        for e in range(2):
            tok, slot = torch.where(ids == e)
            out[tok] += self.experts[e](x[tok]) * weights[tok, slot, None]
        return out


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_casts_that_merge_ids_lose_that_they_are_distinct(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert agrees(Assigned(lambda ids: ids.to(dtype).long()), torch.randn(20, WIDTH)).fused == []


class Gated(nn.Module):
    """A table made of the mask of the chosen experts, and scaled: it is read by the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        ids = ids - 1
        table = ((ids[..., None] == torch.arange(E)) * weights[..., None]).sum(1) * 2.5
        return sum(self.experts[e](x) * table[:, e, None] for e in range(E))  # type: ignore[return-value]


def test_a_table_is_not_read_where_it_has_no_entry() -> None:
    torch.manual_seed(0)
    assert len(agrees(Gated(), torch.randn(20, WIDTH)).fused) == 1


class Sentinels(nn.Module):
    """Experts of one rank, as transformers writes them: ids of E belong to experts elsewhere, and their rows are masked."""

    def __init__(self, *, in_place: bool, masked: bool = True) -> None:
        super().__init__()
        self.w_in, self.b_in = nn.Parameter(torch.randn(E, 8, 8)), nn.Parameter(torch.randn(E, 8))
        self.w_out, self.b_out = nn.Parameter(torch.randn(E, 8, 8)), nn.Parameter(torch.randn(E, 8))
        self.in_place, self.masked = in_place, masked

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ordered, order = torch.sort(ids.reshape(-1))
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        elsewhere = (ordered >= E).unsqueeze(-1)
        if self.in_place:
            ordered.clamp_(max=E - 1)
        else:
            ordered = ordered.clamp(max=E - 1)
        h = self.zeroed(torch.ops.transformers.grouped_mm_fallback(x[order // 2], self.w_in, offs=offsets) + self.b_in[ordered], elsewhere)
        y = torch.ops.transformers.grouped_mm_fallback(F.silu(h), self.w_out, offs=offsets) + self.b_out[ordered]
        y = self.zeroed(y, elsewhere) * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, y)

    def zeroed(self, rows: Tensor, elsewhere: Tensor) -> Tensor:
        return rows.masked_fill(elsewhere, 0.0) if self.masked else rows


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_sentinels(in_place: bool, masked: bool) -> None:
    """Masked ones belong to nobody, and do not raise where their clamped number is an index; negative ids do, in place of a mess."""
    import transformers.integrations.moe  # noqa: F401  (registers the op)

    torch.manual_seed(0)
    model, outcome = Sentinels(in_place=in_place, masked=masked), check.Outcome()
    compiled = torch.compile(model, backend=check.light(outcome), fullgraph=True)
    x, ids, weights = torch.randn(9, 8), torch.rand(9, E).argsort(-1)[:, :2], torch.rand(9, 2)
    with torch.no_grad():
        for value in (0, E, E + 3):
            ids[0, 0] = ids[4, 1] = value
            torch.testing.assert_close(compiled(x, ids, weights), model(x, ids, weights))
        if masked:
            ids[0, 0] = -1
            with pytest.raises(ERRORS):
                compiled(x, ids, weights)
    assert len(outcome.fused) == masked, str(outcome)


class Indexed(nn.Module):
    """Weights picked slot by slot; rows of ids of E become zeros, which no id can have that got so far."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 8, 8)), nn.Parameter(torch.randn(E, 8, 8))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        h = F.silu(torch.bmm(self.w_in[flat], x.repeat_interleave(2, 0)[:, :, None]))
        y = torch.bmm(self.w_out[flat], h)[:, :, 0] * weights.reshape(-1, 1)
        return y.masked_fill_((flat >= E)[:, None], 0.0).view(len(x), 2, -1).sum(1)


def test_zeros_for_ids_that_raise() -> None:
    """They change nothing, and the ids still raise; negative ones count from the end."""
    torch.manual_seed(0)
    model, outcome = Indexed(), check.Outcome()
    compiled = torch.compile(model, backend=check.light(outcome), fullgraph=True)
    x, ids, weights = torch.randn(9, 8), torch.rand(9, E).argsort(-1)[:, :2], torch.rand(9, 2)
    with torch.no_grad():
        for value in (0, -1, -E):
            ids[0, 0] = ids[4, 1] = value
            torch.testing.assert_close(compiled(x, ids, weights), model(x, ids, weights))
        ids[0, 0] = E
        with pytest.raises(ERRORS):
            compiled(x, ids, weights)
    assert len(outcome.fused) == 1, str(outcome)
