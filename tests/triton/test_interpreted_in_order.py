"""Rows in the order of inputs in which weights in few bits are multiplied, and the sort that gives tiles and rows of slots, interpreted."""

from __future__ import annotations

import pytest
import torch

from moefuse.kernels.triton.host import packed_specialised, sorted_rows, token_codes
from moefuse.kernels.triton.host.coded import Held, held
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import MADE, Encoding, Packing, Rounding

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter, about NumPy

NIBBLES, EIGHT = Encoding(MADE["u4-8"], (1, 64), "bf16", packing=Packing(1, (0, 4))), Encoding("s8", (1, 0), "bf16")


def weights(encoding: Encoding, inputs: int) -> Held:
    """A projection of eight features."""
    per = 1 if encoding.packing is None else 2
    storage = torch.zeros(2, 8, inputs // per, dtype=torch.uint8 if per == 2 else torch.int8)
    return held([storage], Codes(encoding, [torch.ones(2, *encoding.scales(8, inputs), dtype=torch.bfloat16)], ()))


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("encoding", [NIBBLES, EIGHT], ids=["nibbles", "bytes"])
def test_each_thread_finds_what_it_multiplies(encoding: Encoding, tokens: bool) -> None:
    """Thread q of four has inputs 16 q to 16 q + 15 of 64: of 16 places in a row that a tensor core takes at once it reads 2 q, 2 q + 1,
    2 q + 8 and 2 q + 9. Inputs that are no multiple of a block."""
    inputs, top_k = 320, 2
    x = torch.arange(3 * inputs, dtype=torch.float32).reshape(3, inputs)
    order = torch.tensor([5, 0, 3, 1, 2, 4])
    it = Sorted(order, torch.tensor([0, 4, 6]), 6, 2, top_k)
    rows = x[order // top_k]
    given = x if tokens else rows
    found = packed_specialised.in_order(given, weights(encoding, inputs), it, tokens=tokens)
    of_four = (0, 2, 1, 3) if encoding is NIBBLES else (0, 1, 2, 3)
    for place in range(inputs):
        block, at = divmod(place, 64)
        sixteen, inner = divmod(at, 16)
        q, which = inner % 8 // 2, of_four[inner // 8 * 2 + inner % 2]
        assert torch.equal(found[:, place], rows[:, block * 64 + 16 * q + 4 * sixteen + which]), place


@pytest.mark.parametrize("slots", [6, 9000])
def test_sort_with_tiles(slots: int) -> None:
    """In one launch and in three: rows of slots are the inverse of the order, ids of nobody behind all, tiles are of one expert."""
    ids = torch.randint(-1, 3, (slots // 2, 2), generator=torch.Generator().manual_seed(0))
    it, position = sorted_rows.sort_with_tiles(ids, 3, 16)
    assert torch.equal(it.order[position.long()], torch.arange(slots))
    flat = ids.flatten()
    counts = torch.tensor([int((flat == e).sum()) for e in range(3)])
    assert torch.equal(it.offsets, torch.tensor([0, *counts.cumsum(0).tolist()]))
    assert bool((flat[it.order[it.offsets[3] :]] < 0).all())
    assert it.tiles is not None
    assert it.num_tiles is not None
    tiles = it.tiles.view(-1, it.max_tiles)[:, : int(it.num_tiles[0])]
    assert int(it.num_tiles[0]) == int(((counts + 15) // 16).sum())
    for e, start, rows in tiles[:3].T.tolist():
        assert it.offsets[e] <= start < it.offsets[e + 1]
        assert rows == min(16, int(it.offsets[e + 1]) - start)


def test_many_tokens_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that are copied are those that rows would have been given."""
    encoding = Encoding("e4m3", (32, 64), activation=Rounding("e4m3", 32))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    it = Sorted(torch.tensor([5, 0, 3, 1, 2, 4]), torch.tensor([0, 4, 6]), 6, 2, 2)
    wanted = token_codes.round_tokens(x, it, encoding)
    monkeypatch.setattr(token_codes, "MANY", 0)
    found = token_codes.round_tokens(x, it, encoding)
    assert found.codes.shape == (6, 128)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
