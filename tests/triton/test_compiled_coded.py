"""The product with weights in few bits compiles for every target without a GPU there, within shared memory, and spills nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import EXPONENTS, MADE, Encoding, Packing, Rounding
from moefuse.ops.meaning.grad_calls import GradCall, Needs
from tests.strategies import THOROUGH
from tests.triton.test_compiled import SHARED
from tests.triton.test_compiled_grouped import compile_all, launches

__all__ = ["launches"]

WORDS = tuple(range(0, 32, 4))
ENCODINGS = {
    "fp8 blocks": (Encoding("e4m3", (128, 128)), torch.uint8),
    "int8 channels": (Encoding("s8", (1, 0), "bf16"), torch.int8),
    "nibbles": (Encoding(MADE["u4"], (1, 128), "bf16", zero=True, packing=Packing(1, (0, 4))), torch.uint8),
    "words": (Encoding(MADE["u4-8"], (1, 128), packing=Packing(0, WORDS)), torch.int32),
    "halves": (Encoding(MADE["u4"], (1, 64), "bf16", zero=True, packing=Packing(0, (4, 0), halves=True)), torch.uint8),
    "fp8, tokens too": (Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128)), torch.uint8),
    "int8, tokens too": (Encoding("s8", (1, 0), activation=Rounding("s8", 0)), torch.int8),
    "mxfp4": (Encoding(MADE["e2m1"], (1, 32), "f32", EXPONENTS, packing=Packing(1, (0, 4))), torch.uint8),
    "a table": (Encoding(tuple(i * 0.37 - 2 for i in range(16)), (1, 64), packing=Packing(1, (4, 0))), torch.uint8),
}
CASES = [
    pytest.param(name, arch, tokens, id=f"{name}-{arch}-{tokens}")
    for i, name in enumerate(ENCODINGS)
    for j, arch in enumerate(SHARED)
    for tokens in (8, 4096)
    if arch == 90 or THOROUGH or (i % len(SHARED) == j and tokens == 8)
]
EXPERTS, TOP_K, HIDDEN, INTER = 32, 4, 2048, 768


def projection(encoding: Encoding, dtype: torch.dtype, out: int, inp: int) -> Stack:
    rows, cols = out, inp
    if encoding.packing is not None:
        rows, cols = (n // encoding.packing.per if i == encoding.packing.axis else n for i, n in enumerate((out, inp)))
    blocks = (EXPERTS, *encoding.scales(out, inp))
    scales = torch.uint8 if encoding.scale else torch.bfloat16 if encoding.arithmetic == "bf16" else torch.float32
    scale, zero = ([torch.empty(blocks, dtype=kind, device="meta")] for kind in (scales, torch.bfloat16))
    storage = torch.empty(EXPERTS, rows, cols, dtype=dtype, device="meta")
    return Stack([storage], codes=Codes(encoding, scale, zero if encoding.zero else ()))


@pytest.mark.parametrize(("name", "arch", "tokens"), CASES)
def test_forward_and_backward(
    name: str, arch: int | str, tokens: int, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of few and of many rows, the product and that with the transpose."""
    from moefuse.kernels.triton.host import coded as host, layout, token_codes
    from moefuse.kernels.triton.provide import extended

    for module in (host, token_codes):
        monkeypatch.setattr(module, "device_of", lambda d: layout.Device("", 132, SHARED[arch], arch == 90, not isinstance(arch, str)))
    w_in, w_out = (projection(*ENCODINGS[name], *sizes) for sizes in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(tokens, TOP_K, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, TOP_K, dtype=torch.int64, device="meta")
    body, up = Body(), Stack([])

    def run() -> None:
        call = ExpertsCall(x, ids, weights, w_in, up, w_out, body, x.dtype)
        out, h, order, offsets, _ = extended.experts_extended_forward(call)
        need = Needs.of([True, True, *[False] * 6], False)
        extended.experts_extended_backward(GradCall(out, x, weights, h, order, offsets, w_in, up, w_out, need, body))

    compile_all(launches, arch, tmp_path, monkeypatch, run)
    ran = {it.kernel.__name__ for it, _ in launches}
    assert ran & {"coded_tiles", "unpack_blocks"}
    assert ("weight_grads" in ran) is (ENCODINGS[name][0].activation is not None)
