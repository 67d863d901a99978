"""What only explains never stops a program: each function of the modules that do raises in turn, and nothing changes but what is said."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse import FusionError, _torch_private
from moefuse.pipeline import publish
from moefuse.report import quietly
from tests.cpu.beside_eager import H, MoE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EXPLAINING = (
    "report.entries", "report.report", "report.grouping", "report.history", "report.compilations", "report.reused_code",
    "evidence.suspects", "evidence.opaque", "evidence.few_bits", "evidence.flows", "evidence.code_order",
    "diagnosis.missed_layers", "diagnosis.inside_experts", "program.module_tree", "program.steps", "program.breaks",
    "passes.graph.module_names", "machine.slow_paths", "machine.cache_folder", "cache",
    "tuning.sites", "tuning.store", "tuning.entries",
    "passes.match.refusals", "passes.match.unexplained", "passes.match.unrecognised", "passes.lower.record", "passes.lower.cost_gate",
    "passes.match.unhit_experts", "passes.match.wide_products",
)  # fmt: skip

ESSENTIAL = {
    "passes.match.unhit_experts": ("without_tokens", "_where_hit"),
    "evidence.few_bits": ("few_bits",),
}
"""What stands in these modules and decides what a rewrite computes: an error there is moefuse's, and the graph stays as it was."""


class Refused(MoE):
    """A mean over the rows of an expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            y = expert(x[tok])
            out.index_add_(0, tok, (y - y.mean(0)).nan_to_num() * weights[tok, slot, None])
        return out


class Fused(MoE):
    def forward(self, x: Tensor) -> Tensor:
        return self.add_experts(torch.zeros_like(x), x, *self.route(x))


class NothingFound(MoE):
    """Each token asks for its expert by a number."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return torch.stack([self.experts[int(ids[t, 0])](x[t]) * weights[t, 0] for t in range(2)])


class Lazy(nn.Module):
    """Experts whose weights are made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.LazyLinear(4, bias=False)
        self.up = nn.ModuleList(nn.LazyLinear(12) for _ in range(4))
        self.down = nn.ModuleList(nn.LazyLinear(H) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(4):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.down[e](F.silu(self.up[e](x[tok]))) * weights[tok, slot, None])
        return out


PROGRAMS = (Fused, Refused, NothingFound)


@pytest.fixture(autouse=True)
def _no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moefuse's own backend, and graphs that run as they are behind it; messages are said once for each test."""
    monkeypatch.setattr(_torch_private, "compile_fx", lambda gm, *_: gm.forward)
    monkeypatch.setattr(quietly, "_said", {})
    monkeypatch.setattr(publish, "_warned", set())


def run(kind: type[nn.Module], **options: Any) -> None:
    """Two calls beside eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend=moefuse.backend.backend, options={"verify": "off", **options})
    for turn in range(2):
        x = torch.randn(7, H, generator=torch.Generator().manual_seed(turn))
        wanted = model(x)
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)


def functions(name: str) -> list[tuple[object, str, Any]]:
    """(owner, name, function) of everything that a module defines, methods and properties included."""
    home = importlib.import_module(f"moefuse.{name}")
    found: list[tuple[object, str, Any]] = []
    for key, value in vars(home).items():
        if getattr(value, "__module__", None) != home.__name__ or key in ESSENTIAL.get(name, ()):
            continue
        if isinstance(value, types.FunctionType):
            found.append((home, key, value))
        elif isinstance(value, type):
            own = vars(value).items()
            found += [
                (value, k, v) for k, v in own if (k == "__str__" or not k.startswith("__")) and isinstance(v, types.FunctionType | property)
            ]
        elif callable(inner := inspect.unwrap(value)) and isinstance(inner, types.FunctionType):
            found.append((home, key, value))
    return found


def replace(patch: pytest.MonkeyPatch, owner: object, name: str, function: Any, instead: Callable[..., Any]) -> None:
    """In its module, and wherever else it was imported to."""
    if isinstance(owner, type):
        patch.setattr(owner, name, property(instead) if isinstance(function, property) else instead)
        return
    for module in [m for n, m in sys.modules.items() if n.startswith("moefuse") and m is not None]:
        for key in [k for k, v in vars(module).items() if v is function]:
            patch.setattr(module, key, instead)


class InjectedError(Exception):
    pass


def _raises(*_: Any, **__: Any) -> Any:
    raise InjectedError("it raises")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("module", EXPLAINING)
def test_a_module_that_raises_changes_no_program(module: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is asked."""
    for owner, name, function in functions(module):
        replace(monkeypatch, owner, name, function, _raises)
    run(kind)


