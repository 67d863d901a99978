"""Few rows of experts with weights in few bits on the device: the words that tensor cores read have the bits of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.encoding import EXPONENTS, LDEXP, MADE, POWERS, Encoding, Packing
from tests.cpu.coded_case import coded
from tests.cpu.ops_case import Case, assert_as_exact, reference, to
from tests.gpu.gpu_case import without
from tests.gpu.test_coded import on_gpu, run
from tests.gpu.unit_rows import unit_rows

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
BYTE, WORD = Packing(1, (0, 4)), Packing(1, tuple(range(0, 32, 4)))
ENCODINGS = {
    "fp8 blocks": Encoding("e4m3", (128, 128)),
    "fp8 blocks, powers": Encoding("e4m3", (128, 128), "f32", EXPONENTS),
    "fp8 channels": Encoding("e4m3", (1, 0), "bf16"),
    "fp8 tensor": Encoding("e4m3", (0, 0)),
    "int8 channels": Encoding("s8", (1, 0), "bf16"),
    "int8 groups": Encoding("s8", (1, 32), "f32"),
    "nibbles": Encoding(MADE["u4-8"], (1, 128), "bf16", packing=BYTE),
    "nibbles, zeros": Encoding(MADE["u4"], (1, 64), "bf16", zero=True, packing=Packing(1, (4, 0))),
    "nibbles in float32": Encoding(MADE["u4-8"], (1, 32), "f32", packing=BYTE),
    "words, zeros": Encoding(MADE["u4"], (1, 128), "f32", zero=True, packing=WORD),
    "mxfp4": Encoding(MADE["e2m1"], (1, 32), "f32", EXPONENTS, packing=BYTE),
    "mxfp4 by ldexp": Encoding(MADE["e2m1"], (1, 32), "bf16", LDEXP, packing=BYTE),
    "mxfp4, powers": Encoding(MADE["e2m1"], (1, 64), "f32", POWERS, packing=BYTE),
}
SMALL = Case(tokens=9, hidden=256, inter=160, hidden_out=200, experts=7, top_k=3, dtype=BF16, low_id=-1)


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are few here, so few tokens are many rows of each."""
    without(monkeypatch, "packed weights")


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_weights_have_the_bits_of_the_definition(name: str, separate: bool) -> None:
    """Rows of a unit matrix give the weights: slots for themselves and in tiles, features and inputs that are no whole blocks."""
    from moefuse.kernels.triton.host import sorted_rows, words

    it = unit_rows(ENCODINGS[name], separate)
    assert words.refusal(it.held, BF16, sorted_rows.device_of(it.x.device)) is None
    for cols in (0, 8, 16):
        rows = it.rows(cols) if cols else None
        for part in (words.Part(4, 2), words.Part(1, 4), words.Part(8, 1)):
            out = it.out()
            words.product(out, it.x, it.ids, rows, 3, None, (it.held, it.held), (None, None), part, cols or 8)
            it.check(out, (cols, part))


@pytest.mark.parametrize("tokens", [1, 2, 8, 20, 28])
@pytest.mark.parametrize("gating", ["merged", "separate", "interleaved", "plain"])
@pytest.mark.parametrize("name", ["fp8 blocks", "nibbles", "words, zeros", "mxfp4", "int8 channels"])
def test_layers(name: str, gating: str, tokens: int) -> None:
    """Against float64 with the weights that the encoding means; biases, ids of nobody, and the same bits in every run."""
    from moefuse.kernels.triton.provide import words
    from moefuse.kernels.triton.provide.extended import as_bytes

    case = SMALL.with_(tokens=tokens, gating=gating, activation="relu2" if gating == "plain" else "silu", separate=gating == "separate")
    case = case.with_(inter=256)
    encoding = ENCODINGS[name]
    args, dense, options = coded(case, encoding, encoding if gating == "separate" else None, encoding)
    args, dense = on_gpu(args), on_gpu(dense)
    assert words.refusal(as_bytes(ExpertsCall.of_extended(*args, **options))) is None
    out = run(args, options)
    assert_as_exact(out, reference(dense, **case.options), reference(to(dense, torch.float64), **case.options))
    for _ in range(3):
        assert torch.equal(run(args, options), out)


def test_a_token_is_what_it_is_alone() -> None:
    """Whatever else is in the batch, in tiles of 8 and of 16 rows; up to 8 tokens are summed in another order (test_alone.py)."""
    encoding = ENCODINGS["nibbles"]
    case = SMALL.with_(tokens=24, inter=256)
    args, _, options = coded(case, encoding, None, encoding)
    given: list[Any] = on_gpu(args)
    out = run(given, options)
    few = run([t[3:12].contiguous() if i < 3 else t for i, t in enumerate(given)], options)
    assert torch.equal(few, out[3:12])
