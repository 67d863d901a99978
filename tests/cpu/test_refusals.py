"""One negative program for every refusal code: the code, the whole message, the user's line, and results equal to eager.

The programs are written as users write them. The statement that a refusal must name is marked with a comment ``# at: <case>``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from moefuse import FusionError, Options, pipeline
from moefuse.capture import entry
from moefuse.errors import CODES
from moefuse.report import FusionReport

T, H, I, E, K = 10, 8, 12, 4, 2  # noqa: E741  (the letters of moefuse.spec)


class Layer(nn.Module):
    """The parts of a small mixture-of-experts layer; each program below writes its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w_in = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
        self.w_out = nn.Parameter(torch.randn(E, H, I) * I**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        return ids, weights

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])


class Plain(Layer):
    """The positive that every negative is one statement away from."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok]) * weights[tok, slot, None]
            out.index_add_(0, tok, y)  # at: plain
        return out


class NoRule(Layer):
    """An operation that no transfer rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = torch.digamma(self.expert(e, x[tok]).abs() + 1)  # at: no-rule
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class NotRowLocal(Layer):
    """Batch statistics of the rows that were routed to one expert."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y = y - y.mean(dim=0)  # at: not-row-local
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Random(Layer):
    """Dropout inside the experts, in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = F.dropout(self.expert(e, x[tok]), 0.25, training=self.training)  # at: random
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Hook(Layer):
    """A gradient hook on what the experts computed."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 0.5)  # at: hook
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class ValueEscapes(Layer):
    """An auxiliary loss on the size of what the experts computed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = self.route(x)
        out, penalty = torch.zeros_like(x), x.new_zeros(())
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            out.index_add_(0, tok, y * weights[tok, slot, None])
            penalty = penalty + y.square().sum()  # at: value-escapes
        return out, penalty


class Mutation(Layer):
    """The tokens are changed while the loop over experts still reads them."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        h = x * 1.0
        out = torch.zeros_like(h)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, h[tok]) * weights[tok, slot, None])
            h.mul_(0.5)  # at: mutation
        return out


class Alias(Layer):
    """The experts' rows are scaled through a view, and read again under their own name."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y[:, : H // 2].mul_(0.5)  # at: alias
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class ExpertsDiffer(Layer):
    """One expert has another activation."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        act = F.gelu if e == 2 else F.silu
        return F.linear(act(gate) * up, self.w_out[e])

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])  # at: experts-differ
        return out


class MissingExperts(Layer):
    """The last expert is left out (an off-by-one, or a zero expert)."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E - 1):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])  # at: missing-experts
        return out


class IdsNotDistinct(Layer):
    """Ids from hashing may repeat for one token, and the rows are assigned, not added."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        ids = ids // 2
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out[tok] += self.expert(e, x[tok]) * weights[tok, slot, None]  # at: ids-not-distinct
        return out


class NotWeighted(Layer):
    """The bias of an expert is added for every token, chosen or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(E, H))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            w = (weights * (ids == e)).sum(-1, keepdim=True)
            out = out + (self.expert(e, x) * w + self.bias[e])  # at: not-weighted
        return out


class NotCombined(Layer):
    """The experts' rows are returned side by side, and no token is ever summed."""

    def forward(self, x: Tensor) -> Tensor:
        ids, _weights = self.route(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.w_in[ids]).chunk(2, dim=-1)
        return torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w_out[ids])  # at: not-combined


class TokensDiffer(Layer):
    """The rows are token by token, their weights slot by slot."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        rows = x.repeat_interleave(K, dim=0)
        flat = ids.reshape(-1)
        gate, up = torch.bmm(self.w_in[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        y = torch.bmm(self.w_out[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        scale = weights.t().reshape(-1, 1)
        y = y * scale  # at: tokens-differ
        return y.view(T, K, H).sum(dim=1)


class NotCaptured(Layer):
    """The loop over experts with tokens counts them."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out, active = torch.zeros_like(x), 0
        for e in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero():  # at: not-captured
            tok, slot = torch.where(ids == e[0])
            out.index_add_(0, tok, self.expert(e[0], x[tok]) * weights[tok, slot, None])  # type: ignore[arg-type]
            active += 1
        return out / active


class Autocast(Layer):
    """float32 weights under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            ids, weights = self.route(x)
            out = torch.zeros_like(x)
            for e in range(E):
                tok, slot = torch.where(ids == e)
                y = self.expert(e, x[tok]) * weights[tok, slot, None]
                out.index_add_(0, tok, y.to(out.dtype))  # at: dtype-unsupported
        return out


class Batched(Layer):
    """Gathered weights: no shape depends on the routing, so it also runs on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.w_in[ids]).chunk(2, dim=-1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w_out[ids])
        return (y * weights[..., None]).sum(dim=1)  # at: device-unsupported


class ContextDiffers(Layer):
    """The experts are frozen by no_grad, their weighted sum is not."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            with torch.no_grad():
                y = F.linear(F.silu(F.linear(x[tok], self.w_in[e, :I])), self.w_out[e])  # at: context-differs
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class NotLowered(Layer):
    """One number per expert as its bias, which torch broadcasts over the features and the op does not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(E, 1))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok]) + self.bias[e]
            out.index_add_(0, tok, y * weights[tok, slot, None])  # at: not-lowered
        return out


