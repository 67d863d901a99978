"""Gradients where functions have a kink: zero rows and whole numbers, so that what comes out of a projection is 0, a limit, or a tie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.ops.meaning.activations import ACTIVATIONS, limits_pass
from moefuse.ops.meaning.reference import experts_reference
from moefuse.report.report import FusionReport
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, K, H, I, T = 3, 2, 4, 6, 9  # noqa: E741  (the letters of moefuse.spec)

Activation = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """No biases in front of the activation, so that a row of zeros comes to it as zeros."""

    def __init__(self, act: Activation, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act = act
        self.router = nn.Linear(H, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(H, I, bias=False) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(I, H) for _ in range(E))
        for up in self.up:
            nn.init.zeros_(up.weight) if zeros else up.weight.data.mul_(3).round_()  # type: ignore[attr-defined, operator]

    def rows(self, x: Tensor, tok: Tensor) -> Tensor:
        return x[tok]

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.down[e](self.act(self.up[e](self.rows(x, tok)))) * w[tok, slot, None])
        return out


class Embedded(Layer):
    """Rows by ``F.embedding``, with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(F.silu)
        self.options = options

    def rows(self, x: Tensor, tok: Tensor) -> Tensor:
        return F.embedding(tok, x, **self.options)


def tokens() -> Tensor:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).round()
    x[T // 2 :] = 0
    return x


def grads(call: Callable[[Tensor], Tensor], owner: nn.Module) -> dict[str, Tensor]:
    owner.zero_grad()
    x = tokens().requires_grad_()
    out = call(x)
    (out * torch.linspace(-1, 1.5, out.numel()).view(out.shape)).sum().backward()
    return {"y": out.detach(), "x": x.grad} | {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in owner.named_parameters()
    }  # type: ignore[dict-item]


def check(model: nn.Module) -> FusionReport:
    """The model compiled has the gradients that it has."""
    twin, seen = copy.deepcopy(model), Seen()
    wanted, got = grads(twin, twin), grads(torch.compile(model, backend=capturing(seen)), model)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]
    return seen.report


CLAMP = "custom" if limits_pass() else "relu"
"""What a clamp at 0 is where gradients are recorded: from torch 2.14 on it passes none on at its limits, as relu does."""

KINKS: dict[str, tuple[Activation, str]] = {  # and what is reported; "" where it is refused
    "relu": (F.relu, "relu"),
    "clamp": (lambda h: h.clamp(min=0), CLAMP),
    "clamp_min": (lambda h: torch.clamp_min(h, 0), CLAMP),
    "squared clamp": (lambda h: h.clamp(min=0) ** 2, "relu2"),
    "squared relu": (lambda h: F.relu(h).square(), "relu2"),
    "product": (lambda h: (h > 0) * h, "custom"),
    "product of numbers": (lambda h: h * (h >= 0).to(h.dtype), "custom"),
    "picked": (lambda h: torch.where(h > 0, h, h * 0.1), "custom"),
    "picked, or zeros": (lambda h: torch.where(h > 0, h, torch.zeros_like(h)), "custom"),
    "picked, or a number": (lambda h: torch.where(h <= 0, 0.5, h), "custom"),
    "picked by two": (lambda h: torch.where((h > 1) | ~(h >= -1), h, h * h), "custom"),
    "filled": (lambda h: h.masked_fill(h.lt(0) & (h != -1), -2.0), "custom"),
    "filled in place": (lambda h: (h + 1).masked_fill_(h == 1, 0.0), "custom"),
    "above the row's mean": (lambda h: torch.where(h > h.mean(-1, keepdim=True), h, 0.1 * h), "custom"),
    "sign": (lambda h: (h > 0).to(h.dtype) - (h < 0).to(h.dtype) + h, "custom"),
    "maximum": (lambda h: torch.maximum(h, torch.zeros_like(h)), "custom"),
    "relu6": (lambda h: F.relu6(h), "custom"),
    "hardtanh": (lambda h: F.hardtanh(h), "custom"),
    "both limits": (lambda h: h.clamp(-1.0, 1.0), "custom"),
    "threshold": (lambda h: F.threshold(h, 1.0, 0.0), "custom"),
    "leaky": (lambda h: F.leaky_relu(h, 0.1), "custom"),
    "absolute": (lambda h: h.abs(), "custom"),
    "hardswish": (lambda h: F.hardswish(h), "custom"),
    "silu": (F.silu, "silu"),
    "gelu": (F.gelu, "gelu"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zeros", [False, True], ids=["whole numbers", "zero weights"])
@pytest.mark.parametrize("name", KINKS)
def test_gradients_at_kinks(name: str, zeros: bool) -> None:
    act, activation = KINKS[name]
    report = check(Layer(act, zeros))
    assert [f.spec.activation for f in report.fused] == ([activation] if activation else []), str(report.skipped)


def test_inference_keeps_the_template() -> None:
    """Without gradients a clamp at 0 is relu; a call with them is another graph."""
    model, seen = Layer(KINKS["clamp"][0]), Seen()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=capturing(seen))
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens()), twin(tokens()))
    assert [f.spec.activation for f in seen.report.fused] == ["relu"]
    wanted, got = grads(twin, twin), grads(compiled, model)
    assert [f.spec.activation for f in seen.report.fused] == ["relu", CLAMP]
    for n, value in wanted.items():
        torch.testing.assert_close(got[n], value)


