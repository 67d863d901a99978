"""Weights in few bits times many rows of 16 bits compile without a GPU there: within registers and shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack
from tests.triton.test_compiled import SHARED, compile_launch, spills
from tests.triton.test_compiled_coded import HIDDEN, INTER, projection
from tests.triton.test_compiled_grouped import launches
from tests.triton.test_compiled_words import ENCODINGS

__all__ = ["launches"]

pytest.importorskip("triton")

CASES = [name for name, (encoding, _) in ENCODINGS.items() if encoding.activation is None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_layer(name: str, rows: int, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products, of tiles of so many rows; gate and up in two blocks, by turns, or apart with biases."""
    from moefuse.kernels.triton.host import coded as host, layout, packed_specialised, sorted_rows, words as sizes
    from moefuse.kernels.triton.provide import packed

    device = layout.Device("", 132, SHARED[90], True)
    for module in (host, sizes, sorted_rows, packed_specialised):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    w_in, w_out = (projection(*ENCODINGS[name], *sizes) for sizes in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    x, weights = (torch.empty(2048, n, dtype=torch.bfloat16, device="meta") for n in (HIDDEN, 8))
    ids = torch.empty(2048, 8, dtype=torch.int64, device="meta")
    body = Body("swiglu_oai", (1.702, 7.0), gating="interleaved") if rows in (64, 256) else Body()
    call = ExpertsCall(x, ids, weights, w_in, Stack([]), w_out, body, x.dtype)
    assert packed.experts(call, rows) is not None
    made = [(it, tensors) for it, tensors in launches if it.kernel.__name__ == "packed_products"]
    assert len(made) == 2
    for it, tensors in made:
        compiled = compile_launch(it, tensors, 90)
        assert compiled.metadata.shared <= SHARED[90]
        assert not spills(compiled, 90, tmp_path)
