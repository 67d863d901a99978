"""What an integer tensor can hold, and which dtypes keep numbers apart. A bound that is too tight makes a wrong result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.passes.infer.ranges import holds, interval
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.ir.facts import View
from tests.null.rules_case import E, K, T, assign, trace

Function = Callable[..., Any]
INT64 = (-(1 << 63), (1 << 63) - 1)


def bounds_of(function: Function) -> Any:
    traced = trace(function)
    return interval(traced.ctx, traced.returned)


def chosen(scores: Any) -> Any:
    return torch.topk(scores, K)[1]


def drop(ids: Any, mask: Function) -> Any:
    return ids.masked_fill(mask(ids), E)


BOUNDS: list[tuple[Function, tuple[int, int]]] = [
    (lambda ids: ids, INT64),
    (lambda ids: ids.int(), (-(1 << 31), (1 << 31) - 1)),
    (lambda ids: ids.bool().long(), (0, 1)),
    (lambda ids: ids.to(torch.uint8).long(), (0, 255)),
    (lambda scores: chosen(scores), (0, E - 1)),
    (lambda scores: chosen(scores).reshape(-1), (0, E - 1)),
    (lambda scores: chosen(scores).flatten().sort()[0], (0, E - 1)),
    (lambda scores: scores.argmax(-1), (0, E - 1)),
    (lambda scores: chosen(scores) - 1, (-1, E - 2)),
    (lambda scores: 1 - chosen(scores), (2 - E, 1)),
    (lambda scores: chosen(scores) * -2, (2 - 2 * E, 0)),
    (lambda scores: chosen(scores) // 2, (0, (E - 1) // 2)),
    (lambda scores: (chosen(scores) - 1).int(), (-1, E - 2)),
    (lambda scores: (chosen(scores) - 1).bool().long(), (0, 1)),
    (lambda scores: (chosen(scores) - 1).to(torch.uint8), (0, 255)),
    (lambda scores: chosen(scores).half().long(), (0, 2)),
    (lambda scores: (chosen(scores) - 1).half().double().long(), (-1, 1)),
    (lambda scores: (chosen(scores) * 2000).half().long(), INT64),  # 4000 is no number of 16 bits, nor are all below it
    (lambda scores: chosen(scores).half().add_(1).long(), INT64),
    (lambda scores: (chosen(scores).half() / 2).long(), INT64),
    (lambda scores, weights: chosen(scores).masked_fill(weights < 0, -1), (-1, E - 1)),
    (lambda scores, weights: torch.where(weights < 0, E, chosen(scores)), (0, E)),
    (lambda scores, weights, ids: torch.where(weights < 0, ids, chosen(scores)), INT64),
    (lambda ids: ids.remainder(E), (0, E - 1)),
    (lambda ids: ids % E, (0, E - 1)),
    (lambda ids: ids.remainder(-E), (1 - E, 0)),
    (lambda ids: ids & 3, (0, 3)),
    (lambda ids: ids.clamp(0, E - 1), (0, E - 1)),
    (lambda ids: ids.clamp(min=0), (0, INT64[1])),
    (lambda ids: ids.clamp(max=E - 1), (INT64[0], E - 1)),
    (lambda ids: ids.clamp(0, E - 1) + 1 - 1, (0, E - 1)),
    (lambda ids: ids + 1, INT64),
    (lambda ids: ids.clamp(min=0) + 1, INT64),  # may overflow
    (lambda ids: ids.fmod(E), (1 - E, E - 1)),
    (lambda scores: chosen(scores).fmod(-2), (0, 1)),
    (lambda scores, weights: chosen(scores).masked_fill(weights < 0, -1).fmod(2), (-1, 1)),
    (lambda scores: drop(chosen(scores) - 1, lambda ids: ids == -1), (0, E)),
    (lambda scores: drop(chosen(scores) - 1, lambda ids: ids < 0), (0, E)),
    (lambda scores: drop(chosen(scores) - 1, lambda ids: ids == 0), (-1, E)),
    (lambda scores: drop(chosen(scores) - 1, lambda ids: ids + 0 < 0), (-1, E)),  # other numbers, for all that is known
    (lambda ids: torch.where(ids < 0, 0, torch.where(ids >= E, E - 1, ids)), (INT64[0], E - 1)),
    (lambda ids: torch.where(ids >= 0, ids, 0), (0, INT64[1])),
    (lambda scores: torch.where(chosen(scores) > E, 1, 0), (0, 1)),
]


@pytest.mark.parametrize(("function", "expected"), BOUNDS)
def test_bounds(function: Function, expected: tuple[int, int]) -> None:
    assert bounds_of(function) == expected


def written(scores: Any) -> Any:
    ids = chosen(scores)
    ids.sub_(E)
    return ids


def written_by_index(scores: Any) -> Any:
    ids = chosen(scores)
    assign(ids, 0, 7)
    return ids


@pytest.mark.parametrize("function", [written, written_by_index])
def test_what_is_written_to_can_be_anything(function: Function) -> None:
    traced = trace(function)
    behind = [n for n in traced.graph.nodes if n.name in ("getitem", "sub_")]
    assert behind
    assert [interval(traced.ctx, n) for n in behind] == [INT64] * len(behind)


STEPS: list[Callable[[Any, random.Random], Any]] = [
    lambda x, r: x + r.randint(-5, 5),
    lambda x, r: x - r.randint(-5, 5),
    lambda x, r: r.randint(-5, 5) - x,
    lambda x, r: x * r.randint(-3, 3),
    lambda x, r: x // r.randint(1, 4),
    lambda x, r: x.remainder(r.choice((-7, -2, 1, 3, 8))),
    lambda x, r: x & r.choice((0, 3, 6, -2)),
    lambda x, r: x.clamp(min=r.randint(-4, 2)),
    lambda x, r: x.clamp(max=r.randint(-2, 4)),
    lambda x, r: x.clamp(r.randint(-4, 4), r.randint(-4, 4)),
    lambda x, r: x.masked_fill(x > r.randint(-2, 2), r.randint(-9, 9)),
    lambda x, r: torch.where(x > r.randint(-2, 2), x, r.randint(-9, 9)),
    lambda x, r: torch.where(x < 0, x + 3, x),
    lambda x, r: torch.where(x >= r.randint(-3, 3), x, r.randint(-3, 3)),
    lambda x, r: x.masked_fill(x == r.randint(-3, 3), r.randint(-3, 3)),
    lambda x, r: torch.where(x != r.randint(-3, 3), x, r.randint(-3, 3)),
    lambda x, r: torch.where(x <= r.randint(-3, 3), r.randint(-3, 3), x),
    lambda x, r: x.fmod(r.choice((-7, -2, 1, 3, 8))),
    lambda x, r: torch.minimum(x, x.flip(0) - 1),
    lambda x, r: torch.maximum(x, x * 2),
    lambda x, r: x.to(r.choice((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))),
    lambda x, r: x.bool().long(),
    lambda x, r: x.bfloat16().long(),
    lambda x, r: x.flatten().sort()[0].view(T, K),
    lambda x, r: torch.cat((x, x - 1))[T:],
    lambda x, r: x[:, :1].expand(-1, K),
]


def arithmetic(seed: int) -> Function:
    """Some random steps, the same for tensors and for what traces them."""

    def program(scores: Any) -> Any:
        choose = random.Random(seed)
        ids = chosen(scores)
        for step in choose.choices(STEPS, k=choose.randint(1, 6)):
            ids = step(ids, choose)
        return ids

    return program


def test_no_number_is_ever_out_of_bounds() -> None:
    """Random arithmetic on the indices of a top-k: what it gives lies within what the analysis says, and often that is not everything."""
    tight = 0
    for seed in range(150):
        low, high = bounds_of(arithmetic(seed))
        for draw in range(3):
            out: Tensor = arithmetic(seed)(torch.randn(T, E, generator=torch.Generator().manual_seed(draw)))
            assert low <= int(out.min()), (seed, low, out)
            assert int(out.max()) <= high, (seed, high, out)
        tight += high - low < 1000
    assert tight > 75


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_dtype_holds(dtype: torch.dtype) -> None:
    """Exactly the intervals of which a cast there and back gives every number again (as far as one bound at a time says)."""
    for end in (1, 2, 15, 16, 17, 127, 128, 255, 256, 257, 2048, 2049, 40000, 65504, 65505):
        for low, high in ((0, end), (-end, 0)):
            numbers = torch.arange(low, high + 1)
            same = torch.equal(numbers.to(dtype).to(torch.int64), numbers)
            assert holds(dtype, (low, high)) == same, (low, high)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32])
def test_ids_behind_a_cast_that_merges_are_other_ids(dtype: torch.dtype) -> None:
    """A top-k over three experts: true and false, but not bytes, are too few for them."""
    traced = trace(lambda scores: chosen(scores).to(dtype).long())
    found = routing_of(traced.ctx, traced.ctx.view(traced.returned))  # type: ignore[arg-type]
    same = not (dtype == torch.bool or dtype.is_floating_point)
    assert found is None or found.distinct == same


def test_ids_of_which_nothing_is_known_behind_a_cast() -> None:
    """32 bits of 64 may make two ids equal: what follows speaks of the ids behind the cast."""
    traced = trace(lambda ids: ids.int())
    view = traced.ctx.view(traced.returned)
    assert isinstance(view, View)
    assert view.root is traced.returned


def test_shifted_ids_are_distinct_still() -> None:
    traced = trace(lambda scores: (chosen(scores) - 1, chosen(scores) * 0, chosen(scores).remainder(2)))
    found = [routing_of(traced.ctx, traced.ctx.view(n)) for n in traced.returned]  # type: ignore[arg-type, attr-defined]
    assert [r.distinct for r in found if r is not None] == [True, False, False]
