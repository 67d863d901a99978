"""Kernels in Gluon are left alone where this Triton does not compile them: who asked for the call asks again, and a note says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")


def product_tiles() -> None:
    """Stands for the source of a kernel."""


def kernel(error: Exception | None) -> Any:
    """One in Gluon whose compilation fails in some way."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    class Kernel(GluonJITFunction):
        def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
            if error is not None:
                raise error

    return Kernel(product_tiles)


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> Any:
    from moefuse.kernels.triton.launch import gluon
    from moefuse.machine import slow_paths

    monkeypatch.setattr(gluon, "_lost", [])
    monkeypatch.setattr(slow_paths, "_notes", {})
    return gluon


def test_what_compiles_is_used(gluon: Any) -> None:
    gluon.compile_first(kernel(None), (1,), (), {})
    assert gluon.unusable() is None


def test_what_does_not_is_lost(gluon: Any) -> None:
    """For good, with the kernel and the compiler's words. No plan that has it is kept: who asks again would get it again, without end."""
    from moefuse.kernels.triton.launch import player
    from moefuse.machine import slow_paths

    plans = player.until_forgotten({"of a call": object()})
    with pytest.raises(slow_paths.LostError):
        gluon.compile_first(kernel(AttributeError("no warp_specialize\nat line 3")), (1,), (), {})
    assert gluon.unusable() == "product_tiles: no warp_specialize"
    assert slow_paths.notes() == [f"{gluon.LOST} (product_tiles: no warp_specialize)"]
    assert not plans


def test_no_memory_is_no_reason(gluon: Any) -> None:
    """Out of memory is the caller's, and the next call may have some."""
    with pytest.raises(torch.OutOfMemoryError):
        gluon.compile_first(kernel(torch.OutOfMemoryError("2 GiB")), (1,), (), {})
    assert gluon.unusable() is None


def test_who_asked_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.machine import slow_paths
    from moefuse.runtime import providers

    usable, asked = [True], []

    def run(x: int) -> int:
        asked.append(x)
        if not usable[0]:
            return x + 1
        usable[0] = False
        raise slow_paths.LostError("lost")

    monkeypatch.setitem(providers.PROVIDERS, "topk", [providers.Provider("here", lambda *_: None, run)])
    assert providers.run("topk", 2) == 3
    assert asked == [2, 2]
