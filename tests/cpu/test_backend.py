"""The backend around the passes: what reaches Inductor, what the user hears, and that nothing else changes.

Most tests replace Inductor by the graph's own forward and the passes by a stub, so that they see exactly what passes between the two.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import moefuse
from moefuse import _torch_private
from moefuse.inductor_pass import CacheStamp
from moefuse.pipeline import publish
from moefuse.report import history
from moefuse.report.entries import Fused, Skipped
from moefuse.spec import ExpertsSpec
from tests import forked
from tests.conftest import StubDriver
from tests.programs.refused import plain

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "_no_history")

SPEC = ExpertsSpec(num_experts=8, top_k=2, hidden=64, intermediate=48, dtype="float32", activation="silu")
FUSED = Fused("layers.0.mlp", "my.py:3", SPEC, "sorted", "fused", 0.5)
SKIPPED = Skipped("no-rule", "expert rows go through `x`", "layers.1.mlp", "my.py:17")


class Dense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.first(x)))


class Breaks(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(h)


@pytest.fixture
def _no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_compilations", None)
    monkeypatch.setattr(history, "_kept", {})
    monkeypatch.setattr(publish, "_warned", set())


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for Inductor; the config patches of every call."""
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: Sequence[object], config_patches: dict[str, Any], name: object) -> Callable[..., Any]:
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr(_torch_private, "compile_fx", compile_fx)
    return seen


def compiled(model: torch.nn.Module | None = None, **arguments: Any) -> Callable[..., Any]:
    return torch.compile(model or Dense(), backend="moefuse", **arguments)


def stamps(patch: dict[str, Any]) -> list[Any]:
    passes = patch["post_grad_custom_post_pass"]
    return passes if isinstance(passes, list) else [passes]


# --- the real Inductor ------------------------------------------------------------------------------------------------------------


