"""Statements around experts that change a sum, a buffer or a weight in place: they happen, whatever they are written through.

Each of these programs was silently wrong once: as its comment says, a statement was erased with the loop, or was not seen as a write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse import Options
from tests.cpu.beside_eager import E, H, K, MoE, check
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Adapter(MoE):
    """The shared path's adapter is added to the sum before the loop. B is zero at first, so that nothing shows while it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(torch.randn(H, 4)), nn.Parameter(torch.zeros(4, H))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        out.add_(x @ self.A @ self.B)
        return self.add_experts(out, x, weights, ids)


def test_an_adapter_that_is_zero_at_first() -> None:
    check(Adapter, lambda m: m.B.fill_(0.1))


class Scaled(MoE):
    """The residual in the sum is scaled by a parameter that is one at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = x.clone()
        out.mul_(self.scale)
        for e, expert in enumerate(self.experts):
            out.add_(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True))
        return out


def test_a_scale_that_is_one_at_first() -> None:
    check(Scaled, lambda m: m.scale.fill_(0.5))


class Shifted(MoE):
    """A vector is added to the sum before the loop."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((H,), value))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        out.add_(self.shift)
        return self.add_experts(out, x, weights, ids)


def test_an_equal_layer_that_adds_nothing_says_nothing_about_one_that_does() -> None:
    check(lambda: nn.Sequential(Shifted(0.0), Shifted(1.0)))


# --- writes through what does not look like a view ----------------------------------------------------------------------------------


class Table(MoE):
    """Every expert takes part a little: the table of weights is clamped in place, through something that shares its memory."""

    def __init__(self, clamp: Callable[[Tensor], object], detach: bool) -> None:
        super().__init__()
        self.clamp, self.detach = clamp, detach

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        table = torch.zeros(len(x), E).scatter(1, ids, weights.detach() if self.detach else weights)
        self.clamp(table)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * table[:, e : e + 1]
        return out


@pytest.mark.parametrize(
    "clamp",
    [
        lambda t: t.data.clamp_(min=0.05),
        lambda t: torch.atleast_2d(t).cpu().clamp_(min=0.05),
        lambda t: torch.as_strided(t, t.shape, t.stride()).clamp_(min=0.05),
        lambda t: t.hsplit(1)[0].clamp_(min=0.05),
        lambda t: torch.positive(t).clamp_(min=0.05),
        lambda t: torch.broadcast_to(t, t.shape).clamp_(min=0.05),
        lambda t: torch.as_tensor(t).clamp_(min=0.05),
    ],
    ids=["data", "cpu", "as_strided", "hsplit", "positive", "broadcast_to", "as_tensor"],
)
def test_a_table_that_is_written_through_a_view(clamp: Callable[[Tensor], object]) -> None:
    check(lambda: Table(clamp, detach=True))


def test_a_table_that_is_written_through_data_keeps_its_gradient() -> None:
    check(lambda: Table(lambda t: t.data.clamp_(min=0.05), detach=False))


class TokensFade(MoE):
    """What the next expert gets is less."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        x = x * 1
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
            x.data.mul_(0.9)
        return out


class IdsClamped(MoE):
    """Only two experts are left."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        ids.data.clamp_(max=1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


