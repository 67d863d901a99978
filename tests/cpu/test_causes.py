"""Where nothing is fused, the text names what stopped it: not the first break that Dynamo met, but the one in the way of the experts."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import _torch_private
from moefuse.diagnosis.missed_layers import missing
from moefuse.report.report import FusionReport
from tests.cpu.test_nothing_found import compiled, messages

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

E, K, H, I, T = 3, 2, 16, 24, 12  # noqa: E741  (the letters of moefuse.spec)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), nn.ModuleList(expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            rows = expert(x[tok])
            out.index_add_(0, tok, rows * weights[tok, slot, None])
        return out


class Block(nn.Module):
    """A layer with something in front of it, so that a graph is there when it breaks."""

    def __init__(self, moe: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), MoE() if moe is None else moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the line of a function that has a text in it."""
    import inspect

    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


class Breaking(Expert):
    """As an adapter of a library that Dynamo cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_break_inside_an_expert_is_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    """Not the loop around it, where the graph breaks when it is traced again."""
    model, x = compiled(lambda: Block(MoE(Breaking))), torch.randn(T, H)
    torch.testing.assert_close(model(x), model.forward(x))
    (text,) = messages(caplog)
    assert f"test_causes.py:{line_of(MoE.forward, 'rows = expert')} in mlp was not fused (nothing-found)" in text
    assert "graph_break()" in text
    assert f"test_causes.py:{line_of(Breaking.forward, 'graph_break')}" in text
    assert "Dynamic shape operator" not in text


class Recording(Block):
    """Router scores for an auxiliary loss, collected by a hook, and the layer checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        self.mlp.router.register_forward_hook(lambda _module, _args, out: self.scores.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.scores.clear()
        out = checkpoint(super().forward, x, use_reentrant=False)
        return out + torch.stack(self.scores[:1]).mean()


def test_torchs_hint_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    """Where Dynamo knows the setting that helps, so does the reader; and with it the layer is fused."""
    x = torch.randn(T, H)
    compiled(Recording)(x)
    (text,) = messages(caplog)
    assert "skip_fwd_side_effects_in_bwd_under_checkpoint = True" in text
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        model = compiled(Recording)
        torch.testing.assert_close(model(x), model.forward(x))
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1


class Hooked(Block):
    """A checkpoint that Dynamo leaves to eager, before there is any graph."""

    def run(self, x: Tensor) -> Tensor:
        return super().forward(x + int(gc.isenabled()))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_call_of_which_dynamo_made_no_graph_speaks(caplog: pytest.LogCaptureFixture) -> None:
    model, x = compiled(Hooked), torch.randn(T, H)
    torch.testing.assert_close(model(x), model.forward(x))
    (text,) = messages(caplog)
    assert "nothing-found" in text
    place = f"{__file__}:{line_of(Hooked.run, 'isenabled')}"
    assert re.search(rf"the graph breaks in what is around it \([^()]+ at {re.escape(place)}\), and all of that runs in eager", text), text


class PackedExpert(Expert):
    """Two numbers in each byte, as bitsandbytes holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight = nn.Parameter(torch.zeros(I * H // 2, 1, dtype=torch.uint8), requires_grad=False)


def test_packed_weights_are_the_cause() -> None:
    (skipped,) = missing(FusionReport(graph_count=1, opaque=["an operator"]), (MoE(PackedExpert),), moefuse.Options())
    assert (skipped.code, "expert weights are held as uint8: no graph has their products" in skipped.message) == ("encoding-unknown", True)


def test_a_subclass_of_a_library_is_named() -> None:
    """As torchao holds weights that are quantised together with their inputs."""

    class Encoded(Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return [], None

    model = MoE()
    model.experts[0].up.weight = nn.Parameter(model.experts[0].up.weight.detach().as_subclass(Encoded))
    (skipped,) = missing(FusionReport(graph_count=1), (model,), moefuse.Options())
    assert (skipped.code, "they are held as `Encoded`, and no graph" in skipped.message) == ("quantised", True)


class Simulated(Expert):
    """Weights in float32, rounded to few bits in each call, in a way that Dynamo cannot trace, as compressed-tensors does it."""

    def weight_of(self, linear: nn.Linear) -> Tensor:
        return (linear.weight / 0.01).clamp(-8, 7).round() * 0.01

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.weight_of(self.up), self.weight_of(self.down)
        torch._dynamo.graph_break()
        return F.linear(F.silu(F.linear(x, up)), down)


class Eight(Simulated):
    """The same to eight bits, by a cast."""

    def weight_of(self, linear: nn.Linear) -> Tensor:
        return linear.weight.to(torch.float8_e4m3fn).float()


class RoundedRows(Expert):
    """Rows are rounded, and weights as they are: what is in the way is the break alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x / 0.01).round() * 0.01
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize(("expert", "by"), [(Simulated, "round"), (Eight, "to"), (RoundedRows, "")])
def test_weights_that_are_rounded_in_each_call(expert: type[Expert], by: str) -> None:
    """Said with the operation that rounds them and its line, and the line where the graph breaks, in the expert itself."""
    model, x = compiled(lambda: Block(MoE(expert))), torch.randn(T, H)
    torch.testing.assert_close(model(x), model.forward(x))
    report = moefuse.last_report()
    assert report is not None
    (found,) = report.skipped
    if not by:
        assert found.code == "nothing-found"
        return
    assert (found.code, found.module) == ("encoding-unknown", "mlp")
    assert found.location == f"{__file__}:{line_of(Simulated.forward, 'graph_break')}"
    assert f"held as float32: the program rounds them in each call (`{by}` at {__file__}:{_rounds(expert)})" in found.message
    assert "and the graph breaks where they are multiplied" in found.message


