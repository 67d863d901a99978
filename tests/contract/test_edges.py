"""The ends of what may be given: sizes, ids, strides, lists."""

from __future__ import annotations

import pytest
import torch

from tests.contract.measure import right
from tests.contract.providers import F64, By, table
from tests.contract.rows import EDGES, IDS, MANY, WEIGHTS, Row, X
from tests.contract.test_values import check
from tests.contract.tier import EXPERTS, ROUTINGS, draw, ops, sorted_slots

STORED = [
    Row("stacked", "strides of each argument", {"low_id": 0}),
    Row("in-out", "weights that are stored the other way", {"low_id": 0, "transposed": True}),
    Row("terms", "factors, too", {"low_id": 0}, rank=3),
]


@table(EDGES, dtypes=4)
def test_every_edge(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(MANY, lambda by: by.many, dtypes=4)
def test_many_rows(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table([Row("100", "as many as fit into int8", {"low_id": 0, "experts": 100}),
        Row("200", "more, where ids hold them", {"low_id": 0, "experts": 200})], few=True)  # fmt: skip
@pytest.mark.parametrize("of", [torch.int8, torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("tokens", [4, 90], ids=["sorted-one-by-one", "sorted-at-once"])
def test_any_integer_dtype_of_ids(by: By, row: Row, dtype: torch.dtype, of: torch.dtype, tokens: int) -> None:
    if row.name == "200" and of == torch.int8:
        return
    it = row.drawn(by, dtype, tokens=by.rows(tokens), high_id=100 if of == torch.int8 else 200, hidden=8, inter=8, hidden_out=8)
    with by.running():
        want = it.run(it.args)
        assert torch.equal(it.run([*it.args[:IDS], it.args[IDS].to(of), *it.args[WEIGHTS:]]), want)


@table(STORED, dtypes=4)
def test_strides_of_every_kind(by: By, row: Row, dtype: torch.dtype) -> None:
    """Gaps between features and rows, columns first, weights between other numbers: all NaN around what is read."""
    it = row.drawn(by, dtype)
    args, x = list(it.args), it.args[X]
    args[X] = x.new_full((2 * len(x), 2 * x.shape[1] + 1), float("nan"))[::2, 1::2].copy_(x)
    args[IDS], args[WEIGHTS] = args[IDS].t().contiguous().t(), args[WEIGHTS].t().contiguous().t()
    for i in (3, 5):
        (w,) = args[i]
        order = (0, 2, 1) if row.name == "in-out" else (0, 1, 2)
        turned = w.permute(order)
        room = w.new_full((len(w), turned.shape[1] + 3, turned.shape[2] + 5), float("nan"))
        args[i] = [room[:, 2:-1, 1:-4].copy_(turned).permute(order)]
    with by.running():
        out, plain = it.run(args), it.run(it.args)
    right(by, out, it.meaning(it.args), it.meaning(it.copied(F64)), dtype)
    if by.device == "cpu" and not by.interpreted and row.name == "stacked":
        torch.testing.assert_close(out, plain)
    assert by.name != "c++ few" or row.name != "stacked" or torch.equal(out, plain)


@table([Row("plain", "how many rows"), Row("separate", "how many rows", {"separate": True})], lambda by: by.name in ("c++ few", "c++"))
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
def test_any_number_of_rows_per_expert(by: By, row: Row, dtype: torch.dtype, tokens: int, gating: str) -> None:
    check(by, row, dtype, tokens=tokens, gating=gating, out_dtype=torch.float32)


@table([Row("plain", "several blocks of tokens", {"low_id": 0})], lambda by: by.name == "c++")
def test_a_large_call_goes_in_blocks_of_tokens(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, torch.float32, tokens=1100, hidden=8, inter=8, hidden_out=10000, experts=2)


@table([Row("tier", "what permute gives beside rows")], lambda by: "permute" in by.takes)
@pytest.mark.parametrize("ids", ROUTINGS)
def test_permute_sorts_stably_with_invalid_ids_last(by: By, row: Row, dtype: torch.dtype, ids: str) -> None:
    given = ROUTINGS[ids]
    x = draw(given.shape[0], 3, dtype=dtype).to(by.device)
    with by.running():
        xs, order, offsets = ops.permute(x, given.to(by.device), EXPERTS)
    wanted = sorted_slots(given)
    assert torch.equal(order.cpu(), wanted[0])
    assert torch.equal(offsets.cpu(), wanted[1])
    assert torch.equal(xs, x[order // given.shape[1]])