def test_frozen_experts_keep_the_template() -> None:
    """Nothing that the experts read has a gradient, in whatever mode they are."""
    model, seen = Layer(KINKS["clamp"][0]).requires_grad_(False), Seen()
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(tokens()), model(tokens()))
    assert [f.spec.activation for f in seen.report.fused] == ["relu"]


OPTIONS: dict[str, dict[str, Any]] = {
    "padding_idx": {"padding_idx": 1},
    "padding_idx from the end": {"padding_idx": -1},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
    "all defaults": {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_embedded_rows(name: str) -> None:
    report = check(Embedded(**OPTIONS[name]))
    if name == "all defaults":
        assert len(report.fused) == 1
        return
    option, value = next(iter(OPTIONS[name].items()))
    assert not report.fused
    assert [s.code for s in report.skipped] == ["no-rule"]
    assert f"`embedding` with `{option}={value}`, which no rule reads" in report.skipped[0].message


def test_embedded_rows_without_gradients() -> None:
    """What the options are about is not there."""
    model, seen = Embedded(padding_idx=1, scale_grad_by_freq=True), Seen()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(tokens()), model(tokens()))
    assert len(seen.report.fused) == 1


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_op_at_kinks(activation: str, dtype: torch.dtype) -> None:
    """Kernels have torch's derivatives at 0 and at limits, where their inputs are exactly that."""
    made = torch.Generator().manual_seed(0)
    known = ACTIVATIONS[activation]
    args = [1.5, 1.0][-known.num_args :] if known.num_args else []
    gated = known.needs_gate
    x = tokens().to(dtype)
    ids = torch.rand(T, E, generator=made).topk(K).indices
    weights = torch.tensor([0.0, 1.0], dtype=dtype).repeat(T, 1)
    w_in = torch.randn(E, 2 * I if gated else I, H, generator=made).round().to(dtype)
    w_out = torch.randn(E, H, I, generator=made).round().to(dtype)
    options = {"activation": activation, "activation_args": args, "gating": "merged" if gated else "plain"}
    found = []
    for function in (torch.ops.moefuse.experts, experts_reference):
        leaves = [t.clone().requires_grad_() for t in (x, weights, w_in, w_out)]
        out = function(leaves[0], ids, leaves[1], [leaves[2]], [], [leaves[3]], [], [], [], **options)
        found.append((out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)).sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
