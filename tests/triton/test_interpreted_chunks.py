"""Long calls in chunks: the values of the whole call, in less memory.

That they are equal bit for bit is tested on the device: the products of the interpreter are those of a BLAS, which on some CPUs rounds a
row by its place in the tile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import ExpertsCall
from tests.cpu.ops_case import Case
from tests.triton.test_interpreted import tiles, vectors

pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CASE = Case(tokens=11, dtype=torch.float32)


def plans(case: Case, config: Any, limit: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, ExpertsCall]:
    """(the whole call's plan, what it becomes under the limit, the call)."""
    from moefuse.kernels.triton.host import chunks, plan

    monkeypatch.setattr(chunks, "ROWS", 4)
    monkeypatch.setattr(chunks, "allowed", lambda: limit)
    call = case.call()
    whole = plan.Plan(call, config)
    return whole, chunks.chunked(whole, call), call


@pytest.mark.parametrize("config", [tiles, vectors], ids=["tiles", "vectors"])
@pytest.mark.parametrize(("tokens", "share"), [(11, 0), (13, 0.5), (8, 0)])
def test_values(tokens: int, share: float, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rest, chunks of more than the least, whole chunks only; every buffer begins as NaN."""
    case = CASE.with_(tokens=tokens)
    whole = plans(case, config(), 1 << 30, monkeypatch)[0]
    limit = int(share * whole.workspace.size)
    whole, parts, call = plans(case, config(), limit, monkeypatch)
    assert sum(p.tokens for p in parts.plans) == tokens
    assert parts.step == 4 or all(p.workspace.size <= limit for p in parts.plans)
    empty = torch.empty

    def poisoned(*size: Any, **more: Any) -> torch.Tensor:
        return empty(*size, **more).fill_(255 if more.get("dtype") == torch.uint8 else float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.testing.assert_close(parts.run(call), whole.run(call), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "limit"), [(0, 0), (4, 0), (11, 1 << 30)])
def test_small_calls_stay_whole(tokens: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts, _ = plans(CASE.with_(tokens=tokens), tiles(), limit, monkeypatch)
    assert parts is whole


def test_the_limit_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.host import chunks

    monkeypatch.delenv("MOEFUSE_WORKSPACE_MIB", raising=False)
    assert chunks.allowed() is None
    monkeypatch.setenv("MOEFUSE_WORKSPACE_MIB", "3")
    assert chunks.allowed() == 3 << 20
    monkeypatch.setenv("MOEFUSE_WORKSPACE_MIB", "3 GB")
    with pytest.raises(ValueError, match="MOEFUSE_WORKSPACE_MIB='3 GB' is no number of MiB"):
        chunks.allowed()
