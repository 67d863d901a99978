"""Training, where a frame around the experts writes to their tokens behind them: the gradients are eager's, which keeps gathered rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moefuse
from tests.cpu.test_relations import E, H, K, T
from tests.cpu.test_relations import Layer as Written

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
    assert {s.code for s in report.skipped} & {"mutation", "overlap"}