@pytest.mark.thorough
@pytest.mark.parametrize("module", EXPLAINING)
def test_a_function_that_raises_changes_no_program(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, one function after the other: a door further inside may be open."""
    reached: dict[str, set[type[nn.Module]]] = {}
    with monkeypatch.context() as patch:
        now: list[type[nn.Module]] = []
        for owner, name, function in functions(module):
            inner = function.fget if isinstance(function, property) else function

            def noted(*args: Any, _inner: Any = inner, _key: str = f"{owner} {name}", **kwargs: Any) -> Any:
                reached.setdefault(_key, set()).update(now)
                return _inner(*args, **kwargs)

            replace(patch, owner, name, function, noted)
        for kind in PROGRAMS:
            now[:] = [kind]
            run(kind)
    for owner, name, function in functions(module):
        for kind in reached.get(f"{owner} {name}", ()):
            with monkeypatch.context() as patch:
                replace(patch, owner, name, function, _raises)
                try:
                    run(kind)
                except Exception as error:
                    pytest.fail(f"{module}.{name}, {kind.__name__}: {type(error).__name__}: {error}")


def test_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, once, and as a note."""
    from moefuse.diagnosis import missed_layers

    def raises(*_: Any) -> Any:
        raise InjectedError("missed_layers.watch raises")

    monkeypatch.setattr(missed_layers, "watch", raises)
    run(Fused)
    text = "moefuse could not explain: InjectedError: missed_layers.watch raises (please report it with the logged traceback)"
    assert [r.getMessage() for r in caplog.records if "could not explain" in r.getMessage()] == [text]
    report = moefuse.last_report()
    assert report is not None
    assert text in report.notes
    assert len(report.fused) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "broken", ["report.history.record", "report.report.FusionReport.__str__", "pipeline.publish._log_line", "diagnosis.missed_layers.watch"]
)
def test_strict_keeps_its_meaning(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, module, *path, name = broken.split(".")
    owner: Any = importlib.import_module(f"moefuse.{room}.{module}")
    for part in path:
        owner = getattr(owner, part)

    def raises(*_: Any, **__: Any) -> Any:
        raise InjectedError("it raises")

    monkeypatch.setattr(owner, name, raises)
    with pytest.raises(FusionError, match="not-row-local"):
        run(Refused, strict=True)
    run(Fused, strict=True)


def test_expect_keeps_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.report.report import FusionReport

    def raises(*_: Any, **__: Any) -> Any:
        raise InjectedError("it raises")

    monkeypatch.setattr(FusionReport, "__str__", raises)
    with pytest.raises(FusionError, match=r"'expect'.* is 2, and 1 layers were fused"):
        run(Fused, expect=2)


def test_weights_that_are_made_in_the_first_call() -> None:
    """As with any other backend: right in the first call, and fused or told in later ones."""
    torch.manual_seed(0)
    model = Lazy()
    compiled = torch.compile(model, backend=moefuse.backend.backend)
    for turn in range(3):
        x = torch.randn(7, H, generator=torch.Generator().manual_seed(turn))
        got = compiled(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    report = moefuse.last_report()
    assert report is not None
    assert report.fused or report.skipped


def test_a_lazy_weight_has_no_shape_yet() -> None:
    from moefuse.evidence.suspects import suspects

    assert suspects([Lazy()]) == []
    assert not quietly.notes()
