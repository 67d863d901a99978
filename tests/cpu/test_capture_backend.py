"""Capture through the real backend, beside other backends, and its switches."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import moefuse
from moefuse import FusionError, _torch_private
from moefuse.capture import entry
from moefuse.capture.dynamo import points
from moefuse.capture.frame import Frame
from tests.cpu.capture_case import Packed, Seen, call, capturing, plain, same
from tests.programs import loops
from tests.programs.loops import NEAR_MISS, POSITIVE, E, logits_for

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
LOGITS = logits_for("skewed", 5)


def layer(name: str = "RowsOfNonzero") -> loops.Layer:
    torch.manual_seed(0)
    return {**POSITIVE, **NEAR_MISS}[name]()


def recording() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    return graphs, backend


@pytest.mark.code_once
@pytest.mark.parametrize("name", ["RowsOfNonzero", "IfNumel"])
def test_through_inductor_with_gradients(name: str) -> None:
    model = layer(name)
    twin = copy.deepcopy(model)
    expected = call(twin, twin, X, LOGITS)
    same(call(torch.compile(model, backend="moefuse"), model, X, LOGITS), expected)
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped, report.graph_count) == (1, [], 1)
    assert counters["graph_break"] == {}


@pytest.mark.usefixtures("no_code")
def test_inference_mode() -> None:
    model = layer()
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(model, backend="moefuse")(X, LOGITS), model(X, LOGITS))


@pytest.mark.code_once
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["CountsIterations", "BreaksEarly", "MoreThanOne", "OnlyPython"])
def test_a_near_miss_through_inductor(name: str) -> None:
    model = layer(name)
    compiled = torch.compile(model, backend="moefuse")
    for kind in loops.KINDS:
        logits = logits_for(kind, 5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(X, logits), model(X, logits))


@pytest.mark.usefixtures("as_traced")
def test_other_backends_see_dynamo_unchanged() -> None:
    """In one process, one after the other and around each other: graphs of another backend break where they always did."""
    graphs, other = recording()
    torch.compile(layer(), backend=other)(X, LOGITS)
    before, breaks = [g.code for g in graphs], dict(counters["graph_break"])
    assert len(graphs) > 1
    torch.compile(layer(), backend="moefuse")(X, LOGITS)
    torch._dynamo.reset()
    graphs.clear()
    counters["graph_break"].clear()
    torch.compile(layer(), backend=other)(X, LOGITS)
    assert [g.code for g in graphs] == before
    assert dict(counters["graph_break"]) == breaks
    config = torch._dynamo.config
    assert (config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops) == (False, False)


@pytest.mark.usefixtures("as_traced")
def test_a_backend_that_wraps_ours_is_not_ours() -> None:
    """What a wrapper does with the graph is its own business: nothing may be assumed in a graph that it gets."""
    ran = []

    def wrapper(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        ran.append(sum("nonzero" in str(n.target) for n in gm.graph.nodes))
        return moefuse.backend.backend(gm, inputs, **kwargs)

    vars(wrapper).update(vars(moefuse.backend.backend))  # as functools.wraps would
    model = layer()
    torch.testing.assert_close(torch.compile(model, backend=wrapper)(X, LOGITS), model(X, LOGITS))
    assert len(ran) > 1
    assert sum(ran) == 0


def test_nothing_runs_with_an_unchecked_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that compiles without asking is made to try again, and then gets graphs without assumptions."""
    _, careless = recording()
    entry.enable(careless, lambda _arguments: plain(), lambda *_skipped: None)
    for name in ("RowsOfNonzero", "CountsIterations", "OnlyPython", "IfNumel"):
        torch._dynamo.reset()
        model = layer(name)
        compiled = torch.compile(model, backend=careless)
        for kind in loops.KINDS:
            logits = logits_for(kind, 5)
            with torch.no_grad():
                torch.testing.assert_close(compiled(X, logits), model(X, logits))


