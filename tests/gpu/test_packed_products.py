"""Many rows of experts with weights in few bits on the device: tensor cores get the bits of the definition from registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.encoding import Encoding, Rounding
from tests.cpu.coded_case import coded
from tests.cpu.ops_case import Case, assert_as_exact, reference, to
from tests.gpu.test_coded import on_gpu, run
from tests.gpu.test_words import ENCODINGS
from tests.gpu.unit_rows import unit_rows

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LARGE = Case(tokens=600, hidden=256, inter=192, hidden_out=200, experts=7, top_k=3, dtype=BF16, low_id=-1)


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_weights_have_the_bits_of_the_definition(name: str, separate: bool) -> None:
    """Rows of a unit matrix give the weights; features that are no whole tiles, inputs that are no whole blocks of 128."""
    from moefuse.kernels.triton.host import layout, packed_specialised

    it = unit_rows(ENCODINGS[name], separate)
    for rows in (16, 32, 64, 128, 256):
        by, out = it.rows(rows), it.out()
        assert packed_specialised.refusal(it.held, BF16, out.shape[1], layout.device_of(out.device)) is None
        packed_specialised.product(out, packed_specialised.in_order(it.x, it.held, by, tokens=True), (it.held, it.held), by, (None, None))
        it.check(out, rows)


@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles", "words, zeros", "mxfp4", "int8 channels"])
def test_layers(name: str, gating: str, rows: int) -> None:
    """Against float64 with the weights that the encoding means; biases, ids of nobody, and the same bits in every run."""
    from moefuse.kernels.triton.provide import packed
    from moefuse.kernels.triton.provide.extended import as_bytes

    case = LARGE.with_(gating=gating, activation="relu2" if gating == "plain" else "silu", separate=gating == "separate")
    case = case.with_(inter=256 if rows > 64 else 320, up_first=rows == 64 and gating == "interleaved")
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    args, dense = on_gpu(args), on_gpu(dense)
    out = packed.experts(as_bytes(ExpertsCall.of_extended(*args, **options)), rows)
    assert out is not None
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    for _ in range(3):
        again = packed.experts(as_bytes(ExpertsCall.of_extended(*args, **options)), rows)
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
