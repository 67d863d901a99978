"""The same bits: in every run, whatever the threads, alone or among others, computed again in backward, in the order of slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.contract.measure import results
from tests.contract.providers import BF16, F32, By, table
from tests.contract.rows import CODED, GATINGS, IDS, STORAGES, WEIGHTS, Row
from tests.contract.tier import TierRow

ROWS = [
    Row("stacked", "the usual call"),
    Row("separate", "a tensor for each expert", {"separate": True}),
    Row("terms", "factors", rank=3),
    Row("codes", "packed weights", encodings=("fp8 blocks", "", "nibbles")),
    TierRow("body", "all ops of the tier", "body", "many-rows-int8"),
]


@table(ROWS, dtypes=3, few=True)
@pytest.mark.parametrize("tokens", [3, 40])
def test_from_run_to_run(by: By, row: Row, dtype: torch.dtype, tokens: int) -> None:
    """Results, and gradients where there are any; on a device the third call of a kind is the first that is played from a record."""
    it = (
        row.drawn(by, dtype)
        if isinstance(row, TierRow)
        else row.drawn(by, dtype, tokens=by.rows(tokens * (10 if by.many else 1)), experts=8)
    )
    trains = by.trains and dtype in by.computes(row.op, grad=True)

    def once() -> list[Tensor]:
        with by.running():
            return results(it.run, it.copied(grad=True), it) if trains else [it.run(it.args)]

    first = once()
    for _ in range(1 if by.interpreted else 3):
        assert all(map(torch.equal, once(), first))


@table(CODED[:-1], lambda by: by.name == "portable", dtypes=4)
def test_packed_weights_as_unpacked_ones(by: By, row: Row, dtype: torch.dtype) -> None:
    """Bit for bit, in the portable code."""
    it = row.drawn(by, dtype)
    options = {name: value for name, value in it.call[1].items() if name not in ("encodings", "scales", "recompute")}
    with by.running():
        assert torch.equal(it.run(it.args), torch.ops.moefuse.experts(*it.plain, **options))


@table(ROWS[:3], grad=True, few=True)
def test_without_gradients_as_with_them(by: By, row: Row, dtype: torch.dtype) -> None:
    """Nothing else is kept; few rows have kernels of their own only where nothing is differentiated."""
    it = row.drawn(by, dtype, tokens=by.rows(40))
    with by.running():
        with_them = it.run(it.copied(grad=True)).detach()
        with torch.no_grad():
            torch.testing.assert_close(it.run(it.args), with_them)


AGAIN = [
    *(Row(f"{gating}-{where}", "h is computed again in backward, from what was kept",
          {"gating": gating, "weight_on_input": where == "input"}) for gating in GATINGS for where in ("output", "input")),
    Row("terms", "from u as it was kept", rank=3),
    Row("codes", "from packed weights", encodings=("fp8 blocks", "", "nibbles")),
]  # fmt: skip


@table(AGAIN, lambda by: by.trains and by.name not in ("parts", "c++"))
def test_computed_again(by: By, row: Row, dtype: torch.dtype) -> None:
    """A layer that keeps no hidden activations has the bits of one that does."""
    it = row.drawn(by, dtype)
    again = Row(row.name, row.why, row.case, row.rank, row.factors, row.encodings, recompute=True).drawn(by, dtype)
    with by.running():
        kept, found = results(it.run, it.copied(grad=True), it), results(again.run, again.copied(grad=True), again)
    assert all(map(torch.equal, found, kept))


@table([Row("plain", "work that is shared out")], lambda by: by.name in ("c++", "c++ few"), dtypes=4)
def test_for_any_number_of_threads(by: By, row: Row, dtype: torch.dtype) -> None:
    it, found = row.drawn(by, dtype, tokens=3, hidden=300, inter=200, hidden_out=310, experts=4), []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            with by.running():
                found += [it.run(it.args) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, found[0]) for r in found)


@table([Row(name, "a row's sums do not know of others", storage) for name, storage in STORAGES.items()],
       lambda by: by.name in ("c++ few", "triton vectors"), dtypes=4)  # fmt: skip
def test_a_token_alone_as_among_others(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(by, dtype)
    x, ids, weights, *rest = it.args
    with by.running():
        together = it.run(it.args)
        alone = [it.run([x[t : t + 1], ids[t : t + 1], weights[t : t + 1], *rest]) for t in range(len(x))]
    assert torch.equal(together, torch.cat(alone))


@table([Row("slots", "1e8 + 1 - 1e8 in float32 is 0 in this order, 1 in another")], lambda by: F32 in by.dtypes)
def test_slots_are_summed_in_order(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(
        by, F32, tokens=1, hidden=1, inter=1, hidden_out=1, experts=3, top_k=3, bias=False, gating="plain", activation="identity"
    )
    for i in (3, 5):
        it.args[i] = [torch.ones_like(it.args[i][0])]
    it.args[0] = torch.ones_like(it.args[0])
    it.args[IDS].copy_(torch.arange(3))
    it.args[WEIGHTS].copy_(torch.tensor([1e8, 1.0, -1e8]))
    with by.running():
        assert it.run(it.args).item() == it.meaning(it.args).item() == 0.0


@table([TierRow("combine", "sums are in float32", "combine")], lambda by: not by.interpreted)
@pytest.mark.parametrize("of", [F32, BF16])
def test_combine_accumulates_in_float32(by: By, row: TierRow, dtype: torch.dtype, of: torch.dtype) -> None:
    """256 + 1 + 1 is 256 in bfloat16 steps, 258 in float32."""
    ids, weights = torch.tensor([[0, 1, 2]], device=by.device), torch.tensor([[256.0, 1.0, 1.0]], device=by.device)
    with by.running():
        xs, order, offsets = torch.ops.moefuse.permute(torch.ones(1, 1, dtype=of, device=by.device), ids, 3)
        assert torch.ops.moefuse.combine(xs, weights, order, offsets, 3, None).item() == 258
