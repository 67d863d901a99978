"""Training, where a frame around the experts writes to their tokens behind them: the gradients are eager's, which keeps gathered rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moefuse
from tests.cpu.beside_eager import MoE
from tests.cpu.capture_case import Seen, capturing
from tests.cpu.test_relations import E, H, K, Layer as Written, T

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Around(nn.Module):
    """``experts`` has a frame of its own where Dynamo leaves this one's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Written(torch.Tensor.detach, "nowhere")

    def forward(self, x: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out: Tensor = self.experts(x, x, ids, w)
        v.mul_(0.5)
        return out


def _numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy())


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[2:5],
    "data": lambda x: x.data,
    "NumPy's": _numpy,
    "DLPack's": torch.from_dlpack,
    "apart": torch.clone,
}


def gradients(run: Callable[..., Tensor], model: nn.Module, kind: str, number: int) -> list[Tensor]:
    torch.manual_seed(number)
    x = torch.from_numpy(torch.randn(T, H).numpy().copy())
    ids, w = torch.stack([torch.randperm(E)[:K] for _ in range(T)]), torch.rand(T, K)
    model.zero_grad(set_to_none=True)
    run(x, SAME[kind](x), ids, w).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.code_once
@pytest.mark.parametrize(
    "kinds", [("itself",), ("a view",), ("NumPy's",), ("apart", "data"), ("apart", "NumPy's", "DLPack's")], ids=" then ".join
)
def test_gradients_are_those_of_the_old_tokens(kinds: tuple[str, ...]) -> None:
    """The frame around was refused, and the experts were fused in their own, which kept the tokens for backward."""
    torch.manual_seed(0)
    model = Around()
    compiled = torch.compile(model, backend="moefuse")
    for number, kind in enumerate(kinds):
        for got, wanted in zip(gradients(compiled, model, kind, number), gradients(model, model, kind, number), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    report = moefuse.last_report()
    assert report is not None
    assert report.fused, "in their own frame the experts are fused: what they keep of tokens is their own"


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.mul_(0.5),
    "data": lambda x: x.data.neg_(),
    "storage": lambda x: x.set_(torch.zeros(T, H)),  # type: ignore[call-overload]
}


@pytest.mark.code_once
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("rounded", [False, True], ids=["as they are", "cast"])
def test_tokens_that_eager_code_changes_before_backward(change: Callable[[Tensor], object], rounded: bool) -> None:
    """Only the layer is compiled. The op kept its tokens, and autograd raised, or did not see it and gave other gradients."""
    torch.manual_seed(0)
    layer = Written(torch.Tensor.detach, "nowhere")
    compiled = torch.compile(layer, backend="moefuse")
    ids, w = torch.stack([torch.randperm(E)[:K] for _ in range(T)]), torch.rand(T, K)
    found = []
    for run in (compiled, layer):
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(1))
        layer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            out = run(x, x, ids, w)
        change(x)
        out.float().square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2 if rounded else 1e-4, atol=2e-2 if rounded else 1e-4)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1, report


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
