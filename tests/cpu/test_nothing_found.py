"""Who asked for speed and gets none is told why; who has no experts is told nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse.evidence.suspects import suspects
from tests.dist import layers
from tests.programs.check import Outcome, light
from tests.programs.refused.found import NothingFound
from tests.programs.refused.plain import E, H, I, K, Plain, T

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")


class ConvExperts(nn.Module):
    """Experts of 1x1 convolutions, as vision models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Conv2d(H, E, 1)
        self.experts = nn.ModuleList(nn.Sequential(nn.Conv2d(H, I, 1), nn.GELU(), nn.Conv2d(I, H, 1)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None, None]
        scores = self.router(image).softmax(1)
        weights, ids = scores.topk(K, 1)
        gates, out = torch.zeros_like(scores).scatter(1, ids, weights), torch.zeros_like(image)
        for e, expert in enumerate(self.experts):
            out = out + expert(image) * gates[:, e : e + 1]
        return out[:, :, 0, 0]


class ProductKeys(nn.Module):
    """Single neurons as experts, found by two halves of a key (PEER, He 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(H, 2 * H), nn.Parameter(torch.randn(2, E, H))
        self.down, self.up = nn.Embedding(E * E, H), nn.Embedding(E * E, H)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("tph,peh->tpe", self.query(x).view(-1, 2, H), self.keys)
        best, at = scores.topk(K, -1)
        pairs = (best[:, 0, :, None] + best[:, 1, None, :]).flatten(1)
        weights, chosen = pairs.topk(K, -1)
        ids = (at[:, 0, :, None] * E + at[:, 1, None, :]).flatten(1).gather(1, chosen)
        hidden = F.gelu(torch.einsum("th,tkh->tk", x, self.down(ids))) * weights.softmax(-1)
        return torch.einsum("tk,tkh->th", hidden, self.up(ids))


class Depths(nn.Module):
    """A layer for the tokens that it likes best (mixture of depths, Raposo et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlp = nn.Linear(H, 1), nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H))

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = self.router(x).squeeze(-1).topk(4, dim=0)
        index = tokens[:, None].expand(-1, H)
        return x.scatter_add(0, index, self.mlp(x.gather(0, index)) * weights.sigmoid()[:, None])


class StraightThrough(Plain):
    """Gates that are one-hot forward and soft backward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        soft = self.gate(x).softmax(-1)
        gates, out = F.one_hot(soft.argmax(-1), E) - soft.detach() + soft, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * gates[:, e : e + 1]
        return out


class Dequantised(nn.Module):
    """Weights of eight bits, gathered and then multiplied by their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.register_buffer("w", torch.randint(-127, 127, (E, H, H), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(E, H, 1) / 100)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        chosen = self.w[ids].float() * self.scale[ids]
        return (torch.einsum("th,tkoh->tko", x, chosen) * weights[..., None]).sum(1)


class FlatInParts(nn.Module):
    """Flat weights that are experts' in a view only, and joined before they are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.one, self.other, self.down = (nn.Parameter(torch.randn(*size)) for size in ((E * H, H), (E * H, H), (E * H, H)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        both = torch.cat([self.one.view(E, H, H), self.other.view(E, H, H)], dim=1)
        gate, up = torch.einsum("th,eoh->teo", x, both).chunk(2, -1)
        table = torch.zeros(len(x), E).scatter(1, ids, weights)
        return torch.einsum("teo,eho,te->th", F.silu(gate) * up, self.down.view(E, H, H), table)


class Stopping(NothingFound):
    """The same experts, found in one loop and run in another."""

    def hits(self, ids: Tensor) -> object:
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel():
                yield e, tok, slot

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e, tok, slot in self.hits(ids):  # type: ignore[attr-defined]
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


TOLD = (ConvExperts, ProductKeys, Depths, StraightThrough, Dequantised, FlatInParts, Stopping, NothingFound)


class Attention(nn.Module):
    """Each query sees its four best keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).t()
        best, at = scores.topk(4, -1)
        return self.o(torch.full_like(scores, -1e9).scatter(-1, at, best).softmax(-1) @ self.v(x))


class Classes(nn.Module):
    """As many equal layers as classes, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(E))
        self.head = nn.Linear(H, E + 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x)
        return scores, scores.argmax(-1)


class Sampling(nn.Module):
    """Two tokens, the second from the best of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(40, H), nn.Linear(H, H), nn.Linear(H, 40)

    def forward(self, x: Tensor) -> Tensor:
        first = self.head(F.relu(self.body(x)))
        second = self.head(F.relu(self.body(self.embedding(first.topk(5, -1).indices[:, 0]))))
        return first + second


class Suppression(nn.Module):
    """Boxes of the best scores."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.score = nn.Linear(H, 4), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.box(x)[self.score(x).squeeze(-1).topk(5, 0).indices]


class Adapted(nn.Module):
    """As many adapters as their rank: the factors of one are as wide as there are of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(H, H)
        self.a = nn.ModuleDict({name: nn.Linear(H, 2, bias=False) for name in ("one", "two")})
        self.b = nn.ModuleDict({name: nn.Linear(2, H, bias=False) for name in ("one", "two")})
        self.active = ["one"]

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        for name in self.active:
            if name in self.a:
                a, b = self.a[name], self.b[name]
                out = out + b(a(x))
        return out