@pytest.mark.parametrize("where", ["driver", "verify"])
def test_when_moefuse_fails_the_program_runs_as_without_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.passes import driver, replacement

    def bug(*_args: Any, **_kwargs: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(*((driver, "interpreted") if where == "driver" else (replacement, "verify")), bug)
    seen, model = Seen(), layer()
    compiled = torch.compile(model, backend=capturing(seen))
    for kind in loops.KINDS:
        logits = logits_for(kind, 5)
        torch.testing.assert_close(compiled(X, logits), model(X, logits))
    assert seen.report.fused == []
    assert {"internal-error", "verification-error"} & seen.codes


@pytest.mark.usefixtures("as_traced")
def test_a_bug_in_capture_itself_costs_only_the_capture(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from moefuse.capture import guess

    def bug(*_args: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(guess, "mask_of", bug)
    model = layer()
    with caplog.at_level(logging.ERROR, "moefuse.capture"):
        torch.testing.assert_close(torch.compile(model, backend="moefuse")(X, LOGITS), model(X, LOGITS))
    assert "moefuse failed while it looked at" in caplog.text


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("how", ["option", "environment"])
def test_switched_off_by_hand(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("MOEFUSE_CAPTURE", "0")
    options = {"capture": False} if how == "option" else None
    model = layer()
    torch.testing.assert_close(torch.compile(model, backend="moefuse", options=options)(X, LOGITS), model(X, LOGITS))
    report = moefuse.last_report()
    assert report is not None
    assert report.fused == []
    assert any("Dynamic shape operator" in text for text in report.graph_breaks)


@pytest.mark.usefixtures("as_traced")
def test_a_torch_without_the_hooks_switches_capture_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(points.POINTS, "torch._dynamo.symbolic_convert:InstructionTranslatorBase", "moved")
    monkeypatch.setattr(entry, "_missing", None)
    with caplog.at_level(logging.WARNING, "moefuse.capture"):
        assert entry.unavailable() == entry.unavailable()
    text = "this torch has no torch._dynamo.symbolic_convert.InstructionTranslatorBase.moved; all else works"
    assert caplog.text.count(text) == 1
    report = moefuse.explain(layer(), X, LOGITS)
    assert report.notes[-1] == f"capture of data-dependent expert loops is off: {text}"
    assert "note    capture of data-dependent" in str(report)


@pytest.mark.usefixtures("as_traced")
def test_strict_names_what_was_not_captured() -> None:
    with pytest.raises(FusionError, match="not-captured: this loop depends on data, and `count` is read after it"):
        torch.compile(layer("CountsIterations"), backend="moefuse", options={"strict": True})(X, LOGITS)


@pytest.mark.usefixtures("as_traced")
def test_strict_says_nothing_about_code_without_experts() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        for row in (x[:, 0] > 0).nonzero():
            x = x + row
        return x

    compiled = torch.compile(rows, backend="moefuse", options={"strict": True})
    torch.testing.assert_close(compiled(X), rows(X))


@pytest.mark.usefixtures("as_traced")
def test_explain_counts_frames_that_dynamo_skips() -> None:
    report = moefuse.explain(layer("MoreThanOne"), X, LOGITS)
    assert any("runs in eager" in text for text in report.graph_breaks)


@pytest.mark.usefixtures("as_traced")
def test_last_report_counts_them_too() -> None:
    torch.compile(layer("MoreThanOne"), backend="moefuse")(X, LOGITS)
    report = moefuse.last_report()
    assert report is not None
    assert any("runs in eager" in text for text in report.graph_breaks)


@pytest.mark.usefixtures("as_traced")
def test_recompiling_and_reset() -> None:
    model = Packed(layer())
    compiled = torch.compile(model, backend="moefuse")
    for tokens in (5, 7, 2):
        both = torch.cat([torch.randn(tokens, 8), logits_for("upper", tokens)], dim=1)
        with torch.no_grad():
            torch.testing.assert_close(compiled(both), model(both))
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(compiled(both), model(both))
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1


@pytest.mark.usefixtures("as_traced")
def test_regional_compilation() -> None:
    model = torch.nn.ModuleList([layer(), layer("ContinueWhenEmpty")])
    for part in model:
        part.compile(backend="moefuse")
    with torch.no_grad():
        for part in model:
            torch.testing.assert_close(part(X, LOGITS), type(part).forward(part, X, LOGITS))
            report = moefuse.last_report()
            assert report is not None
            assert (len(report.fused), report.graph_count) == (1, 1)


@pytest.mark.usefixtures("as_traced")
def test_a_compiled_layer_inside_a_frame_of_another_backend() -> None:
    inner, (_graphs, other) = layer(), recording()
    plain_inner = copy.deepcopy(inner)
    fast = torch.compile(inner, backend="moefuse")

    @torch.compile(backend=other)
    def outer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return fast(x, logits)

    torch.testing.assert_close(outer(X, LOGITS), plain_inner(X.sin(), LOGITS))


@pytest.mark.usefixtures("no_code")
def test_threads() -> None:
    results: dict[str, Any] = {}

    def work(name: str) -> None:
        try:
            model = layer(name)
            with torch.no_grad():
                results[name] = torch.compile(model, backend="moefuse")(X, LOGITS) - model(X, LOGITS)
        except Exception as error:  # for the main thread
            results[name] = error

    names = ("RowsOfNonzero", "IfNumel", "CountsIterations")
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        found = results[name]
        assert isinstance(found, torch.Tensor), f"{name}: {found}"
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-5, rtol=0)


def test_checkpointing() -> None:
    """The loop is in the body of a higher-order operator."""
    from torch.utils.checkpoint import checkpoint

    model = layer()

    def run(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, logits, use_reentrant=False)

    seen = Seen()
    expected = call(run, model, X, LOGITS)
    same(call(torch.compile(run, backend=capturing(seen)), model, X, LOGITS), expected)


def test_one_failed_assumption_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is traced again once, whatever the number of near-misses in it."""
    retreats = []
    original = Frame.retreat

    def counting(self: Frame, *args: Any, **kwargs: Any) -> None:
        retreats.append(self.log)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Frame, "retreat", counting)
    model, seen = layer("MoreThanOne"), Seen()

    def many(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids = logits.topk(2).indices
        count = 0
        for e in range(E):
            if torch.where(ids == e)[0].numel() > 0:
                count += 1
        return model(x, logits) * count

    torch.testing.assert_close(torch.compile(many, backend=capturing(seen))(X, LOGITS), many(X, LOGITS))
    assert len(retreats) == len({id(log) for log in retreats}) >= 1


@pytest.mark.usefixtures("as_traced")
def test_a_graph_that_the_compiler_cannot_take_goes_to_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler makes of a rewritten graph, or of a loop in one graph, is no reason for a program to stop that runs without."""
    original = _torch_private.compile_fx

    def compile_fx(gm: torch.fx.GraphModule, *args: Any) -> Any:
        if any(n.target is torch.ops.moefuse.experts.default for n in gm.graph.nodes):
            raise KeyError("a bug of the compiler")
        return original(gm, *args)

    monkeypatch.setattr(_torch_private, "compile_fx", compile_fx)
    model = layer("IfNumel")
    torch.testing.assert_close(torch.compile(model, backend="moefuse")(X, LOGITS), model(X, LOGITS))
    report = moefuse.last_report()
    assert report is not None
    assert not report.fused
    assert report.skipped