def _rounds(expert: Any) -> int:
    return line_of(expert.weight_of, "return")


class Selected(Block):
    """Experts on the tokens of one kind, whose number only the run knows."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = kind[:, None].expand(-1, H)
        out[mask] = self.mlp(x[mask].view(-1, H)).flatten()
        return out


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_fused_behind_a_break_is_not_refused_before_it(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, x, kind = compiled(Selected, strict=strict), torch.randn(T, H), torch.arange(T) % 3 > 0
    with torch.no_grad():
        torch.testing.assert_close(model(x, kind), model.forward(x, kind))
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped, messages(caplog)) == (1, [], [])


class TwoWays(nn.Module):
    """As an adapter that is merged: afterwards another method runs the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.merged = MoE(), False

    def apart(self, x: Tensor) -> Tensor:
        return self.mlp(x) * 1.0  # type: ignore[no-any-return]

    def together(self, x: Tensor) -> Tensor:
        return self.mlp(x) + 0.0  # type: ignore[no-any-return]

    @torch._dynamo.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.together(x) if self.merged else self.apart(x)


def test_a_layer_that_two_frames_run_is_expected_once() -> None:
    model, x = compiled(TwoWays, expect=1), torch.randn(T, H)
    model(x)
    model.merged = True
    torch.testing.assert_close(model(x), model.forward(x))


class Checked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        torch._check_tensor_all(mask)
        return super().forward(x)


class CheckedAfterwards(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = super().forward(x)
        torch._check_tensor_all(mask)
        return out + 1


class CheckedBesideALoop(MoE):
    """Beside a loop whose experts without tokens are skipped, so that what is dead of it is erased."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        torch._check_tensor_all(mask)
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.usefixtures("no_code")
def test_a_check_of_a_tensor_beside_a_captured_loop() -> None:
    """Whatever becomes of the loop, the check stops the program."""
    model, x, mask = compiled(CheckedBesideALoop), torch.randn(T, H), torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(model(x, mask), model.forward(x, mask))
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        model(x, ~mask)


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("make", [Checked, CheckedAfterwards])
def test_a_check_of_a_tensor_breaks_the_graph_as_in_inductor(make: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    """Capture makes it traceable, and the compiler cannot take it: that is nothing to report to anyone as a bug of the backend."""
    dynamo = logging.getLogger("torch._dynamo")
    dynamo.addHandler(caplog.handler)
    try:
        model, x, mask = compiled(make), torch.randn(T, H), torch.ones(3, dtype=torch.bool)
        torch.testing.assert_close(model(x, mask), model.forward(x, mask))
    finally:
        dynamo.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if "ompiler" in r.getMessage()] == []
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        model(x, ~mask)


class Masked(MoE):
    """Every expert on every row: one graph."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))


@pytest.mark.parametrize("also_as_it_was", [True, False])
def test_a_compiler_that_fails_says_so_once(
    also_as_it_was: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where the graph compiles as it was is the rewrite to blame; else the break is torch's, as without moefuse."""

    def compile_front(gm: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        targets = {node.target for node in gm.graph.nodes}
        if torch.sinc in targets if also_as_it_was else any("moefuse" in str(target) for target in targets):
            raise DynamicOutputShapeException(torch.ops.aten.nonzero.default)
        return gm.forward

    monkeypatch.setattr(_torch_private, "compile_fx", compile_front)
    model, x = nn.Sequential(Block(Masked()), Sinc()), torch.randn(T, H)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="moefuse")(x), expected)
    blamed = [record for record in caplog.records if "the compiler fails on the graph that moefuse rewrote" in record.message]
    codes = [skipped.code for skipped in moefuse.last_report().skipped]
    assert (len(blamed), codes.count("internal-error")) == ((0, 0) if also_as_it_was else (1, 1))


def test_a_compiler_that_fails_on_what_only_moefuse_makes_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch from 2.14 on fails on `x + 0` in a checkpoint: such a loop is eager's then, and the report has the compiler's words."""

    def compile_front(gm: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        if any(
            "moefuse" in str(node.target) or "nonzero" in str(node.target)
            for m in gm.modules()
            for node in getattr(m, "graph", gm.graph).nodes
        ):
            raise AssertionError("Node sum_6 was invalid, but is output\nand more")
        return gm.forward

    monkeypatch.setattr(_torch_private, "compile_fx", compile_front)
    model, x = Checkpointed(), torch.randn(T, H)
    torch.testing.assert_close(torch.compile(model, backend="moefuse")(x), model(x))
    (skipped,) = moefuse.last_report().skipped
    assert skipped.code == "not-captured"
    assert "the compiler cannot take the graph (AssertionError: Node sum_6 was invalid, but is output)" in skipped.message


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Sinc(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(x)
