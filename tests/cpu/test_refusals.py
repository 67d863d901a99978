"""One negative program for every refusal code: the code, the whole message, the user's line, and results equal to eager.

The programs are in tests/programs/refused/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from moefuse import FusionError, Options
from moefuse.capture import entry
from moefuse.diagnosis import missed_layers
from moefuse.errors import CODES
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.programs import refused
from tests.programs.refused.choices import (
    AboveZero,
    Capacity,
    ExpertChoice,
    ExpertsDiffer,
    IdsNotDistinct,
    IdsOutOfRange,
    MissingExperts,
    NotCombined,
    NotWeighted,
    SumChanged,
    Threshold,
    TokensDiffer,
)
from tests.programs.refused.found import Batched, Counting, NotCaptured, NothingFound, NotLowered, NotRecognised
from tests.programs.refused.held import Gathered, Packed, Sharded, TwoDtypes, Unpacked, Unusual
from tests.programs.refused.plain import H, Model, Plain, T, Teacher
from tests.programs.refused.rows import (
    Alias,
    ContextDiffers,
    Hook,
    Mutation,
    NoRule,
    NotRowLocal,
    Overlap,
    Random,
    Transformed,
    ValueEscapes,
)


@dataclass(frozen=True)
class Case:
    """One refusal: the program, what is reported, and what has to be arranged for it.

    Attributes:
        program: the user's model.
        message: the whole text; ``{name}`` is the node that stands for a value without a name of its own.
        arrange: an alteration of moefuse for the codes that only a bug (or a broken kernel) can produce.
        options: moefuse's options.
        device: where the model lives.
        marker: the ``# at:`` comment of the line that must be named, if it is not the code itself.
        module: module path in the report.
        captured: whether Dynamo traces it with capture, and may break the graph.
    """

    program: type[nn.Module]
    message: str
    arrange: Callable[[pytest.MonkeyPatch], None] | None = None
    options: Options = field(default_factory=Options)
    device: str = "cpu"
    marker: str | None = None
    module: str = ""
    captured: bool = False


def after_slot_weights(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Let the lowering pass ``change(weights)`` to the fused op."""
    from moefuse.passes.lower.lower import Lowering

    original = Lowering.slot_weights
    patch.setattr(Lowering, "slot_weights", lambda self, weight: self.emit(change, original(self, weight)))


def wrong_lowering(patch: pytest.MonkeyPatch) -> None:
    """A bug: the routing weights arrive at the op in the wrong order of slots."""
    after_slot_weights(patch, lambda weights: weights.flip(-1))


def cutting_lowering(patch: pytest.MonkeyPatch) -> None:
    """A bug that no value shows: the routing weights arrive without their gradient. (As a region alone, that would be seen as well.)"""
    from moefuse.passes.prove import verify

    patch.setattr(verify, "comparable", lambda ctx, region: False)
    after_slot_weights(patch, lambda weights: weights.detach())


def crashing_lowering(patch: pytest.MonkeyPatch) -> None:
    """A bug: something type-checks and cannot run."""

    def change(weights: Tensor) -> Tensor:
        if isinstance(weights, torch._subclasses.FakeTensor):
            return weights.clone()
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    after_slot_weights(patch, change)


def measured_slower(patch: pytest.MonkeyPatch) -> None:
    """A measurement of this very program, in which it is the faster one."""
    from moefuse.passes.lower import cost_gate
    from moefuse.tuning.entries import Pair

    patch.setattr(cost_gate, "device_name", lambda device: "a device")
    patch.setattr(cost_gate.store, "comparison", lambda device, problem, program: Pair(20.0, 30.0, problem.tokens))


def raising_rule(patch: pytest.MonkeyPatch) -> None:
    """A bug in a transfer rule."""
    from moefuse.passes.rules import RULES

    def on_index_add(*_: Any) -> None:
        raise KeyError("a bug")  # at: internal-error

    patch.setitem(RULES, "index_add", on_index_add)


def losing_writes(patch: pytest.MonkeyPatch) -> None:
    """A sweep that takes a write to the model's buffer with it."""
    from moefuse.passes.lower import rewrite

    original = rewrite.sweep

    def sweep(ctx: Any, region: Any) -> None:
        original(ctx, region)
        for node in reversed(ctx.graph.nodes):
            if node.target == "copy_":
                ctx.graph.erase_node(node)

    patch.setattr(rewrite, "sweep", sweep)


