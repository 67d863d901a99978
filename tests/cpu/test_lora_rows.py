"""LoRA beside each expert's projections: which tier takes it, in which dtypes, with which numbers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from moefuse.config import Options
from moefuse.passes.driver import fuse
from moefuse.report.entries import Fused

E, K, H, INNER = 4, 2, 32, 24


class Adapter(nn.Module):
    """``base(x) + scale * b(a(dropout(x)))`` in the adapter's dtype, as PEFT computes it."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, of: torch.dtype, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False, dtype=of)
        self.b = nn.Linear(rank, outputs, bias=False, dtype=of)
        self.scale, self.dropout = scale, nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return (y + self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * self.scale).to(y.dtype)


class Expert(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.gate, self.up = Adapter(H, INNER, **how), Adapter(H, INNER, **how)
        self.down = Adapter(INNER, H, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(
        self, dtype: torch.dtype = torch.float32, of: torch.dtype = torch.float32, rank: int = 4, scale: float = 2.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(Expert(dtype=dtype, of=of, rank=rank, scale=scale, dropout=dropout) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def numbers(model: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The output, and the gradients of the input and of what is trained."""
    x = x.detach().requires_grad_()
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *parameters])]


def adapters(layer: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if ".a." in name or ".b." in name]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine.double() - theirs.double()).norm()) <= tolerance * float(theirs.double().norm())


@pytest.mark.code_elsewhere
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("rank", [4, 3])
def test_float32_adapters_beside_a_bfloat16_base(rank: int) -> None:
    """PEFT's default for bfloat16 models; an odd rank has no aligned rows."""
    torch.manual_seed(0)
    layer = Layer(torch.bfloat16, torch.float32, rank)
    x = torch.randn(40, H, dtype=torch.bfloat16)
    expected = numbers(layer, x, adapters(layer))
    close(numbers(torch.compile(layer, backend="moefuse", fullgraph=True), x, adapters(layer)), expected, 0.03)
    (fused,) = moefuse.last_report().fused
    assert (fused.tier, fused.spec.activation, fused.spec.intermediate) == ("fused", "silu", INNER)
    assert (fused.spec.dtype, fused.spec.lora) == ("bfloat16", (rank,))
    assert f"LoRA r={rank}" in str(fused.spec)


def _with_biases(layer: Layer, base: bool, up: bool = True) -> list[nn.Parameter]:
    """What is trained, with biases behind each B, as PEFT's ``lora_bias`` has them, and of the bases. ``up``: there, too."""
    for expert in layer.experts:
        for adapter, wanted in ((expert.gate, True), (expert.up, up), (expert.down, True)):
            out = adapter.base.out_features
            if wanted:
                adapter.b.bias = nn.Parameter(torch.randn(out))
            if base:
                adapter.base.bias = nn.Parameter(torch.randn(out, dtype=adapter.base.weight.dtype))
    return [p for p in layer.parameters() if p.requires_grad]


def _without_inductor(layer: nn.Module) -> tuple[Any, list[Fused]]:
    found: list[Fused] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        found.extend(fuse(gm, inputs, Options()).fused)
        return gm.forward

    return torch.compile(layer, backend=backend, fullgraph=True), found


@pytest.mark.sampled(1)
@pytest.mark.code_once
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("scale", "base", "of", "tolerance"),
    [
        pytest.param(2.0, True, torch.float32, 4e-6, id="two biases"),
        pytest.param(2.0, False, torch.float32, 4e-6, id="of the adapter alone"),
        pytest.param(1.0, True, torch.float32, 4e-6, id="no scale"),
        pytest.param(2.0, True, torch.bfloat16, 0.03, id="float32 beside bfloat16"),
    ],
)
def test_biases_of_adapters(scale: float, base: bool, of: torch.dtype, tolerance: float) -> None:
    """They are biases of the projection, times the scale, beside its own if it has one."""
    torch.manual_seed(0)
    layer, x = Layer(of, torch.float32, scale=scale), torch.randn(40, H, dtype=of)
    trained = _with_biases(layer, base)
    compiled, found = _without_inductor(layer)
    close(numbers(compiled, x, trained), numbers(layer, x, trained), tolerance)
    (fused,) = found
    assert (fused.tier, fused.spec.activation, fused.spec.intermediate) == ("fused", "silu", INNER)
    assert (fused.spec.lora, fused.spec.bias) == ((4,), True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_bias_of_the_gate_s_adapter_alone() -> None:
    """No op has that; the products are grouped, and the report says what they are."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(40, H)
    trained = _with_biases(layer, False, up=False)
    compiled, found = _without_inductor(layer)
    close(numbers(compiled, x, trained), numbers(layer, x, trained), 4e-6)
    (fused,) = found
    assert (fused.tier, fused.spec.intermediate, fused.spec.lora) == ("grouped", INNER, (4,))


@pytest.mark.code_once
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("bias", [False, True])
def test_experts_without_adapters_beside_others_are_told(bias: bool) -> None:
    """What differs is said as people know it, not as operations."""
    torch.manual_seed(0)
    layer = Layer()
    if bias:
        _with_biases(layer, True)
    layer.experts[2].gate, layer.experts[2].down = layer.experts[2].gate.base, layer.experts[2].down.base
    told: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        told.extend(skipped.message for skipped in fuse(gm, inputs, Options()).skipped)
        return gm.forward

    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(40, H))
    assert "expert 2 differs from expert 0: it has 1 low-rank adapter instead of 3" in told


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_dropout_in_front_of_the_adapters() -> None:
    """Other draws of the same distribution: the mean over many passes is the output without dropout, and passes differ."""
    torch.manual_seed(0)
    layer = Layer(dropout=0.25)
    x = torch.randn(40, H)
    compiled = torch.compile(layer, backend="moefuse", fullgraph=True)
    for expert in layer.experts:  # only the last projection is linear in what is dropped
        expert.gate.dropout, expert.up.dropout = nn.Identity(), nn.Identity()
    with torch.no_grad():
        passes = torch.stack([compiled(x) for _ in range(400)])
        expected = layer.eval()(x)
    (fused,) = moefuse.last_report().fused
    assert (fused.tier, fused.spec.dropout) == ("grouped", (0.25,))
    assert "dropout 0.25" in str(fused.spec)
    assert not torch.equal(passes[0], passes[1])
    spread = passes.std(0) / 20
    assert float(((passes.mean(0) - expected).abs() / (spread + 1e-6)).mean()) < 1.2


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_gradients_see_the_mask_of_their_forward() -> None:
    """With one row for each adapter input, d out / d A is zero exactly where the forward dropped the input."""
    torch.manual_seed(0)
    layer = Layer(dropout=0.5)
    compiled = torch.compile(layer, backend="moefuse", fullgraph=True)
    x = torch.randn(1, H)
    compiled(x).sum().backward()
    assert len(moefuse.last_report().fused) == 1
    used = [e.gate.a.weight.grad for e in layer.experts if e.gate.a.weight.grad.abs().sum()]
    assert len(used) == K
    for grad in used:
        zeros = (grad == 0).all(0)
        assert 0 < int(zeros.sum()) < H
        assert torch.equal(zeros, (grad == 0).any(0))


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("by_option", [True, False])
def test_eager_draws_are_asked_for(by_option: bool) -> None:
    """Sorted rows cannot have eager's random numbers, so the refusal stays where those are asked for."""
    layer = Layer(dropout=0.25)
    options = {"fallback_random": True} if by_option else None
    with torch._inductor.config.patch(fallback_random=not by_option):
        torch.compile(layer, backend="moefuse", options=options)(torch.randn(40, H))
    assert {s.code for s in moefuse.last_report().skipped} == {"random"}


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_a_dropout_in_front_of_two_products_alone() -> None:
    """They are no adapter if nothing without the dropout is added; what they compute is fused as it is."""

    class Deep(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return self.down.base(self.gate.base(F.dropout(x, 0.25, training=True)))

    layer = Layer()
    layer.experts = nn.ModuleList(Deep(dtype=torch.float32, of=torch.float32, rank=4, scale=2.0, dropout=0.0) for _ in range(E))
    torch.compile(layer, backend="moefuse")(torch.randn(40, H))
    (fused,) = moefuse.last_report().fused
    assert (fused.tier, fused.spec.lora, fused.spec.dropout) == ("grouped", (), ())


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_noise_in_front_of_an_adapter_is_refused() -> None:
    """Of what draws, only a dropout is known to keep its distribution over other rows."""

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    layer = Layer()
    for expert in layer.experts:
        expert.gate.dropout = Noise()
    torch.compile(layer, backend="moefuse")(torch.randn(40, H))
    assert {s.code for s in moefuse.last_report().skipped} == {"random"}


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_ranks_that_differ() -> None:
    """Experts that compute with other sizes are not one tree."""
    layer = Layer()
    layer.experts[1] = Expert(dtype=torch.float32, of=torch.float32, rank=8, scale=2.0, dropout=0.0)
    torch.compile(layer, backend="moefuse")(torch.randn(40, H))
    assert {s.code for s in moefuse.last_report().skipped} == {"experts-differ"}


@pytest.mark.code_elsewhere
@pytest.mark.usefixtures("fresh_dynamo")
def test_one_op_with_terms_in_float32() -> None:
    """Adapters that start with B = 0 are proved on other values, so the first step of an optimizer changes nothing but numbers."""
    torch.manual_seed(0)
    layer = Layer(scale=4 / 2**0.5)
    for expert in layer.experts:
        nn.init.zeros_(expert.gate.b.weight)
    x, parameters = torch.randn(40, H), adapters(layer)
    compiled = torch.compile(layer, backend="moefuse", fullgraph=True)
    for _ in range(2):
        close(numbers(compiled, x, parameters), numbers(layer, x, parameters), 2e-6)
        with torch.no_grad():
            for p in parameters:
                p.add_(0.1 * torch.randn_like(p))
    (fused,) = moefuse.last_report().fused
    assert (fused.tier, fused.spec.gating) == ("fused", "split")


@pytest.mark.sampled(1)
@pytest.mark.code_once
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("which", ["gate", "up", "down"])
def test_some_projections_have_terms(which: str) -> None:
    """As with PEFT's ``target_modules``; a base that trains has its gradient as well."""
    torch.manual_seed(0)
    layer = Layer()
    for expert in layer.experts:
        for name in {"gate", "up", "down"} - {which}:
            setattr(expert, name, getattr(expert, name).base)
        getattr(expert, which).base.requires_grad_()
    x, parameters = torch.randn(40, H), [p for p in layer.parameters() if p.requires_grad]
    close(numbers(torch.compile(layer, backend="moefuse", fullgraph=True), x, parameters), numbers(layer, x, parameters), 2e-6)
    assert moefuse.last_report().fused[0].tier == "fused"


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_two_adapters_at_once() -> None:
    """Two terms for each projection are one of both ranks, in dtypes and scales of their own."""

    class Two(Adapter):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self.c = nn.Linear(self.base.in_features, 2, bias=False)
            self.d = nn.Linear(2, self.base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c(x)) * 0.5 + super().forward(x)

    torch.manual_seed(0)
    layer, how = Layer(), {"dtype": torch.float32, "of": torch.float32, "rank": 4, "scale": 2.0, "dropout": 0.0}
    for expert in layer.experts:
        expert.gate, expert.up, expert.down = Two(H, INNER, **how), Two(H, INNER, **how), Two(INNER, H, **how)
    x, parameters = torch.randn(40, H), [p for p in layer.parameters() if p.requires_grad]
    close(numbers(torch.compile(layer, backend="moefuse", fullgraph=True), x, parameters), numbers(layer, x, parameters), 2e-6)
    (fused,) = moefuse.last_report().fused
    assert (fused.tier, fused.spec.intermediate, fused.spec.lora) == ("fused", INNER, (2, 4))


class Scaled(nn.Module):
    """``w(x) + (a(x) * s) @ b.T * t``, with numbers of Python's that Dynamo makes inputs of when it sees others of them."""

    def __init__(self, inputs: int, outputs: int, first: float, second: float) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.w, self.a, self.b = (nn.Parameter(torch.randn(*shape) * 0.3) for shape in ((outputs, inputs), (3, inputs), (outputs, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T + (x @ self.a.T * self.first) @ self.b.T * self.second


@pytest.mark.usefixtures("fresh_dynamo")
def test_scales_that_differ_from_layer_to_layer() -> None:
    """Of the second layer on, each expert's two scales are numbers that only the run knows."""
    ranks: list[tuple[str, tuple[int, ...]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        ranks.extend((f.tier, f.spec.lora) for f in fuse(gm, inputs, Options()).fused)
        return gm.forward

    torch.manual_seed(0)
    x = torch.randn(20, H)
    for scales in ((0.5, 3.0), (0.25, 2.0), (1.25, -1.0)):
        layer = Layer()
        layer.experts = nn.ModuleList(nn.Sequential(Scaled(H, INNER, *scales), nn.SiLU(), Scaled(INNER, H, *scales)) for _ in range(E))
        parameters = [p for p in layer.parameters() if p.requires_grad]
        expected = numbers(layer.forward, x, parameters)
        layer.compile(backend=backend, fullgraph=True)
        close(numbers(layer, x, parameters), expected, 4e-6)
    assert ranks == [("fused", (3,))] * len(ranks)
    assert len(ranks) > 1


def shared(domain: str, x: Tensor, ids: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W of each row's expert, and a term whose A is the same for all experts."""
    if domain == "dense":
        rows = "teh" if x.dim() == 3 else "th"
        return torch.einsum(f"{rows},eoh->teo", x, w) + 1.5 * torch.einsum(f"{rows.replace('h', 'r')},eor->teo", x @ a.T, b)
    rows = "tkh" if x.dim() == 3 else "th"
    return torch.einsum(f"{rows},tkoh->tko", x, w[ids]) + 1.5 * torch.einsum(f"{rows.replace('h', 'r')},tkor->tko", x @ a.T, b[ids])


@pytest.mark.code_elsewhere
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("domain", ["dense", "slots", "repeated"])
def test_one_a_for_all_experts(domain: str) -> None:
    """Its product with a token is made once in the program, and is part of the op here; its gradient is the sum over experts."""
    torch.manual_seed(0)
    w, w2 = torch.randn(E, INNER, H), torch.randn(E, H, INNER)
    a, a2, b, b2 = torch.randn(3, H), torch.randn(3, INNER), torch.randn(E, INNER, 3), torch.randn(E, H, 3)
    factors = [nn.Parameter(0.2 * t) for t in (a, a2, b, b2, w, w2)]
    router = torch.randn(H, E)

    def layer(x: Tensor) -> Tensor:
        a, a2, b, b2, w, w2 = factors
        weights, ids = (x @ router).softmax(-1).topk(K)
        rows = x[:, None].expand(-1, K, -1) if domain == "repeated" else x
        y = shared(domain, F.silu(shared(domain, rows, ids, w, a, b)), ids, w2, a2, b2)
        gates = torch.zeros(len(x), E).scatter(1, ids, weights) if domain == "dense" else weights
        return (y * gates[..., None]).sum(1)

    x = torch.randn(20, H)
    close(numbers(torch.compile(layer, backend="moefuse", fullgraph=True), x, factors), numbers(layer, x, factors), 4e-6)
    assert [(f.tier, f.spec.lora) for f in moefuse.last_report().fused] == [("fused", (3,))]