class WeightsClipped(MoE):
    """Weights are clipped behind their use: the call after this one sees them."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
            if self.training:
                expert[0].weight.data.clamp_(-0.1, 0.1)
        return out


@pytest.mark.parametrize("make", [TokensFade, IdsClamped, WeightsClipped])
def test_what_is_written_through_data(make: type[MoE]) -> None:
    check(make)


# --- updates of what outlives the call ----------------------------------------------------------------------------------------------


class Balanced(MoE):
    """Balancing without a loss: a bias of the choice, and two counts, updated in forward through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(E), requires_grad=False)
        self.register_buffer("ema", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(K).indices
        weights = scores.gather(1, ids)
        if self.training:
            with torch.no_grad():
                count = torch.bincount(ids.flatten(), minlength=E).float()
                self.bias.data.add_(0.01 * torch.sign(count.mean() - count))
                self.ema.data.mul_(0.9).add_(count, alpha=0.1)
                self.load.data[:] = count
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


class Normalised(MoE):
    """The router's rows are normalised and the experts' weights clipped, through ``.data``, before they are used."""

    def forward(self, x: Tensor) -> Tensor:
        self.gate.weight.data.copy_(F.normalize(self.gate.weight.data, dim=-1))
        for expert in self.experts:
            expert[0].weight.data.clamp_(-0.05, 0.05)
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@pytest.mark.parametrize("make", [Balanced, Normalised])
def test_updates_beside_a_loop_that_was_captured(make: type[MoE]) -> None:
    check(make, tokens=32)


# --- writes behind the experts to what only their gradient reads --------------------------------------------------------------------


class WrittenBehind(MoE):
    """Autograd saved the table, so that eager may change the weights afterwards. An op that was given the weights has saved those."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        table = torch.zeros(len(x), E).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * table[:, e : e + 1]
        self.write(weights)
        return out


@pytest.mark.parametrize("write", [lambda w: w.mul_(0.5), lambda w: torch._foreach_mul_([w], 0.5)], ids=["mul_", "foreach"])
def test_weights_that_are_written_behind_the_experts(write: Callable[[Tensor], object]) -> None:
    check(lambda: WrittenBehind(write))


class WrittenBehindABreak(MoE):
    """The same behind a graph break. Of views torch keeps no version counter there, so that gradients were wrong; of others it raised."""

    def __init__(self, route: Callable[[Tensor], tuple[Tensor, Tensor]], form: str) -> None:
        super().__init__()
        self.choose, self.form = route, form

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(self.gate(x).softmax(-1))
        table = torch.zeros(len(x), E).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = table[:, e : e + 1] if self.form == "table" else (weights * (ids == e)).sum(-1, keepdim=True)
            out = out + expert(x) * share
        shown = weights if self.form != "narrow" else weights.narrow(1, 0, 1)
        torch._dynamo.graph_break()
        with torch.no_grad():
            shown.mul_(0.5)
        return out


def _sorted(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = scores.sort(-1, descending=True)
    return weights[:, :K], ids[:, :K]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("form", ["table", "mask", "narrow"])
@pytest.mark.parametrize("route", [_sorted, lambda scores: scores.topk(K, -1)[:2]], ids=["a slice", "topk"])
def test_weights_that_are_written_behind_a_break(route: Callable[[Tensor], tuple[Tensor, Tensor]], form: str, backend: str) -> None:
    seen = check(lambda: WrittenBehindABreak(route, form), behind=backend)
    assert len(seen.report.fused) == 1, seen.report


# --- a sum that is cut by a statement on it -----------------------------------------------------------------------------------------


class CutSum(MoE):
    """Experts in front of the statement and behind it are sums of their own, which read some columns of the table that all share."""

    def __init__(self, cut: int) -> None:
        super().__init__()
        self.cut, self.A, self.B = cut, nn.Parameter(torch.randn(H, 4)), nn.Parameter(torch.randn(4, H))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        table = torch.zeros(len(x), E).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if e == self.cut:
                out.addmm_(x @ self.A, self.B)
            out = out + expert(x) * table[:, e : e + 1]
        return out


@pytest.mark.every_value
@pytest.mark.parametrize("verify", ["off", "probe"])
@pytest.mark.parametrize(("cut", "tokens"), [(1, 13), (2, 12), (3, 12), (5, 12)])
def test_some_columns_of_a_table(cut: int, tokens: int, verify: Literal["off", "probe"]) -> None:
    """The table was read as one of as many columns as there are experts in the sum; 12 tokens fit such a table of 2 or 3 columns."""
    check(lambda: CutSum(cut), tokens=tokens, options=Options(verify=verify))


def test_weights_that_the_caller_changes_behind_the_call() -> None:
    """They are an input of the graph; eager has kept what it gathered of them."""

    class Given(MoE):
        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return self.add_experts(torch.zeros_like(x), x, weights, ids)

    torch.manual_seed(0)
    model, seen, x = Given(), Seen(), torch.randn(9, H)
    weights, ids = model.route(x)
    gradients = []
    for run in (model, torch.compile(model, backend=capturing(seen, behind="aot_eager"))):
        model.zero_grad()
        given = weights.detach().clone()
        out = run(x, given, ids)
        given.mul_(2)
        out.square().sum().backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    assert len(seen.report.fused) == 1
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_a_copy_of_the_weights_that_the_caller_changes() -> None:
    """Kept for a log, then cleared. Inductor takes the copy away, and autograd found the weights changed that the op keeps."""

    class Logged(MoE):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.route(x)
            self.kept = weights.detach().clone()
            table = torch.zeros(len(x), E).scatter(1, ids, weights)
            return sum(expert(x) * table[:, e : e + 1] for e, expert in enumerate(self.experts))  # type: ignore[return-value]

    torch.manual_seed(0)
    model, seen, x = Logged(), Seen(), torch.randn(9, H)
    gradients = []
    for run in (model, torch.compile(model, backend=capturing(seen, behind="inductor"))):
        model.zero_grad()
        out = run(x)
        model.kept.zero_()
        out.square().sum().backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    assert len(seen.report.fused) == 1
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_a_view_by_an_operator_that_only_torchscript_has() -> None:
    """The dispatcher does not know it, which was an internal error. Here it copies."""

    class Written(MoE):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.route(x)
            torch.ops.aten._ncf_view.default(ids.t(), [-1], 0).clamp_(max=2)
            return self.add_experts(torch.zeros_like(x), x, weights, ids)

    seen = check(Written)
    assert "internal-error" not in {s.code for s in seen.report.skipped}


class WrittenBetween(MoE):
    """The first layer's sum is changed through a view before the second one reads it; dead code of captured loops goes."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            weights, ids = self.route(x)
            self.write(x.data)
            out = torch.zeros_like(x)
            for row in (ids[..., None] == torch.arange(E)).sum((0, 1)).nonzero():
                tok, slot = torch.where(ids == row[0])
                out.index_add_(0, tok, self.experts[row[0]](x[tok]) * weights[tok, slot, None])
            x = out
        self.write(x.detach())
        return x


@pytest.mark.parametrize("verify", ["off", "probe"])
@pytest.mark.parametrize(
    "write", [lambda x: x.mul_(2), lambda x: x.view(-1)[3:].zero_(), lambda x: x.unbind(0)[1].add_(1)], ids=["all", "some", "a row"]
)
def test_a_sum_that_is_written_through_a_view(write: Callable[[Tensor], object], verify: Literal["off", "probe"]) -> None:
    """The write went with the loop: the fused op's result was not seen behind the view."""
    torch.manual_seed(0)
    model, seen = WrittenBetween(write), Seen()
    x = torch.randn(9, H)
    with torch.no_grad():
        expected = model(x.clone())
        torch.testing.assert_close(torch.compile(model, backend=capturing(seen, Options(verify=verify)))(x.clone()), expected)
    assert len(seen.report.fused) == 2, seen.report
