"""Products of float8 codes with specialised warps compile without a GPU there: within registers and shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import EXPONENTS, Encoding, Rounding
from tests.triton.test_compiled import SHARED, compile_launch, spills
from tests.triton.test_compiled_grouped import launches

__all__ = ["launches"]

pytest.importorskip("triton")

EXPERTS, HIDDEN, INTER, SLOTS = 8, 2048, 768, 4096
BODIES = {
    "merged": Body(),
    "interleaved": Body("swiglu_oai", (1.702, 7.0), gating="interleaved"),
    "none": None,
}
SCALES = {"blocks": ((128, 128), 128), "channels": ((1, 0), 0), "tensor": ((0, 0), 0)}
"""Blocks of weights and inputs of a group of a token's: those of each step, or all inputs, whose sums are scaled once."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("scales_of", SCALES)
def test_products(
    scales_of: str, name: str, biased: bool, separate: bool, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first projection with its activation, and the last one."""
    from moefuse.kernels.triton.host import coded, coded_specialised, layout, linear, rounded_specialised, sorted_rows, token_codes

    device = layout.Device("", 132, SHARED[90], True)
    for module in (rounded_specialised, sorted_rows, token_codes):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    monkeypatch.setattr(coded_specialised, "steps_table", linear.steps_table)
    body = BODIES[name]
    block, group = SCALES[scales_of]
    encoding = Encoding("e4m3", block, scale=EXPONENTS if biased else "", activation=Rounding("e4m3", group))
    features, inputs = (HIDDEN, INTER) if body is None else (2 * INTER, HIDDEN)

    def hold(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
        if separate:
            return [torch.empty(shape, dtype=dtype, device="meta") for _ in range(EXPERTS)]
        return [torch.empty(EXPERTS, *shape, dtype=dtype, device="meta")]

    scales = hold(*encoding.scales(features, inputs), dtype=torch.uint8 if biased else torch.float32)
    held = coded.held(hold(features, inputs, dtype=torch.uint8), Codes(encoding, scales, ()))
    bias = linear.weight(hold(features, dtype=torch.bfloat16), 1) if biased else None
    ids = torch.empty(SLOTS, 1, dtype=torch.int64, device="meta")
    order, offsets = sorted_rows.sort(ids, EXPERTS)
    it = sorted_rows.tiled(sorted_rows.Sorted(order, offsets, SLOTS, EXPERTS, 1), torch.bfloat16)
    out = torch.empty(SLOTS, features if body is None else INTER, dtype=torch.bfloat16, device="meta")
    x = token_codes.round_rows(torch.empty(SLOTS, inputs, dtype=torch.bfloat16, device="meta"), it, encoding)
    assert rounded_specialised.refusal(held, out.dtype, out.shape[1], 2 if name == "merged" else 1, device) is None
    rounded_specialised.product(out, x, (held, held), it, (bias, bias if name == "merged" else None), body)
    ((it_, tensors),) = [(it, tensors) for it, tensors in launches if it.kernel.__name__ == "rounded_products"]
    compiled = compile_launch(it_, tensors, 90)
    assert compiled.metadata.shared <= SHARED[90]
    assert not spills(compiled, 90, tmp_path)