def other_collectives(patch: pytest.MonkeyPatch) -> None:
    """An operation that every test process has stands for those of torch.distributed."""
    from moefuse.passes.match import encodings

    patch.setattr(encodings, "_COLLECTIVES", ("collectives_like::",))


def group_of_one(patch: pytest.MonkeyPatch) -> None:
    """A mesh of one rank, whose collectives are copies."""
    from moefuse.runtime import groups
    from moefuse.runtime.transports import weights

    patch.setattr(groups, "_groups", {})
    groups.register("one", (0,), 0, None, None)
    for name in ("all_gather", "all_to_all"):
        patch.setattr(weights, name, lambda every, mine, _group: every.copy_(mine))


CASES: dict[str, Case] = {
    "no-rule": Case(NoRule, "expert rows go through `digamma`, which has no rule: what it computes per row is unknown"),
    "not-row-local": Case(
        NotRowLocal, "`mean` takes the rows of an expert together, so what it gives depends on which other tokens were routed there"
    ),
    "random": Case(Random, "`randn_like` draws random numbers inside the expert"),
    "hook": Case(Hook, "a hook observes a value inside the experts"),
    "value-escapes": Case(ValueEscapes, "`y`, a value inside the experts, is also used outside them"),
    "mutation": Case(Mutation, "`h` is changed in place while the experts use it"),
    "overlap": Case(
        Overlap,
        "`last` is written to here, and may be memory of what the experts read: it lies in the memory of `window`, and torch "
        "takes them for apart (one memory in two storages, as NumPy's views of an array are)",
        captured=True,
    ),
    "alias": Case(Alias, "`y` is changed in place through a view that is read again"),
    "experts-differ": Case(ExpertsDiffer, "expert 2 differs from expert 0: operation gelu instead of silu"),
    "missing-experts": Case(MissingExperts, "only experts 0..2 are computed, of 4"),
    "ids-not-distinct": Case(
        IdsNotDistinct,
        "a repeated expert id of a token would count once here: nothing shows that `ids` has none, as what top-k gives has none",
    ),
    "ids-out-of-range": Case(
        IdsOutOfRange,
        "expert ids may belong to no expert, and mean something else here than no contribution: "
        "those of 4 and more are clamped to the last expert, and nothing leaves their rows out",
    ),
    "not-weighted": Case(NotWeighted, "expert outputs reach the sum without the mask or routing weight that selects them"),
    "sum-changed": Case(SumChanged, "the sum goes through `clamp` before all experts are added to it"),
    "not-combined": Case(NotCombined, "expert rows never reach a sum over the chosen experts of a token"),
    "capacity": Case(
        Capacity,
        "experts take a limited number of tokens here: `einsum` puts them into a fixed number of places of each expert, "
        "and the experts run on all places, filled or not",
    ),
    "expert-choice": Case(
        ExpertChoice, "experts choose their tokens here, not tokens their experts: every expert has the same number of rows"
    ),
    "threshold": Case(
        Threshold,
        "`token` is of tokens whose score is above a number: each may have any number of experts, and an op has K for each token",
        captured=True,
    ),
    "tokens-differ": Case(
        TokensDiffer,
        "the experts' input rows do not line up with the expert ids: `scale` ({number}) is not a value per row of the same experts",
    ),
    "encoding-unknown": Case(
        Unpacked,
        "expert weights are held as int8: the program unpacks them one by one; fused, all 8 would be for every call, "
        "and here a call may need fewer of them; they are not multiplied as they are, for what they are made of is trained",
    ),
    "encoding-unsupported": Case(
        Unusual,
        "expert weights are held as s8, one scale; s8, a scale for each channel, and no op multiplies them as they are: "
        "some experts' weights are held in another way than others'",
    ),
    "quantised": Case(
        Packed,
        "expert weights are packed in a way that moefuse does not read: they are held as `TwoTensor`, and they are trained",
        module="experts.0",
    ),
    "sharded": Case(
        Sharded,
        "the experts are spread over processes: `all_reduce` exchanges what depends on the router's choice",
        arrange=other_collectives,
    ),
    "experts-gathered": Case(
        Gathered,
        "the weights of these sharded experts are gathered from all ranks in every call: nothing was fused that reads them",
        arrange=group_of_one,
    ),
    "dtype-unsupported": Case(
        TwoDtypes, "dtype bfloat16, float32 is not supported by the fused op (the products of one expert compute in several dtypes)"
    ),
    "device-unsupported": Case(Batched, "the fused op does not run on meta: it has no kernel there", device="meta"),
    "not-captured": Case(
        NotCaptured,
        "this loop depends on data, and `active` is read after it, and has another value if it does not run; "
        "the graph breaks here as it would without moefuse",
        captured=True,
    ),
    "not-recognised": Case(
        NotRecognised,
        "the best of 4 scores are chosen, as experts are, and what follows is none of the ways to run experts that moefuse reads: "
        "it cannot follow `lerp`",
    ),
    "nothing-found": Case(
        NothingFound,
        "the model has weights [4, 24, 8] beside a weight [4, 8], and moefuse has fused nothing: "
        "the graph breaks inside it (Data-dependent branching), and what is left in graphs is no whole layer",
        captured=True,
    ),
    "excluded": Case(Model, "the module path matches options['exclude']", options=Options(exclude=r"^mlp$"), marker="plain", module="mlp"),
    "limit": Case(Plain, "options['max_rewrites'] regions were fused already", options=Options(max_rewrites=0), marker="plain"),
    "context-differs": Case(
        ContextDiffers,
        "the experts run under another grad mode than their sum: "
        "{number} is computed without gradients ({number}), the sum over the experts with gradients",
    ),
    "transformed": Case(Transformed, "torch.func transforms the experts here (grad), and their fused op has no rules for that"),
    "not-lowered": Case(
        NotLowered,
        "the region is understood, but its replacement does not type-check: "
        "moefuse::experts: argument `b_out` holds 4 vectors of size 1; legal: size 8, the output features of its projection",
    ),
    "verification-failed": Case(
        Plain,
        "the fused op and the original disagree on this model's weights: error {number} of the result's size, the original has {number}",
        arrange=wrong_lowering,
        marker="plain",
    ),
    "verification-error": Case(
        Plain,
        "the check against the original could not run: RuntimeError: no kernel image is available",
        arrange=crashing_lowering,
        marker="plain",
    ),
    "effects-differ": Case(
        Counting,
        "the rewritten graph would do something else than the program: "
        "`self.seen.copy_(x.detach().mean(0)[:K])` is gone (please report it)",
        arrange=losing_writes,
    ),
    "graph-differs": Case(
        Plain,
        "run as a whole before and after the rewrite, the graphs do not agree in the gradient of "
        "`L['self']._modules['gate']._parameters['weight']`: it is gone",
        arrange=cutting_lowering,
        options=Options(verify="graph"),
        marker="plain",
    ),
    "not-faster": Case(
        Teacher,
        "20.0 us as it is and 30.0 us as the fused op for 10 tokens on a device (measured here by moefuse.warmup)",
        arrange=measured_slower,
        marker="plain",
    ),
    "internal-error": Case(
        Plain,
        "moefuse itself failed, so the whole graph stays as it was: KeyError: 'a bug' (please report it with the logged traceback)",
        arrange=raising_rule,
    ),
}


