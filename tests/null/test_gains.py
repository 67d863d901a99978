"""What ``moefuse.benchmark`` says of calls that tests bring along, on clocks that tests bring along. Nothing is compiled."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefuse
from moefuse.gains import compare, measure, turns
from moefuse.gains.call import Call, Result, difference, floats, tolerance
from moefuse.gains.gains import Gains
from moefuse.gains.page import bars
from moefuse.gains.rows import EAGER, INDUCTOR, MOEFUSE, Row, Timed
from moefuse.gains.turns import TURNS, Ratio
from moefuse.report.entries import Fused, Skipped
from moefuse.report.report import FusionReport
from moefuse.spec import ExpertsSpec


class Clock:
    """Seconds, which calls spend."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(
    model: Callable[..., Any], *args: Any, changed: Any = None, train: bool = False, progress: bool = False, **seconds: float
) -> Gains:
    """The three ways, of which each takes so many seconds; ``changed`` replaces what moefuse runs."""
    clock = Clock()

    def made(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        def way(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                clock.now += seconds.get(name, 1.0)
                return inner(*given, **named)

            return call

        return {name: way(name, changed if changed is not None and name == MOEFUSE else function) for name in (EAGER, INDUCTOR, MOEFUSE)}

    return measure.run(model, args, {}, train=train, budget_s=1.0, progress=progress, made=made, clock=clock)


def timed(eager: float, inductor: float, moefuse: float, **more: Any) -> Timed:
    rows = [Row(name, (ms, ms * 1.1, ms * 1.2), 3 << 20, 1e-7) for name, ms in ((EAGER, eager), (INDUCTOR, inductor), (MOEFUSE, moefuse))]
    return Timed((rows[0], rows[1], rows[2]), 1e-3, **more)


SPEC = ExpertsSpec(8, 2, 64, 48, "float32", "silu")
REPORT = FusionReport([Fused("mlp", "model.py:3", SPEC, "sorted", "fused")], [Skipped("random", "`randn`", "mtp", "model.py:9")], 1)


def test_ratios_are_of_pairs() -> None:
    """A machine that gets ten times slower half way: the ratio of medians would say 1, and the spread of times says nothing."""
    slow, fast = [1.0, 1.1, 10.0, 10.2, 10.4], [0.5, 0.55, 5.0, 5.1, 5.2]
    assert Ratio.of(slow, fast) == Ratio(2.0, 2.0, 2.0, "faster")
    assert Ratio.of(fast, slow).verdict == "slower"
    assert Ratio.of([1.0, 2.0, 1.0, 2.0, 1.5], [2.0, 1.0, 2.0, 1.0, 1.5]).verdict == "even"


def test_percentiles() -> None:
    assert [turns.percentile([3.0, 1.0, 2.0], share) for share in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 3.0]


def test_turns_change_their_order_and_end_with_the_budget() -> None:
    clock, order = Clock(), []

    def call(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            clock.now += 1.0
            return 1.0

        return run

    times = turns.take({name: call(name) for name in "abc"}, 30.0, clock)
    assert {len(some) for some in times.values()} == {10}
    assert {"".join(order[at : at + 3]) for at in range(0, 18, 3)} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert {len(some) for some in turns.take({"a": call("a")}, 0.1, clock).values()} == {TURNS[0]}, "some turns, whatever the budget"
    assert {len(some) for some in turns.take({"a": call("a")}, 1e9, clock).values()} == {TURNS[1]}


def test_times_of_made_up_clocks() -> None:
    gains = measured(nn.Linear(4, 4), torch.randn(2, 4), eager=3.0, Inductor=2.0, moefuse=0.5)
    assert [row.name for row in gains.model.rows] == ["eager", "Inductor", "moefuse"]
    assert [row.median for row in gains.model.rows] == [3000.0, 2000.0, 500.0]
    assert gains.model.ratio() == Ratio(4.0, 4.0, 4.0, "faster")
    assert gains.headline == "inference, nothing was fused; 4.00 times as fast as Inductor, 6.00 times as fast as eager"
    assert [row.difference for row in gains.model.rows] == [None, 0.0, 0.0]
    assert not gains.off


def test_what_is_slower_is_called_so() -> None:
    gains = measured(nn.Linear(4, 4), torch.randn(2, 4), moefuse=2.0)
    assert "slower than Inductor (0.50 times as fast), slower than eager (0.50 times as fast)" in str(gains).splitlines()[0]
    even = measured(nn.Linear(4, 4), torch.randn(2, 4))
    assert "no measurable difference from Inductor (1.00 times as fast)" in str(even)


def test_a_wrong_result_is_said() -> None:
    model = nn.Linear(4, 4)
    gains = measured(model, torch.randn(2, 4), changed=lambda x: model(x) * 1.5)
    assert gains.off
    assert "  wrong   moefuse's result is off: it differs from eager's by 0.5 of the largest value; rounding makes 0.00035 at most" in str(
        gains
    )
    assert json.loads(gains.to_json())["model"]["off"] == ["moefuse"]
    assert "What is off" in gains.to_html()


def test_wrong_gradients_are_said() -> None:
    model = nn.Linear(4, 4)
    gains = measured(model, torch.randn(2, 4), changed=lambda x: model(x).detach() + 0 * model(x), train=True)
    assert "moefuse's result is off: it differs from eager's by 1 of the largest value" in str(gains)
    assert not measured(model, torch.randn(2, 4), train=True).off


def test_a_way_that_fails_is_said() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nsecond line")

    gains = measured(nn.Linear(4, 4), torch.randn(2, 4), changed=fails)
    assert gains.model.ratio() is None
    assert "moefuse did not run: RuntimeError: no such kernel" in str(gains).splitlines()[0]
    assert json.loads(gains.to_json())["model"]["rows"][2]["ms"] is None
    assert "no such kernel" in gains.to_html()


def test_random_models_are_not_compared() -> None:
    gains = measured(lambda x: x + torch.randn_like(x), torch.randn(2, 4))
    assert not gains.off
    assert "results were not compared: two calls of the model in eager differ by" in str(gains)


def test_what_eager_raises_is_the_callers() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        measured(nn.Linear(4, 4), torch.randn(2, 5))
    with pytest.raises(ValueError, match="no output of the model has a gradient"):
        measured(lambda x: x + 1, torch.randn(2), train=True)
    with pytest.raises(ValueError, match="lazy modules"):
        measured(nn.LazyLinear(3), torch.randn(2, 4))


class Growing(nn.Module):
    """A model that changes what it holds and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        self.count += 1
        self.seen.append(1)
        cache.append(x)
        return self.norm(self.linear(x)) + torch.rand(()) + len(cache) + len(self.seen)


def test_nothing_is_left_behind_and_every_call_begins_the_same() -> None:
    model, x, cache = Growing(), torch.randn(2, 4, requires_grad=True), [torch.zeros(1)]
    model.norm.eval()
    assert model.linear.weight.grad is None
    model.linear.bias.grad = given = torch.ones(4)
    torch.manual_seed(3)
    state, mean = torch.get_rng_state(), model.norm.running_mean.clone()  # type: ignore[union-attr]
    lengths: set[int] = set()

    def noted(x: Tensor, cache: list[Tensor]) -> Any:
        lengths.add(len(model.seen))
        return model(x, cache)

    for train in (True, False):
        measured(model, x, cache, train=train, changed=noted)
    assert lengths == {0}
    assert (model.seen, model.count.item(), len(cache)) == ([], 0, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]
    assert (model.training, model.norm.training, torch.is_grad_enabled()) == (True, False, True)
    assert (x.grad, model.linear.weight.grad) == (None, None)
    assert model.linear.bias.grad is given
    assert given.tolist() == [1.0] * 4


class Moded(nn.Module):
    modes: set[tuple[bool, bool]] = set()  # noqa: RUF012  # of the class: what an object holds is put back

    def forward(self, x: Tensor) -> Tensor:
        self.modes.add((self.training, torch.is_grad_enabled()))
        return x * 2


@pytest.mark.parametrize("train", [True, False])
def test_modes(train: bool) -> None:
    Moded.modes.clear()
    measured(Moded(), torch.randn(2, 4, requires_grad=True), train=train)
    assert Moded.modes == {(train, train)}


def test_backward_ends_at_the_inputs() -> None:
    source = torch.randn(2, 4, requires_grad=True)
    x = source * 2
    measured(nn.Linear(4, 4), x, train=True)
    x.sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [[2.0] * 4] * 2


def test_memory_is_what_a_call_takes_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all devices together; the peak is that of the call alone."""
    held, peaks, waited = {"cuda:0": 100, "cuda:1": 10}, {"cuda:0": 900, "cuda:1": 900}, []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[str(device)])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({str(device): held[str(device)]}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))

    def called(x: Tensor) -> Tensor:
        peaks.update({"cuda:0": 164, "cuda:1": 18})
        return x

    with compare.opened(called, (torch.ones(2),), {}, False, lambda function: {EAGER: function}, Clock()) as one:
        assert one._memory(EAGER) is None
        one.devices = [torch.device("cuda:0"), torch.device("cuda:1")]
        assert one._memory(EAGER) == 72
    assert waited[-2:] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("budget", [0, -1, math.inf, math.nan, True, "1"], ids=str)
def test_illegal_budgets(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget_s must be a positive number of seconds, got"):
        moefuse.benchmark(nn.Linear(2, 2), torch.ones(2), budget_s=budget)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_without_tqdm(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, to a person at a terminal alone."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    measured(nn.Linear(4, 4), torch.randn(2, 4), progress=True)
    doing = ("calling the model in eager", "compiling with Inductor", "compiling with moefuse", "timing")
    lines = [f"moefuse.benchmark: {at} of 4: {what}" for at, what in enumerate(doing, 1)]
    assert capsys.readouterr().err.splitlines() == (lines if terminal else [])


def test_progress_with_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    measured(nn.Linear(4, 4), torch.randn(2, 4), progress=True)
    assert "4/4" in capsys.readouterr().err


def test_differences() -> None:
    one = Result([torch.tensor([1.0, -4.0])], [torch.tensor([2.0]), None])
    assert difference(one, one) == 0.0
    assert difference(one, Result([torch.tensor([1.0, -3.0])], one.gradients)) == 0.25
    assert difference(one, Result(one.outputs, [torch.tensor([2.0]), torch.tensor([1.0])])) == 0.5, "no gradient is one of zeros"
    assert difference(one, Result([torch.ones(3)], one.gradients)) == math.inf
    assert difference(one, Result([], one.gradients)) == math.inf
    assert difference(one, Result([torch.tensor([1.0, math.nan])], one.gradients)) == math.inf
    assert difference(Result([], []), Result([], [])) is None
    nan, infinite = Result([torch.tensor([math.nan, 1.0])], []), Result([torch.tensor([math.inf, 2.0])], [])
    assert (difference(nan, nan), difference(infinite, infinite)) == (0.0, 0.0)


def test_tolerances_are_of_the_coarsest_dtype() -> None:
    assert tolerance([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)]) == pytest.approx(0.088, abs=1e-3)
    assert tolerance([torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)]) < 1e-7


def test_outputs_in_containers_and_the_loss() -> None:
    x = torch.ones(3, requires_grad=True)
    assert len(list(floats({"a": [x, 3], "b": torch.ones(1, dtype=torch.int64), "c": Call((x,), {})}))) == 2
    call = Call((x,), {}, [x], train=True)
    call.once(lambda x: (x * 2, x.sum()))
    assert x.grad is not None
    assert set(x.grad.tolist()) <= {3.0, -1.0}


def example(**more: Any) -> Gains:
    layer = timed(4.0, 2.0, 2.5, name="layers.*.mlp (2 layers)")
    return Gains(timed(10.0, 5.0, 1.25), [layer], device="CPU <1>", report=REPORT, notes=["a note"], seconds=61.0, **more)


def test_text() -> None:
    gains = example()
    lines = str(gains).splitlines()
    assert lines[0] == "moefuse: inference, 4.00 times as fast as Inductor, 8.00 times as fast as eager"
    assert lines[1].split() == ["ms", "10%", "to", "90%", "times", "as", "fast", "as", "Inductor", "memory", "difference"]
    assert lines[2].split() == ["eager", "11", "10.2", "to", "11.8", "0.50", "3", "MiB", "1.0e-07"]
    assert lines[4].split() == ["moefuse", "1.38", "1.27", "to", "1.48", "4.00", "3", "MiB", "1.0e-07"]
    assert lines[5].startswith(
        "  layer   layers.*.mlp (2 layers), by itself: slower than Inductor (0.80 times as fast), 1.60 times as fast"
    )
    assert "  note    a note" in lines
    assert lines[-3] == str(REPORT).splitlines()[0]
    assert str(example(train=True)).startswith("moefuse: training, 4.00")


def test_json() -> None:
    data = json.loads(example().to_json())
    assert set(data) == {"train", "device", "model", "layers", "report", "seconds", "notes"}
    assert data["model"]["times_as_fast_as_inductor"] == {"median": 4.0, "p10": 4.0, "p90": 4.0, "verdict": "faster"}
    assert data["layers"][0]["rows"][1]["turns"] == 3
    assert data["layers"][0]["name"] == "layers.*.mlp (2 layers)"


def test_the_page(tmp_path: Any) -> None:
    path = tmp_path / "gains.html"
    example().save_html(path)
    page = path.read_text(encoding="utf-8")
    for text in (
        "Inference, 4.00 times as fast",
        "CPU &lt;1&gt;",
        "slower than Inductor (0.80",
        "a note",
        "fused 1 of 2 MoE layers",
        "3 MiB",
    ):
        assert text in page, text
    assert page.count('<svg class="bars"') == 2
    assert "src=" not in page
    assert "What is off" not in page
    assert example()._repr_html_().startswith('<div class="moefuse">')


def test_bars_are_as_long_as_times() -> None:
    import re

    widths = [float(width) for width in re.findall(r'<rect[^>]*width="([\d.]+)"', bars(timed(10.0, 5.0, 1.25)))]
    assert len(widths) == 3
    assert widths[0] / widths[2] == pytest.approx(8.0, rel=0.01)
    assert bars(Timed((Row(EAGER), Row(INDUCTOR), Row(MOEFUSE)), 1e-3)) == ""
