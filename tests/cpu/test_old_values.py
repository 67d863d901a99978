"""Gradients of what an input held before the layer wrote to it: counters and steps that routing weights are computed of.

AOTAutograd computes such weights again of what the input holds by then. The program breaks its graphs at the loop, and has right gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefuse.report.report import FusionReport
from tests.cpu.capture_case import Seen, call, capturing, same

E, H, T = 4, 8, 9


class Layer(nn.Module):
    usage: Tensor
    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.SiLU(), nn.Linear(H, H)) for _ in range(E))
        self.register_buffer("usage", torch.ones(E))
        self.register_buffer("step", torch.zeros(()))

    def before(self, logits: Tensor) -> Tensor:
        return logits

    def weigh(self, weights: Tensor, ids: Tensor) -> Tensor:
        return weights

    def count(self, e: int, rows: int) -> None:
        pass

    def after(self) -> None:
        pass

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = self.before(logits).softmax(-1).topk(2)
        weights, out = self.weigh(weights, ids), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            self.count(e, tok.numel())
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        self.after()
        return out


class Scaled(Layer):
    def weigh(self, weights: Tensor, ids: Tensor) -> Tensor:
        return weights * (1 + self.usage[ids])

    def count(self, e: int, rows: int) -> None:
        self.usage[e] += rows


class Averaged(Layer):
    """Written to without gradients, behind the loop."""

    def before(self, logits: Tensor) -> Tensor:
        self.counts = torch.zeros(E)
        return logits / (self.usage / self.usage.sum() + 0.1)

    def count(self, e: int, rows: int) -> None:
        self.counts[e] = rows

    def after(self) -> None:
        with torch.no_grad():
            self.usage.mul_(0.5).add_(self.counts, alpha=0.5)


class Annealed(Layer):
    """Written to in front of what reads it."""

    def before(self, logits: Tensor) -> Tensor:
        self.step += 1
        return logits / (1 / (1 + self.step) + 0.5)


class Warmed(Annealed):
    def before(self, logits: Tensor) -> Tensor:
        return logits

    def weigh(self, weights: Tensor, ids: Tensor) -> Tensor:
        self.step += 1
        return weights * (1 - 0.5**self.step)


class Counted(Layer):
    """Nothing that has gradients reads the counter: it is no copy's."""

    def count(self, e: int, rows: int) -> None:
        self.usage[e] += rows


class Normed(Layer):
    """A norm updates statistics, of which nothing is computed in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(E)

    def before(self, logits: Tensor) -> Tensor:
        out: Tensor = self.norm(logits)
        return out


class Shared(Scaled):
    """The counter is a part of another buffer, which a copy of it would be none of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, E))
        self.usage = self.table[1]  # type: ignore[index]

    def after(self) -> None:
        self.table.add_(1)  # type: ignore[operator]


def trained(model: nn.Module, calls: int = 2) -> tuple[FusionReport, list[torch.fx.GraphModule]]:
    """The report of some calls that were as eager's, and the graphs."""
    torch.manual_seed(0)
    seen = Seen()
    compiled = torch.compile(model, backend=capturing(seen, behind="aot_eager_decomp_partition"))
    for _ in range(calls):
        x, logits = torch.randn(T, H), torch.randn(T, E)
        buffers = [b.clone() for b in model.buffers()]
        expected = call(model, model, x, logits, grad=True)
        later = [b.clone() for b in model.buffers()]
        with torch.no_grad():
            for b, old in zip(model.buffers(), buffers, strict=True):
                b.copy_(old)
        same(call(compiled, model, x, logits, grad=True), expected)
        for b, new in zip(model.buffers(), later, strict=True):
            torch.testing.assert_close(b, new)
    return seen.report, seen.graphs


def copies(graphs: list[torch.fx.GraphModule]) -> int:
    return sum(n.target is torch.ops.moefuse.own.default for gm in graphs for n in gm.graph.nodes)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", [Scaled, Averaged, Annealed, Warmed], ids=lambda k: k.__name__)
def test_gradients_are_of_what_was_read(kind: Callable[[], Layer]) -> None:
    report, graphs = trained(kind())
    assert (len(report.fused), report.skipped, copies(graphs)) == (1, [], 2), "of the tokens, and of what is written to"


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", [Counted, Normed], ids=lambda k: k.__name__)
def test_what_nothing_reads_is_not_copied(kind: Callable[[], Layer]) -> None:
    report, graphs = trained(kind())
    assert (len(report.fused), copies(graphs)) == (1, 1)


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_others_see_is_no_copy() -> None:
    """Such a layer stays as it was, and so do its gradients."""
    report, _graphs = trained(Shared())
    assert report.fused == []
    assert {s.code for s in report.skipped} <= {"mutation", "overlap", "not-captured"}