def line_of(marker: str) -> str:
    """``file:line`` of the statement with the comment ``# at: marker``."""
    lines = [(path, i, line) for path in (*refused.FILES, __file__) for i, line in enumerate(Path(path).read_text().splitlines(), 1)]
    (found,) = [f"{path}:{number}" for path, number, line in lines if line.endswith(f"# at: {marker}")]
    return found


def compiled(model: nn.Module, options: Options, report: FusionReport, *, captured: bool = False) -> Callable[..., Any]:
    """The model with moefuse's passes and eager execution of what they leave."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, options, entry.frame()))
        ours = {str(node.target) for node in gm.graph.nodes if "moefuse" in str(node.target)}
        assert ours <= {"moefuse.gathered.default"}, gm.graph  # (which is the user's own)
        return gm.forward

    if captured:
        entry.enable(backend, lambda _arguments: options, lambda found, *_: report.extend(found))
    call: Callable[..., Any] = torch.compile(model, fullgraph=not captured, backend=backend)
    return call


def outputs_and_gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a call returns, and the gradients of all of it."""
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    found = call(x)
    outputs = list(found) if isinstance(found, tuple) else [found]
    sum(out.float().square().sum() for out in outputs).backward()
    grads = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return [t.detach() for t in (*outputs, *grads)]


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