QUIET = (Attention, Classes, Sampling, Suppression, Adapted)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("moefuse") and r.levelno >= logging.WARNING]


def compiled(make: Callable[[], nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = make().eval()
    model.compile(backend="moefuse", options=options)
    return model


@pytest.mark.sampled(2)
@torch.no_grad()
@pytest.mark.parametrize("make", TOLD)
def test_experts_that_were_not_found_are_told_about(make: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    """One warning with a place in the user's file, one entry of the report, and the values of eager."""
    model, x = compiled(make), torch.randn(T, H)
    torch.testing.assert_close(model(x), model.forward(x))
    (text,) = messages(caplog)
    assert re.search(r"was not fused \((not-recognised|nothing-found|encoding-unknown)\)", text)
    report = moefuse.last_report()
    assert report is not None
    (skipped,) = report.skipped
    assert skipped.location.rpartition(":")[0].endswith((".py",)), skipped
    model(x)
    assert len(messages(caplog)) == 1


@torch.no_grad()
@pytest.mark.parametrize("make", [ConvExperts, NothingFound])
def test_strict_raises_where_nothing_was_found(make: type[nn.Module]) -> None:
    with pytest.raises(moefuse.FusionError, match=r"not-recognised|nothing-found"):
        compiled(make, strict=True)(torch.randn(T, H))


@torch.no_grad()
@pytest.mark.parametrize("make", QUIET)
def test_what_has_no_experts_is_told_nothing(make: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    compiled(make, strict=True)(torch.randn(T, H))
    assert messages(caplog) == []


@torch.no_grad()
def test_so_many_layers_are_expected() -> None:
    """``expect`` raises behind the first call, with both numbers; the right number raises nothing."""
    x = torch.randn(T, H)
    compiled(Plain, expect=1)(x)
    torch._dynamo.reset()
    with pytest.raises(moefuse.FusionError, match=r"\['expect'\] is 2, and 1 layers were fused"):
        compiled(Plain, expect=2)(x)
    torch._dynamo.reset()
    with pytest.raises(moefuse.FusionError, match="is 1, and 0 layers"):
        compiled(Attention, expect=1)(x)


@torch.no_grad()
def test_an_error_of_the_program_is_not_replaced() -> None:
    """A call that raises keeps its own error."""

    class Failing(NothingFound):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(Failing, strict=True, expect=7)(torch.randn(T, H))


@torch.no_grad()
def test_excluded_modules_are_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    compiled(NothingFound, strict=True, exclude="^$")(torch.randn(T, H))
    assert messages(caplog) == []


def test_a_penalty_by_itself_is_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    """A compiled function that reads experts' weights, and no token."""
    model = layers.Stacked(4)

    def penalty() -> Tensor:
        return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]

    torch.compile(penalty, backend="moefuse", options={"strict": True})().backward()
    assert messages(caplog) == []


def test_suspects_are_the_innermost_modules() -> None:
    """A model of two layers has two suspects, by their names; a decoder's list of layers is none."""
    layers = nn.ModuleList(nn.ModuleDict({"attention": Attention(), "mlp": Plain()}) for _ in range(2))
    model = nn.ModuleDict({"embedding": nn.Embedding(50, H), "layers": layers, "head": nn.Linear(H, 50)})
    assert [s.name for s in suspects([model])] == ["layers.0.mlp", "layers.1.mlp"]
    assert suspects([model])[0].what == f"weights [{E}, {2 * I}, {H}] beside a weight [{E}, {H}]"
    assert [s.name for s in suspects([Classes(), Attention(), Sampling()]) if s.pairs[0].router is not None] == []


class Called(nn.Module):
    """A program that calls the op itself, with a result of another dtype than its weights, which no rule reads, and a layer behind it."""

    def __init__(self, behind: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.behind = nn.Linear(H, E), behind
        self.up, self.down = nn.Parameter(torch.randn(E, I, H).bfloat16()), nn.Parameter(torch.randn(E, H, I).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        data = (x.bfloat16(), ids, weights, [self.up], [], [self.down], [], [], [])
        out = torch.ops.moefuse.experts(*data, activation="gelu", gating="plain", out_dtype=torch.float32)
        return out if self.behind is None else self.behind(out)


@pytest.mark.parametrize(("behind", "codes"), [(None, []), (ProductKeys, ["not-recognised"])])
def test_a_program_that_calls_the_op_itself(behind: Callable[[], nn.Module] | None, codes: list[str]) -> None:
    model, outcome = Called(None if behind is None else behind()), Outcome()
    torch.compile(model, backend=light(outcome), fullgraph=True)(torch.randn(T, H))
    assert [s.code for s in outcome.skipped] == codes
