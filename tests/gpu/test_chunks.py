"""Long prefills in chunks on the device: the bits of the whole call, and less memory."""

from __future__ import annotations

import pytest
import torch

from moefuse.runtime import providers

pytestmark = pytest.mark.gpu


def test_equal_bits_and_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:

    tokens, top_k, experts, hidden, inter = 8192, 4, 16, 512, 384
    generator = torch.Generator("cuda").manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) / shape[-1] ** 0.5).bfloat16()

    x = some(tokens, hidden) * hidden**0.5
    scores, ids = torch.rand(tokens, experts, device="cuda", generator=generator).topk(top_k, -1)
    args = (x, ids, scores.bfloat16(), [some(experts, 2 * inter, hidden)], [], [some(experts, hidden, inter)], [], [], [])

    def call() -> tuple[torch.Tensor, int]:
        providers.forget_records()
        torch.ops.moefuse.experts(*args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = torch.ops.moefuse.experts(*args)
        return out, torch.cuda.max_memory_allocated() - before - out.nbytes

    monkeypatch.delenv("MOEFUSE_WORKSPACE_MIB", raising=False)
    whole, most = call()
    monkeypatch.setenv("MOEFUSE_WORKSPACE_MIB", "16")
    parts, less = call()
    providers.forget_records()
    assert torch.equal(parts, whole)
    assert most > 32 << 20
    assert less <= 17 << 20