OLD_TORCH = pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="Dynamo of torch 2.11 puts the hook before what it needs")


@pytest.mark.parametrize("code", [pytest.param(code, marks=OLD_TORCH) if code == "hook" else code for code in CASES])
def test_refusal(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[code]
    if case.arrange is not None:
        case.arrange(monkeypatch)
    model, report = case.program().train().to(case.device), FusionReport()
    x = torch.randn(T, H, device=case.device)
    got = outputs_and_gradients(compiled(model, case.options, report, captured=case.captured), model, x)
    report.skipped += missed_layers.missing(report, (model,), case.options)

    assert report.fused == []
    assert [s.code for s in report.skipped] == [code], str(report)
    (skipped,) = report.skipped
    message = case.message.split("{number}")
    assert [part for part in message if part not in skipped.message] == [], skipped.message
    if len(message) == 1:
        assert skipped.message == case.message
    assert skipped.location == line_of(case.marker or code)
    assert skipped.module == case.module

    expected = outputs_and_gradients(model, model, x)
    if case.device != "meta":
        torch.testing.assert_close(got, expected)


def test_the_positive_is_fused() -> None:
    """What every negative above is one statement away from."""
    model, report = Plain(), FusionReport()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, Options()))
        return gm.forward

    x = torch.randn(T, H)
    got = outputs_and_gradients(torch.compile(model, fullgraph=True, backend=backend), model, x)
    assert (len(report.fused), report.skipped) == (1, []), str(report)
    assert report.fused[0].location == line_of("plain")
    torch.testing.assert_close(got, outputs_and_gradients(model, model, x))


def test_every_message_is_filled_in() -> None:
    """No placeholder of a template survives into what a user reads."""
    assert [code for code, case in CASES.items() if "{" in case.message.replace("{number}", "")] == []


def test_strict_raises_what_the_report_says() -> None:
    """`strict` turns a refusal into an error whose text names code, message and line."""
    with pytest.raises(FusionError, match=r"rows\.py:\d+ +random: `randn_like` draws random numbers") as caught:
        torch.compile(Random(), backend="moefuse", fullgraph=True, options={"strict": True})(torch.randn(T, H))
    assert line_of("random").rpartition("/")[2] in str(caught.value)


class Block(nn.Module):
    """A layer as it stands in a model."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), mlp

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Stack(nn.Module):
    """Layers after one another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_scores_that_relu_leaves() -> None:
    """Those are above a number, too: zero."""
    report = FusionReport()
    compiled(AboveZero(), Options(), report, captured=True)(torch.randn(T, H))
    assert [(s.code, s.message) for s in report.skipped] == [("threshold", CASES["threshold"].message)]


@pytest.mark.parametrize("wrap", [Block, lambda layer: layer], ids=["residual", "bare"])
def test_a_refused_layer_does_not_stop_another(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Refusals are per region: a model with odd layers still gets the others, and hears about each odd one."""
    model = Stack(*(wrap(layer) for layer in (NotRowLocal(), Plain(), Random(), MissingExperts(), Plain())))
    report = FusionReport()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, Options()))
        return gm.forward

    x = torch.randn(T, H)
    got = outputs_and_gradients(torch.compile(model, fullgraph=True, backend=backend), model, x)
    assert {s.code for s in report.skipped} == {"not-row-local", "random", "missing-experts"}
    assert len(report.skipped) == 3, str(report)
    assert [f.module.removesuffix(".mlp") for f in report.fused] == ["layers.1", "layers.4"]
    torch.testing.assert_close(got, outputs_and_gradients(model, model, x))


def test_the_codes_are_those_of_the_package() -> None:
    assert set(CASES) == set(CODES)
