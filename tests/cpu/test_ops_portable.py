"""The code in torch that computes ``moefuse::experts`` on a CPU: its products, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moefuse.runtime import cpu, gemm, native
from tests.cpu.ops_case import Case, assert_as_exact, run


@pytest.fixture(autouse=True)
def _without_the_kernel() -> Iterator[None]:
    native.configure(False)
    yield
    native.configure(True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_gemm_equals_float32_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that has the instructions; several bands, both storage orders, with and without bias."""
    monkeypatch.setattr(gemm, "WIDENED", frozenset({dtype}))
    monkeypatch.setattr(gemm, "TILE", 64)
    a, w, bias = torch.randn(9, 33).to(dtype), torch.randn(50, 33).to(dtype), torch.randn(50).to(dtype)
    for b in (w.t(), w.t().contiguous()):
        for v in (None, bias):
            out = torch.empty(9, 50, dtype=dtype)
            gemm.mm_into(out, a, b, v)
            exact = a.double() @ b.double() + (0 if v is None else v.double())
            torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_gemv_of_a_large_bfloat16_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "MV_ELEMENTS", 1024 * 512)
    monkeypatch.setattr(gemm, "WIDENED", frozenset({torch.bfloat16}))
    w = torch.randn(1024, 512).bfloat16() / 22
    a, bias = torch.randn(1, 512).bfloat16(), torch.randn(1024).bfloat16()
    for v in (None, bias):
        out = torch.empty(1, 1024, dtype=torch.bfloat16)
        gemm.mm_into(out, a, w.t(), v)
        exact = a.double() @ w.double().t() + (0 if v is None else v.double())
        assert_as_exact(out, F.linear(a, w, v), exact)


def test_peak_memory_is_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary as large as all pre-activations: the largest pre-activation buffer is one chunk."""
    seen: list[tuple[int, ...]] = []
    project = cpu.project

    def spy(out: torch.Tensor, *rest: Any) -> None:
        seen.append(tuple(out.shape))
        project(out, *rest)

    monkeypatch.setattr(cpu, "project", spy)
    c = Case(tokens=2000, experts=16, low_id=0, high_id=16)
    run(c.args())
    assert max(rows for rows, _ in seen) <= max(cpu.CHUNK_ROWS, 2000 * 2 // 16 * 2)


@pytest.mark.parametrize("tokens", [39, 40, 41], ids=["one-short-of-a-block", "whole-blocks", "one-over"])
def test_a_large_call_goes_in_blocks_of_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 10 tokens here; the values are the same."""
    c = Case(tokens=tokens)
    want = run(c.args(), **c.options)
    calls: list[int] = []
    sort = cpu.groups_of_ids
    monkeypatch.setattr(cpu, "groups_of_ids", lambda ids, experts: calls.append(len(ids)) or sort(ids, experts))
    monkeypatch.setattr(cpu, "BLOCK_BYTES", 10 * 2 * 7 * 8)
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 1)
    torch.testing.assert_close(run(c.args(), **c.options), want)
    assert calls == [20, 20, 20, *{39: [18], 40: [20], 41: [20, 2]}[tokens]]
