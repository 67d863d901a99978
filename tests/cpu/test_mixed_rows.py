"""Statistics of an expert's rows inside the expert: refused as what they are, with one message, however the program comes to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, K, H, I, T = 4, 2, 8, 6, 12  # noqa: E741  (the letters of moefuse.spec)


class Expert(nn.Module):
    """``mixed`` is what it computes of all its rows."""

    def __init__(self, mixed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, I), nn.Linear(H, I), nn.Linear(I, H)
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) / (1 + self.mixed(self.up(x))))


class Layer(nn.Module):
    def __init__(self, mixed: Callable[[Tensor], Tensor], skip: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(Expert(mixed) for _ in range(E))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if self.skip and tok.numel() == 0:
                continue
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "var": lambda h: h.var(),
    "mean": lambda h: h.mean(0).sigmoid(),
    "max": lambda h: h.abs().max(),
}


@pytest.mark.every_value
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skipped"])
@pytest.mark.parametrize("name", MIXED)
def test_a_statistic_of_the_rows_is_no_input_of_the_experts(name: str, skip: bool) -> None:
    """Behind what is refused a value is plain, so a number for each expert could pass for one that is older than the experts."""
    torch.manual_seed(0)
    model, seen = Layer(MIXED[name], skip), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    x = torch.randn(2 * T, H)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert seen.report.fused == []
    told = {s.message.partition(",")[0] for s in seen.report.skipped if s.code != "not-captured"}
    assert told == {f"`{name}` takes the rows of an expert together"}


def test_spectral_norm_in_training() -> None:
    """It writes to buffers in front of the experts, without gradients, into ``out=``: the check has to run that, and leave the buffers."""
    torch.manual_seed(0)

    def made() -> Layer:
        torch.manual_seed(0)
        layer = Layer(torch.sigmoid, False)
        for expert in layer.experts:
            torch.nn.utils.parametrizations.spectral_norm(expert.down)
        return layer

    model, original, seen = made(), made(), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for _ in range(2):
        x = torch.randn(T, H)
        torch.testing.assert_close(compiled(x), original(x))
        for mine, theirs in zip(model.buffers(), original.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(seen.report.fused) == 1, seen.report
