"""Many rows of experts with weights in few bits on the device: tensor cores get the bits of the definition from registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefuse.ops.coded import CodedCall
from moefuse.ops.coded_weights import Codes
from moefuse.ops.encoding import Encoding, Rounding
from tests.cpu.coded_case import coded, hold
from tests.cpu.ops_case import Case, assert_as_exact, reference, to
from tests.gpu.test_coded import on_gpu, run
from tests.gpu.test_words import ENCODINGS

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LARGE = Case(tokens=600, hidden=256, inter=192, hidden_out=200, experts=7, top_k=3, dtype=BF16, low_id=-1)


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_weights_have_the_bits_of_the_definition(name: str, separate: bool) -> None:
    """Rows of a unit matrix give the weights; features that are no whole tiles, inputs that are no whole blocks of 128."""
    from moefuse.kernels.triton.host import coded as host
    from moefuse.kernels.triton.host import packed_specialised, sorted_rows

    features, inputs = 200, 320 if ENCODINGS[name].block[1] in (0, 32, 64) else 384
    held = hold(ENCODINGS[name], 3, features, inputs, torch.Generator().manual_seed(0))
    if held.encoding.scale:
        held.scale[0, 0, 0], held.scale[0, 1, 0] = 0, 254
    dense = held.dense(BF16).cuda()
    storage, more = held.lists(separate)
    count = len(storage)
    as_bytes = [(t.view(torch.uint8) if t.dtype not in host.ELEMENTS else t).cuda() for t in storage]
    more = [t.cuda() for t in more]
    it = host.held(as_bytes, Codes(held.encoding, more[:count], more[count:]))
    x = torch.eye(inputs, dtype=BF16, device="cuda").repeat(3, 1)
    ids = torch.arange(3, device="cuda").repeat_interleave(inputs)[:, None]
    for rows in (16, 32, 64, 128, 256):
        order, offsets = sorted_rows.sort(ids, 3)
        by = sorted_rows.tiled(sorted_rows.Sorted(order, offsets, ids.numel(), 3, 1), BF16, rows)
        out = torch.full((3 * inputs, features), float("nan"), dtype=BF16, device="cuda")
        assert packed_specialised.refusal(it, BF16, out) is None
        packed_specialised.product(out, packed_specialised.in_order(x, it, by, tokens=True), (it, it), by, (None, None))
        same = out.view(3, inputs, features).transpose(1, 2)
        finite = dense.isfinite().all(2, keepdim=True)  # 0 * inf spoils a feature's other products
        assert torch.equal(torch.where(finite, same, 0), torch.where(finite, dense, 0)), rows
        assert finite.float().mean() > 0.8


@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles", "words, zeros", "mxfp4", "int8 channels"])
def test_layers(name: str, gating: str, rows: int) -> None:
    """Against float64 with the weights that the encoding means; biases, ids of nobody, and the same bits in every run."""
    from moefuse.kernels.triton.provide import packed
    from moefuse.kernels.triton.provide.coded import _as_bytes

    case = LARGE.with_(gating=gating, activation="relu2" if gating == "plain" else "silu", separate=gating == "separate")
    case = case.with_(inter=256 if rows > 64 else 320, up_first=rows == 64 and gating == "interleaved")
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    args, dense = on_gpu(args), on_gpu(dense)
    out = packed.experts(_as_bytes(CodedCall.of(*args, **options)), rows)
    assert out is not None
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    for _ in range(3):
        again = packed.experts(_as_bytes(CodedCall.of(*args, **options)), rows)
        assert torch.equal(again, out)


@pytest.mark.parametrize("name", ["int8 channels", "nibbles", "fp8 blocks", "fp8 blocks, tokens too"])
def test_experts_apart_in_other_orders(name: str) -> None:
    """Layers of one kind share what was recorded of a call, whatever the order of their experts in memory."""
    encoding = ENCODINGS[name] if name in ENCODINGS else Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128))
    case = LARGE.with_(gating="separate", separate=True, inter=256, hidden_out=256)
    args, _, options = coded(case, encoding, encoding, encoding)
    given: list[Any] = on_gpu(args)
    wanted = run(given, options)
    for _ in range(3):
        assert torch.equal(run(given, options), wanted)
        # The same experts elsewhere: the last one first, and with memory between them.
        given = [[t.clone() for t in reversed(a)][::-1] if isinstance(a, list) and a else a for a in given]
    given = [[t.clone() for t in a] if isinstance(a, list) and a else a for a in given]
    assert torch.equal(run(given, options), wanted)