class Model(nn.Module):
    """A layer inside a model, so that it has a module path."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Teacher(Plain):
    """A layer that is only evaluated, inside a program that is trained: times are of the forward op alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return x + y


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
    from moefuse.passes.lower import Lowering

    original = Lowering.slot_weights
    patch.setattr(Lowering, "slot_weights", lambda self, weight: self.emit(change, original(self, weight)))


def wrong_lowering(patch: pytest.MonkeyPatch) -> None:
    """A bug: the routing weights arrive at the op in the wrong order of slots."""
    after_slot_weights(patch, lambda weights: weights.flip(-1))


def crashing_lowering(patch: pytest.MonkeyPatch) -> None:
    """A bug: something type-checks and cannot run."""

    def change(weights: Tensor) -> Tensor:
        if isinstance(weights, torch._subclasses.FakeTensor):
            return weights.clone()
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    after_slot_weights(patch, change)


def measured_slower(patch: pytest.MonkeyPatch) -> None:
    """A measurement of this very program, in which it is the faster one."""
    from moefuse.passes import gate
    from moefuse.tuning.entries import Pair

    patch.setattr(gate, "device_name", lambda device: "a device")
    patch.setattr(gate.store, "comparison", lambda device, problem, program: Pair(20.0, 30.0, problem.tokens))


def raising_rule(patch: pytest.MonkeyPatch) -> None:
    """A bug in a transfer rule."""
    from moefuse.passes.rules import RULES

    def on_index_add(*_: Any) -> None:
        raise KeyError("a bug")  # at: internal-error

    patch.setitem(RULES, "index_add", on_index_add)


CASES: dict[str, Case] = {
    "no-rule": Case(NoRule, "expert rows go through `digamma`, which has no rule: what it computes per row is unknown"),
    "not-row-local": Case(NotRowLocal, "`mean` mixes the rows of an expert, so its result depends on which other tokens were routed there"),
    "random": Case(Random, "`dropout` draws random numbers inside the expert"),
    "hook": Case(Hook, "a hook observes a value inside the experts"),
    "value-escapes": Case(ValueEscapes, "`y`, a value inside the experts, is also used outside them"),
    "mutation": Case(Mutation, "`h` is changed in place while the experts use it"),
    "alias": Case(Alias, "`y` is changed in place through a view that is read again"),
    "experts-differ": Case(ExpertsDiffer, "expert 2 differs from expert 0: operation gelu instead of silu"),
    "missing-experts": Case(MissingExperts, "only experts 0..2 are computed, of 4"),
    "ids-not-distinct": Case(
        IdsNotDistinct, "a repeated expert id for one token would count once here; ids that do not come from top-k can repeat"
    ),
    "not-weighted": Case(NotWeighted, "expert outputs reach the sum without the mask or routing weight that selects them"),
    "not-combined": Case(NotCombined, "expert rows never reach a sum over the chosen experts of a token"),
    "tokens-differ": Case(
        TokensDiffer, "the experts' input rows do not line up with the expert ids: `scale` is not a value per row of the same experts"
    ),
    "dtype-unsupported": Case(
        Autocast, "dtype bfloat16 from float32 weights is not supported by the fused op (autocast inside the experts)"
    ),
    "device-unsupported": Case(Batched, "the fused op does not run on meta: it has no kernel there", device="meta"),
    "not-captured": Case(
        NotCaptured,
        "this loop depends on data, and `active` is read after it, and has another value if it does not run; "
        "the graph breaks here as it would without moefuse",
        captured=True,
    ),
    "excluded": Case(Model, "the module path matches options['exclude']", options=Options(exclude=r"^mlp$"), marker="plain", module="mlp"),
    "limit": Case(Plain, "options['max_rewrites'] regions were fused already", options=Options(max_rewrites=0), marker="plain"),
    "context-differs": Case(ContextDiffers, "the experts run under another grad mode or autocast than their sum"),
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
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# at: {marker}")]
    return f"{__file__}:{number}"


def compiled(model: nn.Module, options: Options, report: FusionReport, *, captured: bool = False) -> Callable[..., Any]:
    """The model with moefuse's passes and eager execution of what they leave."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(pipeline.rewrite(gm, example_inputs, options, entry.frame()))
        assert not any("moefuse" in str(node.target) for node in gm.graph.nodes), gm.graph
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
        report.extend(pipeline.rewrite(gm, example_inputs, Options()))
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
    with pytest.raises(FusionError, match=r"test_refusals\.py:\d+ +random: `dropout` draws random numbers") as caught:
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


@pytest.mark.parametrize("wrap", [Block, lambda layer: layer], ids=["residual", "bare"])
def test_a_refused_layer_does_not_stop_another(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Refusals are per region: a model with odd layers still gets the others, and hears about each odd one."""
    model = Stack(*(wrap(layer) for layer in (NotRowLocal(), Plain(), Random(), MissingExperts(), Plain())))
    report = FusionReport()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(pipeline.rewrite(gm, example_inputs, Options()))
        return gm.forward

    x = torch.randn(T, H)
    got = outputs_and_gradients(torch.compile(model, fullgraph=True, backend=backend), model, x)
    assert {s.code for s in report.skipped} == {"not-row-local", "random", "missing-experts"}
    assert len(report.skipped) == 3, str(report)
    assert [f.module.removesuffix(".mlp") for f in report.fused] == ["layers.1", "layers.4"]
    torch.testing.assert_close(got, outputs_and_gradients(model, model, x))


def test_the_codes_are_those_of_the_package() -> None:
    assert set(CASES) == set(CODES)
