"""Few rows times weights in few bits compile without a GPU there: no weights go through shared memory, and nothing spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack
from moefuse.ops.meaning.encoding import EXPONENTS, LDEXP, MADE, Encoding, Packing, Rounding
from tests.triton.test_compiled import SHARED, compile_launch, spills
from tests.triton.test_compiled_coded import HIDDEN, INTER, TOP_K, projection
from tests.triton.test_compiled_grouped import launches

__all__ = ["launches"]

pytest.importorskip("triton")

BYTE, WORD = Packing(1, (0, 4)), Packing(1, tuple(range(0, 32, 4)))
ENCODINGS = {
    "nibbles": (Encoding(MADE["u4-8"], (1, 128), "bf16", packing=BYTE), torch.uint8),
    "zeros": (Encoding(MADE["u4"], (1, 64), "bf16", zero=True, packing=Packing(1, (4, 0))), torch.uint8),
    "words": (Encoding(MADE["u4"], (1, 128), "f32", zero=True, packing=WORD), torch.int32),
    "mxfp4": (Encoding(MADE["e2m1"], (1, 32), "f32", EXPONENTS, packing=BYTE), torch.uint8),
    "mxfp4 by ldexp": (Encoding(MADE["e2m1"], (1, 32), "bf16", LDEXP, packing=BYTE), torch.uint8),
    "fp8": (Encoding("e4m3", (128, 128)), torch.uint8),
    "fp8, tokens too": (Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128)), torch.uint8),
    "fp8 channels, tokens too": (Encoding("e4m3", (1, 0), activation=Rounding("e4m3", 0)), torch.uint8),
    "int8": (Encoding("s8", (1, 0), "bf16"), torch.int8),
}
"""Also where the instructions are that only some processors have: float8 is made by those of Hopper."""
CASES = [
    pytest.param(name, arch, id=f"{name}-{arch}")
    for name in ENCODINGS
    for arch in (80, 90)
    if arch == 90 or (name != "fp8" and name in ("zeros", "int8"))
]


def _on_device(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.host import alone, coded as host, layout, sorted_rows, words as sizes
    from moefuse.kernels.triton.provide import words

    device = layout.Device("", 132, SHARED[arch], arch == 90)
    for module in (alone, host, sizes, sorted_rows, words):
        monkeypatch.setattr(module, "device_of", lambda _: device)


def _call(name: str, tokens: int, top_k: int = TOP_K) -> ExpertsCall:
    w_in, w_out = (projection(*ENCODINGS[name], *sizes) for sizes in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    x, weights = (torch.empty(tokens, n, dtype=torch.bfloat16, device="meta") for n in (HIDDEN, top_k))
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device="meta")
    return ExpertsCall(x, ids, weights, w_in, Stack([]), w_out, Body(), x.dtype)


@pytest.mark.parametrize(
    ("tokens", "top_k", "kernel"),
    [(8, 1, "lone_rows"), (8, 2, "lone_rows"), (9, 1, "word_tiles"), (5, 4, "word_tiles"), (1, 8, "lone_rows"), (1, 9, "word_tiles")],
)
def test_which_kernel(tokens: int, top_k: int, kernel: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to eight tokens and eight slots take two launches; of tokens whose slots share experts, tiles read these once."""
    from moefuse.kernels.triton.provide import words

    _on_device(90, monkeypatch)
    words.experts(_call("nibbles", tokens, top_k))
    assert [it.kernel.__name__ for it, _ in launches if it.kernel.__name__ in ("word_tiles", "lone_rows")] == [kernel] * 2


@pytest.mark.parametrize(("tokens", "hidden", "taken"), [(1, 7168, True), (2, 7168, False), (2, 2048, True)])
def test_large_experts_by_channels(tokens: int, hidden: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at DeepSeek's size: 600 us by whole tiles for 8 tokens, 717 by words; of Qwen3's 90 and 81."""
    from moefuse.kernels.triton.provide import words

    _on_device(90, monkeypatch)
    encoding = ENCODINGS["fp8 channels, tokens too"]
    w_in, w_out = (projection(*encoding, *sizes) for sizes in ((4096, hidden), (hidden, 2048)))
    x, ids = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta"), torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    weights = torch.empty(tokens, 8, dtype=torch.bfloat16, device="meta")
    call = ExpertsCall(x, ids, weights, w_in, Stack([]), w_out, Body(), x.dtype)
    assert (words.refusal(call) is None) == taken


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_products(name: str, arch: int, launches: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and four, in two launches; one with slots that are tiles of their own, and tiles of the sort."""
    from moefuse.kernels.triton.provide import words

    _on_device(arch, monkeypatch)
    for tokens in (1, 4, 32):
        call = _call(name, tokens)
        assert words.refusal(call) is None
        words.experts(call)
        if tokens == 1:
            words.tiled(call)
    made = [(it, tensors) for it, tensors in launches if it.kernel.__name__ in ("word_tiles", "lone_rows")]
    assert len(made) == 8
    for it, tensors in made:
        compiled = compile_launch(it, tensors, arch)
        most = 1024 if it.kernel.__name__ == "lone_rows" else 0  # the sums of parts
        assert compiled.metadata.shared <= most, f"{compiled.metadata.shared} bytes go through shared memory"
        assert not spills(compiled, arch, tmp_path)
