"""Hypothesis profiles, the gpu mark, and the fixtures that keep compile tests apart from each other."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis
import pytest
import torch

from moefuse.config import Options
from moefuse.report.entries import Fused, Skipped
from tests.cheap import cheaper_compiles, cheaper_interpreter, without_code

_Case = TypeVar("_Case")

# What this machine's user has tuned decides nothing here; tests of tuning have a folder of their own.
os.environ["MOEFUSE_AUTOTUNE"] = "0"

_COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
# The same examples in every run: "deep" is the one that searches.
hypothesis.settings.register_profile("quick", max_examples=5, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("deep", max_examples=500, print_blob=True, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


cheaper_compiles()
cheaper_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.strategies import THOROUGH

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("thorough") and not THOROUGH:
            item.add_marker(pytest.mark.skip(reason="HYPOTHESIS_PROFILE=deep runs it"))
    if not THOROUGH:
        _sample(items)
        _cover(items)
        _without_code(items)


def _families(items: list[pytest.Item], mark: str) -> Collection[list[Any]]:
    """The cases of each test that is marked so."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(mark) is not None and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases.values()


def _sample(items: list[pytest.Item]) -> None:
    """Skip all cases of a test but every n-th, by their names, and but every sixth of those; at least one runs."""
    for some in _families(items, "sampled"):
        share = int(next(some[0].iter_markers("sampled")).args[0])
        numbers = [zlib.crc32(item.nodeid.encode()) for item in some]
        drawn = [at for at, n in enumerate(numbers) if not n % share] or [min(range(len(some)), key=lambda at: numbers[at] % share)]
        runs = {at for at in drawn if numbers[at] // share % 6 == 5} or {drawn[0]}
        for at, item in enumerate(some):
            if at not in runs:
                item.add_marker(pytest.mark.skip(reason=f"one case of {6 * share}; HYPOTHESIS_PROFILE=deep runs all"))


def _cover(items: list[pytest.Item]) -> None:
    """Skip all cases of a test but the first that have between them every row of each ``parametrize``, or every pair of rows of two."""
    for some in _families(items, "every_value"):
        strength = next(iter(next(some[0].iter_markers("every_value")).args), 1)
        for item in set(some) - set(covering(some, [_rows(item, strength) for item in some])):
            item.add_marker(pytest.mark.skip(reason="others have its values between them; HYPOTHESIS_PROFILE=deep runs all"))


def _without_code(items: list[pytest.Item]) -> None:
    """Let the first case of a test that runs have Inductor's code, or none where others have it, and leave the rest without."""
    without = [item for item in items if item.get_closest_marker("code_elsewhere")]
    for some in _families(items, "code_once"):
        without += [item for item in some if item.get_closest_marker("skip") is None][1:]
    for item in without:
        item.fixturenames = [*item.fixturenames, "no_code"]  # type: ignore[attr-defined]  # cases of a test share the list


def _rows(item: Any, strength: int) -> set[tuple[tuple[int, ...], ...]]:
    """Which rows of so many ``parametrize`` a case has together."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    lists = [[name.strip() for name in each.split(",")] if isinstance(each, str) else each for each in names]
    rows = [(at, *(id(item.callspec.params[name]) for name in each)) for at, each in enumerate(lists)]
    return set(itertools.combinations(rows, strength))


def covering(cases: Sequence[_Case], rows: Sequence[set[Any]]) -> list[_Case]:
    """Of some cases, with the rows that each has, few that have all rows: the first, then whichever has most that are still missing."""
    found, missing = [], set().union(*rows)
    while missing:
        at = max(range(len(cases)), key=lambda at: len(rows[at] & missing))
        found.append(cases[at])
        missing -= rows[at]
    return found


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """What Dynamo keeps of thousands of compilations is not looked at by every garbage collection: that took a fourth of the time."""
    yield
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend="moefuse"`` with all of Inductor but the code that it writes: that takes longest, and neither refuses nor fuses."""
    from moefuse import _torch_private

    monkeypatch.setattr(_torch_private, "compile_fx", without_code)


@pytest.fixture
def as_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as Dynamo traced and moefuse rewrote them, ``explain``'s too; AOTAutograd took half of such a test's time.

    In a file of such tests, one that needs AOTAutograd asks for ``no_code``.
    """
    from moefuse import _torch_private

    if "no_code" in request.fixturenames:
        return

    def compiled(gm: torch.fx.GraphModule, *_: object) -> Callable[..., Any]:
        return lambda *args: gm.forward(*args)

    monkeypatch.setattr(_torch_private, "compile_fx", compiled)
    monkeypatch.setattr(_torch_private, "compile_front", compiled)


@pytest.fixture
def no_inductor_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``no_code``, for ``torch.compile``'s own Inductor, too."""
    from torch._functorch import config
    from torch._inductor import compile_fx as inductor

    original = inductor.compile_fx

    def front(gm: torch.fx.GraphModule, inputs: Sequence[object], *_: object, **__: object) -> Callable[..., Any]:
        with config.patch(enable_autograd_cache=False):
            return original(gm, inputs, inner_compile=lambda traced, *_, **__: traced.forward)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(inductor, "compile_fx", front)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before the test, and nothing left after it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@dataclass
class StubResult:
    fused: list[Fused] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    crossed: bool = False
    undischarged: list[Any] = field(default_factory=list)
    replaced: list[Any] = field(default_factory=list)


@dataclass
class StubDriver:
    """Stands in for moefuse.passes.driver, for tests of what surrounds it. ``fuse`` may be replaced."""

    result: StubResult = field(default_factory=StubResult)
    action: Callable[[torch.fx.GraphModule], None] = lambda gm: None
    calls: list[tuple[torch.fx.GraphModule, Sequence[object] | None, Options]] = field(default_factory=list)

    def fuse(self, gm: torch.fx.GraphModule, example_inputs: Sequence[object] | None, options: Options, *_: object) -> StubResult:
        self.calls.append((gm, example_inputs, options))
        self.action(gm)
        return self.result


@pytest.fixture
def stub_driver(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    import moefuse.passes

    stub = StubDriver()
    module = types.ModuleType("moefuse.passes.driver")
    module.fuse = stub.fuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moefuse.passes.driver", module)
    monkeypatch.setattr(moefuse.passes, "driver", module, raising=False)
    return stub
