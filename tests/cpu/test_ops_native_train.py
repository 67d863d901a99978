"""The C++ kernels of training step aside for what they do not take. What they compute: tests/contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moefuse.runtime import native, providers
from tests.cpu.ops_case import Case, reference, run

pytestmark = pytest.mark.skipif(not native.ready("train"), reason="no working C++ compiler")


class Log:
    """Calls of the two ops that the C++ kernels left."""

    def __init__(self) -> None:
        self.general: list[str] = []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log, run_provider = Log(), providers.run

    def spy(op: str, *args: Any) -> Any:
        log.general.append(op)
        return run_provider(op, *args)

    monkeypatch.setattr(providers, "run", spy)
    return log


@pytest.fixture(autouse=True)
def widened() -> Iterator[None]:
    """16-bit GEMMs run in float32, also on a CPU that has instructions for them."""
    native.widen(True, True)
    yield
    native.widen(torch.float16 in native.WIDENED, torch.bfloat16 in native.WIDENED)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"dtype": torch.float64}, id="float64"),
        pytest.param({"strided": True}, id="weights-with-gaps"),
        pytest.param({"widen": False, "dtype": torch.bfloat16}, id="a-cpu-with-bfloat16-instructions"),
    ],
)
def test_what_goes_to_the_general_ops(change: dict[str, Any], log: Log) -> None:
    """These calls are right too, and the portable code has them."""
    if not change.get("widen", True):
        native.widen(False, False)
    c = Case(tokens=40, dtype=change.get("dtype", torch.float32))
    args = c.args(requires_grad=True)
    if "strided" in change:
        wide = torch.zeros(3, 8, 9, requires_grad=True)
        args[3] = [wide[:, :, :6]]
        leaf = wide
    else:
        leaf = args[3][0]
    (ours,) = torch.autograd.grad(run(args).float().square().sum(), leaf)
    (theirs,) = torch.autograd.grad(reference(args).float().square().sum(), leaf)
    assert (ours - theirs).norm() <= 4 * torch.finfo(c.dtype).eps * theirs.norm()
    assert "experts_backward" in log.general


def test_a_provider_for_the_cpu_comes_first() -> None:
    """A registered provider takes the op back from the C++ kernel, and gives it back."""
    calls: list[str] = []
    portable = providers.PROVIDERS["experts_backward"][-1]

    def spy(*args: Any) -> Any:
        calls.append("spy")
        return portable.run(*args)

    args = Case(dtype=torch.float32).args(requires_grad=True)
    providers.register("experts_backward", providers.Provider("spy", lambda *a: None, spy))
    try:
        run(args).sum().backward()
        assert calls == ["spy"]
    finally:
        providers.unregister("experts_backward", "spy")
    run(args).sum().backward()
    assert calls == ["spy"]
