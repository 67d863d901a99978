"""Something around a call keeps Dynamo out of it: that call says so, and later ones are compiled as if it had not been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import moefuse
from moefuse import FusionError, _torch_private
from tests.cpu.test_left_frames import Layer, X

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "compile_fx", lambda gm, *_, **__: lambda *args: gm(*args))


def _in(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Any], object]:
    def call(compiled: Any) -> object:
        with context():
            return compiled(X)

    return call


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Masked(Layer):
    """Without sizes that depend on data, which ``torch.func.vmap`` does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


AROUND: dict[str, Callable[[Any], object]] = {
    "jvp": lambda c: torch.func.jvp(c, (X,), (X,)),
    "vjp": lambda c: torch.func.vjp(c, X),
    "grad": lambda c: torch.func.grad(lambda x: c(x).sum())(X),
    "vmap": lambda c: torch.func.vmap(c)(X[None]),
    "a mode": _in(Mode),
    "a stance": _in(lambda: torch.compiler.set_stance("force_eager")),
}


def _layers() -> tuple[int, int]:
    report = moefuse.last_report()
    assert report is not None
    return report.layers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("around", AROUND)
def test_the_first_call_is_told_and_takes_nothing_from_later_ones(around: str) -> None:
    model: nn.Module = Masked()
    compiled = torch.compile(model, backend="moefuse")
    AROUND[around](compiled)
    assert _layers() == (0, 1)
    (told,) = moefuse.last_report().skipped  # type: ignore[union-attr]
    assert told.code == "nothing-found"
    assert "this call runs in eager" in told.message
    torch.testing.assert_close(compiled(X), model(X))
    assert _layers() == (1, 1)


@pytest.mark.every_value
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("options", [{"strict": True}, {"expect": 1}])
def test_who_insists_has_an_error(around: str, options: dict[str, object]) -> None:
    compiled = torch.compile(Masked(), backend="moefuse", options=options)
    with pytest.raises(FusionError, match="this call runs in eager"):
        AROUND[around](compiled)
    compiled(X)
    assert _layers() == (1, 1)


def test_a_later_call_in_eager_is_told_until_the_graph_runs_again() -> None:
    compiled = torch.compile(Layer(), backend="moefuse")
    compiled(X)
    AROUND["a stance"](compiled)
    assert _layers() == (0, 1)
    compiled(X)
    assert _layers() == (1, 1)
    with torch.compiler.set_stance("eager_on_recompile"):
        compiled(X)
        assert _layers() == (1, 1)
        compiled(X[:5])
        assert _layers() == (0, 1)


class NormedExperts(Layer):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.up = nn.Sequential(expert.up, Std())


class Std(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h / (h.std(-1, keepdim=True) + 1e-3)


@pytest.mark.filterwarnings("error")
def test_the_proof_warns_of_nothing() -> None:
    """With warnings as errors the layer was left, for one about rows that only the proof has."""
    compiled = torch.compile(NormedExperts(), backend="moefuse", options={"strict": True})
    compiled(X)
    assert _layers() == (1, 1)
