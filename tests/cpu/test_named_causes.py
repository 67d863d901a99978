"""A layer has one reason, and it is the true one: what is lost of some experts, slots or masks is said, not that they are missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cpu.test_messages import WIDTH, E, H, K, Layer, T, told_of_a_graph
from tests.cpu.test_reasons import ran, run

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Loop(Layer):
    """A loop over experts in which one step is somebody else's: ``rows`` chooses an expert's tokens, ``share`` computes with them."""

    def __init__(self, rows: Callable[..., Tensor] | None = None, after: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.rows, self.after = rows or (lambda ids, e, *_: ids == e), after or (lambda y, *_: y)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(self.rows(ids, e, x, weights))
            y = self.after(expert(x[tok]) * weights[tok, slot, None], e)
            out.index_add_(0, tok, y)
        return out


class Slots(Layer):
    """Both choices of a token, each in a loop of its own; the second one's rows go through something else."""

    def __init__(self, second: Callable[[Tensor], Tensor], sums: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.second, self.sums = second, sums

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for k in range(K):
            part = torch.zeros_like(x) if k and self.sums else out
            for e, expert in enumerate(self.experts):
                tok = torch.where(ids[:, k] == e)[0]
                y = expert(x[tok])
                part.index_add_(0, tok, (self.second(y) if k else y) * weights[tok, k, None])
            out = out + self.sums(part) if k and self.sums else out
        return out


class Cut(Layer):
    """Some of one expert's tokens."""

    def share(self, out: Tensor, x: Tensor, expert: nn.Module, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        tok, w = (tok[:3], w[:3]) if e == 0 else (tok, w)
        out.index_add_(0, tok, expert(x[tok]) * w)
        return out


class Lone(Layer):
    """One of the experts that the router chooses from."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        tok, slot = torch.where(ids == 0)
        return torch.zeros_like(x).index_add_(0, tok, self.experts[0](x[tok]) * weights[tok, slot, None])


class Copied(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out.copy_(torch.where((ids == e)[:, None], expert(x), out))
        return out * weights[:, None]


class Logs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.full_like(x, float("-inf"))
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] = torch.logaddexp(out[tok], expert(x[tok]) + weights[tok, slot, None].log())
        return out


class LogSum(Layer):
    """A mixture of distributions, in logarithms: the logarithm of a weight of zero is -inf."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        each = torch.stack([F.log_softmax(expert(x), -1) for expert in self.experts], 1)
        gates = torch.full((len(x), E), float("-inf")).scatter(1, ids, weights.log())
        mixed = each + gates[..., None]
        return mixed.logsumexp(1)


class Stacked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(E, H, WIDTH)), nn.Parameter(torch.randn(E, WIDTH, H))


class ByWeight(Stacked):
    """Slots sorted by their weights: neither by expert nor back."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = weights.flatten().argsort()
        tok, e = order // K, ids.flatten()[order]
        h = F.gelu(torch.bmm(x[tok, None], self.a[e]))
        return torch.zeros_like(x).index_add(0, tok, torch.bmm(h, self.b[e]).squeeze(1) * weights.flatten()[order, None])


class Places(Stacked):
    """Places by a product of three dimensions and two, with a queue along slots and tokens (nanoMoE)."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).topk(K)
        table = torch.full((len(x), E), float("-inf")).scatter(-1, ids, scores).softmax(-1)
        mask = F.one_hot(ids, E).permute(1, 0, 2)
        rank = (mask.reshape(-1, E).cumsum(0) - 1).reshape(K, -1, E)
        mask = mask * (rank < 3)
        places = F.one_hot((mask * rank).sum(-1), 3)
        table = ((mask * table).unsqueeze(3) * places.unsqueeze(2)).sum(0)
        rows = table.bool().permute(1, 2, 0).type_as(x) @ x
        return table.view(len(x), -1) @ torch.bmm(F.gelu(torch.bmm(rows, self.a)), self.b).view(-1, H)


class Queue(Stacked):
    """Places as one-hot rows of a clamped queue, which look like ids."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        chosen = F.one_hot(ids, E).float()
        at = chosen.sum(1).cumsum(0) - 1
        places = F.one_hot(at.clamp(0, 2).long(), 3) * ((at < 3) & (chosen.sum(1) > 0))[..., None]
        rows = torch.einsum("tec,th->ech", places.float(), x)
        y = torch.einsum("eci,eih->ech", F.gelu(torch.einsum("ech,ehi->eci", rows, self.a)), self.b)
        return torch.einsum("tec,ech->th", places * (chosen * weights[..., None]).sum(1)[..., None], y)


class Convolved(Layer):
    """Outputs of convolutions, of which those that were chosen are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Conv1d(H, H, 1) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.stack([expert(x[:, :, None])[..., 0] for expert in self.experts], 1)
        return (y.gather(1, ids[:, :, None].expand(-1, -1, H)) * weights[:, :, None]).sum(1)


REFUSED: dict[str, tuple[Callable[[], Layer], str, str]] = {
    "tokens of one expert cut": (Cut, "capacity", "`tok` is some of the tokens that chose an expert"),
    "gradients of one expert cut": (lambda: Loop(after=lambda y, e: y if e else y.detach()), "no-rule", "`detach`: gradients end there"),
    "gradients of one slot cut": (lambda: Slots(Tensor.detach), "no-rule", "`detach`: gradients end there"),
    "one slot's rows turned around": (lambda: Slots(lambda y: y.flip(0)), "no-rule", "`flip`"),
    "one slot's sum changed": (lambda: Slots(lambda y: y, torch.tanh), "sum-changed", "goes through `tanh` before"),
    "a sum copied": (Copied, "sum-changed", "goes through `copy` before"),
    "another comparison": (lambda: Loop(lambda ids, e, *_: ids <= e if e == 0 else ids == e), "tokens-differ", "by which rows"),
    "the others of one expert": (lambda: Loop(lambda ids, e, *_: ids != e if e == 1 else ids == e), "tokens-differ", "by which rows"),
    "another one's tokens": (
        lambda: Loop(lambda ids, e, *_: ids == (2 if e == 1 else e)),
        "missing-experts", "several experts run on the tokens that chose expert 2, and none on those that chose expert 1",
    ),
    "a mask for one expert": (
        lambda: Loop(lambda ids, e, x, _: (ids == e) & (x[:, :1] > 0) if e == 2 else ids == e),
        "tokens-differ", "expert 2 takes its tokens by another mask than the others, where",
    ),
    "a mask for each expert": (
        lambda: Loop(lambda ids, e, _, w: (ids == e) & (w > 0.1 * e)),
        "tokens-differ", "expert 1 takes its tokens by another mask than the first one, where",
    ),
    "one of several": (Lone, "missing-experts", "only expert 0 is computed, of 4"),
    "in logarithms": (Logs, "not-combined", "reach what the other experts computed by `logaddexp`, and only sums are fused"),
    "in logarithms, together": (LogSum, "not-combined", "reach what the other experts computed by `logsumexp`, and only sums are fused"),
    "sorted by weight": (ByWeight, "tokens-differ", "rows are added where `tok`"),
    "places by a product": (Places, "capacity", "`matmul` puts them into a fixed number of places"),
    "places like ids": (Queue, "capacity", "`einsum` puts them into a fixed number of places"),
    "gathered convolutions": (Convolved, "not-recognised", "it cannot follow `conv1d`"),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REFUSED)
def test_one_reason_and_the_true_one(name: str) -> None:
    torch.manual_seed(0)
    build, code, text = REFUSED[name]
    layer, x = build().eval(), torch.randn(T, H)
    report, _ = ran(layer, x)
    assert [(s.code, text in s.message) for s in report.skipped] == [(code, True)], [s.message for s in report.skipped]
    assert report.fused == []
    assert "test_named_causes.py:" in report.skipped[0].location
    assert not told_of_a_graph(report)


def test_weights_of_all_slots_where_rows_are_of_one() -> None:
    """Products with weights that are no stack were once read as one."""

    class Gathered(Layer):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.route(x)
            y = torch.stack([expert(x) for expert in self.experts], 1)
            rows = y.gather(1, ids[:, 1, None, None].expand(-1, 1, H)).squeeze(1)
            return super().forward(x) + rows * weights[:, 1, None]

    report, values = ran(layer := Gathered().eval(), x := torch.randn(T, H))
    assert "internal-error" not in [s.code for s in report.skipped]
    torch.testing.assert_close(values, run(layer, layer, x), atol=1e-4, rtol=1e-4)


class Single(Layer):
    """One expert, and a router with one score: nothing is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(1)
        return self.experts[0](x) * (weights * (ids == 0)).sum(-1, keepdim=True)


def test_one_expert_that_is_always_chosen_is_no_mixture() -> None:
    report, _ = ran(Single().eval(), torch.randn(T, H))
    assert (report.fused, report.skipped) == ([], [])
