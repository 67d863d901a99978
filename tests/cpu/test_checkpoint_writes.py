"""Bodies of checkpoints that write to what the call has made: one graph where nobody can tell that backward does not write again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import _torch_private
from moefuse.capture.dynamo import points

pytestmark = pytest.mark.skipif(not points.has("checkpoints"), reason="this torch breaks graphs at all of them")

H, E, K = 8, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, 6, H) * 0.3), nn.Parameter(torch.randn(E, H, 6) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, ids = logits.softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + F.linear(F.silu(F.linear(x, self.up[e])), self.down[e]) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out, logits


class Looped(Layer):
    """Rows of each expert are selected, so that only capture makes a graph of the body."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, ids = logits.softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, F.linear(F.silu(F.linear(x[token], self.up[e])), self.down[e]) * weights[token, slot, None])
        return out, logits


class Model(nn.Module):
    """Layers in checkpoints, whose router logits go into a loss. ``reentrant``: of the checkpoints."""

    reentrant, layer = False, Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.kept: Any = None
        self.calls = 0

    def collect(self, logits: list[Tensor], one: Tensor) -> None:
        logits.append(one)

    def body(self, layer: Layer, x: Tensor, logits: list[Tensor]) -> Tensor:
        out, one = layer(x)
        self.collect(logits, one)
        return x + out

    def forward(self, x: Tensor) -> Any:
        logits: list[Tensor] = []
        for layer in self.layers:
            x = checkpoint(self.body, layer, x, logits, use_reentrant=self.reentrant)
        return self.result(x, logits)

    def result(self, x: Tensor, logits: list[Tensor]) -> Any:
        return x, sum(one.logsumexp(-1).square().mean() for one in logits)


class Loops(Model):
    layer = Looped


class Mapped(Model):
    """A dict of lists, and an object's attribute, as transformers collects."""

    def collect(self, logits: list[Tensor], one: Tensor) -> None:
        self.book["logits"].append(one)
        self.box.last = one

    def forward(self, x: Tensor) -> Any:
        self.book: dict[str, list[Tensor]] = {"logits": []}
        self.box = Box()
        for layer in self.layers:
            x = checkpoint(self.body, layer, x, [], use_reentrant=False)
        book, box, self.book, self.box = self.book, self.box, {}, Box()
        return x, sum(one.logsumexp(-1).square().mean() for one in book["logits"]) + box.last.mean()


class Box:
    last: Tensor


class Returned(Model):
    """Eager adds to the list in backward again, for all to see."""

    def result(self, x: Tensor, logits: list[Tensor]) -> Any:
        return x, sum(one.logsumexp(-1).square().mean() for one in logits), logits


class Stored(Returned):
    def result(self, x: Tensor, logits: list[Tensor]) -> Any:
        self.kept = {"logits": logits}
        return super().result(x, logits)[:2]


class Closed(Returned):
    """A function that is returned holds the list."""

    def result(self, x: Tensor, logits: list[Tensor]) -> Any:
        return *super().result(x, logits)[:2], lambda: len(logits)


class Counted(Model):
    """What is older than the call counts in eager what backward runs again."""

    def collect(self, logits: list[Tensor], one: Tensor) -> None:
        self.calls += 1


class Broken(Model):
    """A graph that ends while the list is in use."""

    def result(self, x: Tensor, logits: list[Tensor]) -> Any:
        torch._dynamo.graph_break()
        return super().result(x, logits)


class Reentrant(Model):
    """In eager what is collected has no gradient."""

    reentrant = True


class Nested(Model):
    """A checkpoint in a checkpoint."""

    def body(self, layer: Layer, x: Tensor, logits: list[Tensor]) -> Tensor:
        inner: Tensor = checkpoint(super().body, layer, x, logits, use_reentrant=False)
        return inner


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """AOTAutograd without code generation."""
    torch.manual_seed(0)
    aot = aot_autograd(fw_compiler=lambda graph, _: graph)
    monkeypatch.setattr(_torch_private, "compile_fx", lambda gm, inputs, *_, **__: aot(gm, inputs))


def step(model: Model, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Outputs and gradients of one step."""
    out, loss, *_ = run(x)
    (out.square().sum() + loss).backward()
    return [out, loss, *(p.grad for p in model.parameters() if p.grad is not None)]


def compared(model: Model) -> moefuse.FusionReport:
    other, x = copy.deepcopy(model), torch.randn(7, H, requires_grad=True)
    found = step(model, torch.compile(model, backend="moefuse"), x)
    wanted = step(other, other, x.detach().requires_grad_())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    assert model.calls == other.calls
    if model.kept is not None:
        assert len(model.kept["logits"]) == len(other.kept["logits"])
    report = moefuse.last_report()
    assert report is not None
    return report


@pytest.mark.code_once
@pytest.mark.parametrize("kind", [Model, Loops, Mapped])
def test_one_graph(kind: type[Model]) -> None:
    """Outputs and gradients of eager, of the router's loss as well."""
    report = compared(kind())
    assert (report.layers[0], report.graph_count, report.graph_breaks) == (2, 1, [])


@pytest.mark.parametrize("kind", [Returned, Stored, Closed, Counted, Broken, Reentrant, Nested])
def test_left_as_it_was(kind: type[Model]) -> None:
    """What somebody could tell apart from eager breaks the graph as ever."""
    report = compared(kind())
    assert any("side effect" in text for text in [*report.graph_breaks, *(s.text for s in report.stops)])


@pytest.mark.parametrize("how", [{"backend": "moefuse", "options": {"capture": False}}, {"backend": "eager"}])
def test_switched_off(how: dict[str, Any]) -> None:
    """Without capture, and for other backends, Dynamo is as it is."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match="HOP: Unsafe side effect"):
        torch.compile(Model(), fullgraph=True, **how)(torch.randn(7, H, requires_grad=True))
