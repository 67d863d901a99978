"""The Triton providers in place of the portable ones, on CPU tensors in Triton's interpreter, with poisoned memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moefuse.runtime import providers

TIER = ("permute", "grouped_linear", "grouped_linear_backward", "expert_rows", "expert_rows_backward", "combine", "combine_backward")


def poisoned(t: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory as it may be at worst: NaN, or addresses and rows far away."""
    if t.is_floating_point():
        return t.fill_(float("nan"))
    return t.fill_(255) if t.dtype == torch.uint8 else t.fill_(1 << 30)


@contextlib.contextmanager
def interpreted(module: Any, names: tuple[str, ...]) -> Iterator[list[str]]:
    """The ops ``names`` run as the functions of ``module``; yields the names of those that have run."""
    ran: list[str] = []

    def noted(name: str) -> Any:
        def run(*args: Any) -> Any:
            ran.append(name)
            return getattr(module, name)(*args)

        return run

    before = {name: list(providers.PROVIDERS[name]) for name in names}
    empty, empty_like = torch.empty, torch.empty_like
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
        patch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
        for name in names:
            providers.register(name, providers.Provider("interpreted", lambda *a: None, noted(name), device="cpu"))
        try:
            yield ran
        finally:
            for name in names:
                providers._replace(name, before[name])


@pytest.fixture
def plans_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of experts are such whose rows may come in parts (``host/arriving.py``), as on Hopper."""
    from moefuse.kernels.triton.host.plan import Plan
    from moefuse.kernels.triton.provide import experts
    from moefuse.tuning.problem import Config, Tiles

    config = Config(16, Tiles(16, 16, 1, 4, 1, desc=True, rows_desc=True), Tiles(16, 16, 1, 4, 1, desc=True, rows_desc=True, store=1))
    monkeypatch.setattr(experts, "plan_of", lambda call: Plan(call, config))