def test_a_model_without_experts_is_compiled_as_ever(stub_driver: StubDriver, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Dense(), torch.randn(3, 6)
    eager = copy.deepcopy(model)
    model.compile(backend="moefuse")
    torch.testing.assert_close(model(x), eager(x))
    model(x).square().sum().backward()
    eager(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert moefuse.last_report() == moefuse.FusionReport(graph_count=1)
    assert [record for record in caplog.records if record.name.startswith("moefuse")] == []


def test_the_pass_under_inductor(stub_driver: StubDriver) -> None:
    stub_driver.result.fused.append(FUSED)
    model, x = Dense(), torch.randn(3, 6)
    with torch._inductor.config.patch(pre_grad_custom_pass=moefuse.MoEFusionPass({"verify": "off"}), force_disable_caches=True):
        torch.testing.assert_close(torch.compile(model)(x), model(x))
    ((gm, example_inputs, options),) = stub_driver.calls
    assert torch.nn.functional.gelu in {node.target for node in gm.graph.nodes}, "the pass must see the program as it was written"
    assert example_inputs is None
    assert options == moefuse.Options(verify="off")
    report = moefuse.last_report()
    assert report is not None
    assert report.fused == [FUSED]


FIRST_RUN = """
import torch, moefuse
import moefuse.ops
from torch._dispatch.python import enable_python_dispatcher
torch.manual_seed(0)
x, w_in, w_out = (torch.randn(*size, requires_grad={grad}) for size in ((3, 4), (2, 6, 4), (2, 4, 6)))
ids, weights = torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
with enable_python_dispatcher():
    out = torch.ops.moefuse.experts(x, ids, weights, [w_in], [], [w_out], [], [], [], activation="relu", gating="plain")
expected = torch.stack([(x[t] @ w_in[e].T).relu() @ w_out[e].T for t, e in enumerate(ids[:, 0])])
torch.testing.assert_close(out, expected)
if {grad}:
    for ours, theirs in zip(torch.autograd.grad(out.sum(), [x, w_in, w_out]), torch.autograd.grad(expected.sum(), [x, w_in, w_out])):
        torch.testing.assert_close(ours, theirs)
"""


def test_the_first_run_of_the_op_is_under_pythons_dispatcher() -> None:
    """Where no kernel of this machine's is registered yet, so each in a process of its own.

    The dispatcher remembers which kernel a call went to, also that of the call which registers another one. And Inductor switches it on:
    in the pass as the page shows it, the proof's run of the op is the first.
    """
    page = (Path(__file__).parent.parent.parent / "docs/usage.md").read_text()
    layer, *rest = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (shown,) = [block for block in rest if "MoEFusionPass" in block]
    of_the_page = f"""
{layer}
MoE.__init__.__defaults__ = 64, 48, 3, 2
x = torch.randn(16, 64)
from torch._inductor import compile_fx as inductor  # all of it but code, which comes behind the pass
original = inductor.compile_fx
inductor.compile_fx = lambda gm, inputs, *_, **__: original(gm, inputs, inner_compile=lambda traced, *_, **__: traced.forward)
with torch._inductor.config.patch(force_disable_caches=True), torch._functorch.config.patch(enable_autograd_cache=False):
{textwrap.indent(shown, "    ")}
report = moefuse.last_report()
assert len(report.fused) == 1 and not report.skipped, report
assert report.fused[0].error is not None, report
"""
    forked.printed("import torch._inductor.compile_fx, moefuse", [FIRST_RUN.format(grad=False), FIRST_RUN.format(grad=True), of_the_page])


def test_strict_works_under_inductor_too(stub_driver: StubDriver) -> None:
    stub_driver.result.skipped.append(SKIPPED)
    fusion = moefuse.MoEFusionPass({"strict": True})
    with (
        torch._inductor.config.patch(pre_grad_custom_pass=fusion, force_disable_caches=True),
        pytest.raises(moefuse.FusionError, match="no-rule"),
    ):
        torch.compile(Dense())(torch.randn(3, 6))


def test_an_internal_error_costs_nothing_but_speed(stub_driver: StubDriver, caplog: pytest.LogCaptureFixture) -> None:
    def half_a_rewrite(gm: torch.fx.GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        output.args = ((gm.graph.find_nodes(op="placeholder")[0],),)
        gm.recompile()
        raise AssertionError("a bug")

    stub_driver.action = half_a_rewrite
    model, x = Dense(), torch.randn(3, 6, requires_grad=True)
    out = compiled(model)(x)
    torch.testing.assert_close(out, model(x))
    out.sum().backward()
    report = moefuse.last_report()
    assert report is not None
    assert [skipped.code for skipped in report.skipped] == ["internal-error"]
    assert "AssertionError: a bug" in caplog.text


@pytest.mark.usefixtures("no_code")
def test_a_rewritten_graph_that_the_compiler_cannot_take(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler gets the graph as it was, and the report says so."""
    original = _torch_private.compile_fx

    def compile_fx(gm: torch.fx.GraphModule, *args: Any) -> Any:
        if any(n.target is torch.ops.moefuse.experts.default for n in gm.graph.nodes):
            raise KeyError("a bug of the compiler")
        return original(gm, *args)

    monkeypatch.setattr(_torch_private, "compile_fx", compile_fx)
    model, x = plain.Plain(), torch.randn(plain.T, plain.H)
    torch.testing.assert_close(torch.compile(model, backend="moefuse", fullgraph=True)(x), model(x))
    report = moefuse.last_report()
    assert report is not None
    assert not report.fused
    assert [skipped.code for skipped in report.skipped] == ["internal-error"]
    assert "a bug of the compiler" in caplog.text


# --- what reaches the passes and Inductor ------------------------------------------------------------------------------------------


def test_the_passes_get_the_graph_the_inputs_and_the_options(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    compiled(options={"verify": "off", "max_rewrites": 3})(torch.randn(3, 6))
    ((gm, example_inputs, options),) = stub_driver.calls
    assert options == moefuse.Options(verify="off", max_rewrites=3, overlap=0)
    assert example_inputs is not None
    assert len(example_inputs) == len(gm.graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode_means_what_it_means_for_inductor(mode: str, stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    compiled(mode=mode)(torch.randn(3, 6))
    (patch,) = patches
    assert {name: value for name, value in patch.items() if name != "post_grad_custom_post_pass"} == torch._inductor.list_mode_options(mode)


def test_inductor_options_reach_inductor_and_ours_do_not(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    compiled(options={"strict": False, "epilogue-fusion": False, "max_autotune": True})(torch.randn(3, 6))
    (patch,) = patches
    assert set(patch) == {"epilogue_fusion", "max_autotune", "post_grad_custom_post_pass"}
    assert patch["epilogue_fusion"] is False


class UsersPass(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str:
        return "the user's"


@pytest.mark.skipif(
    not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"), reason="lists of passes came with torch 2.13"
)
@pytest.mark.parametrize("form", ["one", "list", "tuple"])
@pytest.mark.parametrize("place", ["option", "config"])
def test_the_users_own_passes_stay(form: str, place: str, stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    users = UsersPass()
    value: Any = {"one": users, "list": [users], "tuple": (users,)}[form]
    if place == "option":
        compiled(options={"post_grad_custom_post_pass": value})(torch.randn(3, 6))
    else:
        with torch._inductor.config.patch(post_grad_custom_post_pass=value):
            compiled()(torch.randn(3, 6))
    (patch,) = patches
    first, second = stamps(patch)
    assert first is users
    assert second.uuid().startswith("moefuse ")
    assert value in (users, [users], (users,)), "the user's list must not grow"


def test_one_slot_for_one_pass_as_before_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes", raising=False)
    ran: list[torch.fx.Graph] = []
    graph = torch.fx.Graph()
    for users, uuid in ((UsersPass(), 'key after "the user\'s"'), (ran.append, None)):
        patch = _torch_private.with_stamp({"post_grad_custom_post_pass": users}, functools.partial(CacheStamp, "key"))
        stamp = patch["post_grad_custom_post_pass"]
        stamp(graph)
        assert stamp.uuid() == uuid
    assert ran == [graph]


def test_the_stamp_knows_the_options(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    compiled(Dense())(torch.randn(3, 6))
    compiled(Dense(), options={"verify": "off"})(torch.randn(3, 6))
    first, second = (stamps(patch)[-1].uuid() for patch in patches)
    assert first != second


@pytest.mark.parametrize("how", ["option", "environment"])
def test_disabled_means_plain_inductor(
    how: str, stub_driver: StubDriver, patches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("MOEFUSE_DISABLE", "1")
    compiled(options={"enabled": False, "max_autotune": True} if how == "option" else {"max_autotune": True})(torch.randn(3, 6))
    assert patches == [{"max_autotune": True}]
    assert stub_driver.calls == []
    assert "disabled by" in str(moefuse.last_report())


def test_dynamic_compiles_once_for_all_sizes(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    f = compiled(dynamic=True)
    for tokens in (3, 5, 9):
        assert f(torch.randn(tokens, 6)).shape == (tokens, 4)
    assert len(patches) == 1


def test_fullgraph_is_dynamos(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Breaks(), fullgraph=True)(torch.randn(3, 6))


def test_two_compilations_of_one_model_share_their_code(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    model, x = Dense(), torch.randn(3, 6)
    for _ in range(2):
        compiled(model, options={"verify": "off"})(x)
    moefuse.compile(model, options={"verify": "off"})(x)
    assert len(patches) == 1


# --- errors -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"options": {"strikt": True}}, moefuse.OptionError, r"^unknown option 'strikt' \(did you mean 'strict'\?\).*list_options\(\)$"),
        ({"options": {"verify": "fast"}}, moefuse.OptionError, r"^option verify='fast' is not legal; use 'probe' or 'graph' or 'off'$"),
        ({"mode": "fast"}, RuntimeError, r"^Unrecognized mode=fast, should be one of: default, .*max-autotune$"),
        ({"options": {"max_autotune": "x"}}, RuntimeError, r"^Unexpected type of attr max_autotune, got str should be bool$"),
    ],
)
def test_wrong_arguments_reach_the_user_unwrapped(
    arguments: dict[str, Any], error: type[Exception], text: str, stub_driver: StubDriver, patches: list[dict[str, Any]]
) -> None:
    with pytest.raises(error, match=text) as raised:
        compiled(**arguments)(torch.randn(3, 6))
    assert not isinstance(raised.value, torch._dynamo.exc.BackendCompilerFailed)
    assert patches == []


def test_mode_and_options_in_a_direct_call() -> None:
    from moefuse.backend import backend

    gm = torch.fx.symbolic_trace(Dense())
    with pytest.raises(RuntimeError, match="Either mode or options can be specified, but both can't be specified at the same time"):
        backend(gm, [], mode="max-autotune", options={"strict": True})


@pytest.mark.parametrize("fullgraph", [False, True])
def test_strict_raises_fusion_error_with_the_report(fullgraph: bool, stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    stub_driver.result.fused.append(FUSED)
    stub_driver.result.skipped.append(SKIPPED)
    with pytest.raises(moefuse.FusionError) as raised:
        compiled(options={"strict": True}, fullgraph=fullgraph)(torch.randn(3, 6))
    assert type(raised.value).__qualname__ == "FusionError"
    assert type(raised.value).__module__ == "moefuse.errors"
    assert str(raised.value) == str(moefuse.last_report())
    assert "fused 1 of 2 MoE layers" in str(raised.value)
    assert patches == []


# --- what the user hears ----------------------------------------------------------------------------------------------------------


def test_one_log_line_per_graph(stub_driver: StubDriver, patches: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    stub_driver.result.fused += [FUSED, FUSED]
    with caplog.at_level(logging.INFO, "moefuse"):
        compiled()(torch.randn(3, 6))
    assert [(record.name, record.getMessage()) for record in caplog.records if record.name.startswith("moefuse")] == [
        ("moefuse.backend", "fused 1 of 1 MoE layer (layers.0.mlp)")
    ]


def test_a_skipped_region_warns(stub_driver: StubDriver, patches: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    stub_driver.result.skipped += [SKIPPED, SKIPPED]
    compiled()(torch.randn(3, 6))
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "my.py:17 in layers.1.mlp was not fused (no-rule): expert rows go through `x`" in record.getMessage()


def test_warnings_can_be_silenced(stub_driver: StubDriver, patches: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    stub_driver.result.skipped.append(SKIPPED)
    with caplog.at_level("ERROR", "moefuse"):
        compiled()(torch.randn(3, 6))
    assert caplog.records == []


def test_counters(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    stub_driver.result.fused += [FUSED, FUSED]
    stub_driver.result.skipped.append(SKIPPED)
    compiled(Breaks())(torch.randn(3, 6))
    assert dict(torch._dynamo.utils.counters["moefuse"]) == {"graphs": 2, "fused": 4, "skipped": 2, "skipped: no-rule": 2}


def records(folder: Path) -> list[dict[str, Any]]:
    """The structured log, one dict per record; a record's payload follows its line, indented by a tab."""
    parsed: list[dict[str, Any]] = []
    for path in folder.glob("*.log"):
        for line in path.read_text().splitlines():
            if line.startswith("V"):
                parsed.append({**json.loads(line[line.index("{") :]), "payload": ""})
            elif parsed and line.startswith("\t"):
                parsed[-1]["payload"] += line[1:]
    return parsed


def test_traces_and_logs_in_a_process_that_asks_for_them(tmp_path: Path) -> None:
    # A view is a graph without a kernel to compile.
    program = "import torch; torch.compile(lambda x: x.view(4, 2), backend='moefuse')(torch.ones(2, 4))"
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "+moefuse"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert "no mixture-of-experts code found" in done.stderr
    (artifact,) = [record for record in records(tmp_path) if record.get("artifact", {}).get("name") == "moefuse_report"]
    assert artifact["artifact"]["encoding"] == "json"
    assert artifact["frame_id"] == 0
    assert json.loads(artifact["payload"])["graph_count"] == 1


# --- last_report ------------------------------------------------------------------------------------------------------------------


def test_there_is_no_report_before_the_first_compilation() -> None:
    assert moefuse.last_report() is None


def test_a_report_covers_all_frames_of_one_call(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    stub_driver.result.fused.append(FUSED)
    compiled(Breaks())(torch.randn(3, 6))
    report = moefuse.last_report()
    assert report is not None
    assert report.graph_count == 2
    assert report.fused == [FUSED, FUSED]
    (reason,) = report.graph_breaks
    assert "graph_break" in reason
    assert f"{__file__}:" in reason


def test_a_recompilation_replaces_its_frame(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    stub_driver.result.fused.append(FUSED)
    f = compiled(Breaks(), dynamic=False)
    for tokens in (3, 4, 5):
        f(torch.randn(tokens, 6))
    assert len(patches) == 6
    report = moefuse.last_report()
    assert report is not None
    assert report.graph_count == 2


def test_another_model_starts_another_report(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    compiled(Breaks())(torch.randn(3, 6))
    first = moefuse.last_report()
    stub_driver.result.fused.append(FUSED)
    compiled(Dense())(torch.randn(3, 6))
    second = moefuse.last_report()
    assert first is not None
    assert second is not None
    assert (first.graph_count, second.graph_count) == (2, 1)
    assert second.fused == [FUSED]


def test_a_report_is_a_copy(stub_driver: StubDriver, patches: list[dict[str, Any]]) -> None:
    compiled()(torch.randn(3, 6))
    report = moefuse.last_report()
    assert report is not None
    report.fused.append(FUSED)
    assert moefuse.last_report() == moefuse.FusionReport(graph_count=1)
