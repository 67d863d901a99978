"""The memory that a report names is what a plan of the call takes, also where MOEFUSE_WORKSPACE_MIB limits it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moefuse
from moefuse.config import Options
from moefuse.report.report import FusionReport
from tests.programs.check import Outcome, light


class Experts(nn.Module):
    """Every expert on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(4, 512, 64) / 8)
        self.w_out = nn.Parameter(torch.randn(4, 64, 256) / 16)
        self.gate = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(ids == e)
            a, b = torch.nn.functional.linear(x[token], self.w_in[e]).chunk(2, -1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(a) * b, self.w_out[e])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


def reported(tokens: int, grad: bool = False) -> Outcome:
    torch._dynamo.reset()
    outcome = Outcome()
    with torch.set_grad_enabled(grad):
        torch.compile(Experts(), backend=light(outcome, Options()), fullgraph=True)(torch.randn(tokens, 64))
    return outcome


def test_workspace_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from moefuse.kernels.triton.host import chunks
    from moefuse.passes.lower import workspace_size

    assert [f.workspace for f in reported(900).fused] == [None]  # nothing is known on the CPU
    monkeypatch.setattr(workspace_size, "DEVICES", {"cpu"})
    assert [f.workspace for f in reported(900, grad=True).fused] == [None]
    outcome = reported(900)
    [fused] = outcome.fused
    assert fused.tokens == 900
    # Activations of both projections of all slots are part of it.
    assert 900 * 2 * (256 + 64) * 4 <= (fused.workspace or 0) < 2 * 900 * 2 * (256 + 64) * 4
    assert f"{(fused.workspace or 0) / 2**20:.2g} MiB for 900 tokens" in str(FusionReport(outcome.fused))
    monkeypatch.setattr(chunks, "allowed", lambda: 1 << 20)
    assert 0 < (reported(900).fused[0].workspace or 0) <= 1 << 20


@pytest.mark.usefixtures("no_code")
def test_calls_that_the_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, on a GPU, launched: a note says what takes the host away. Not of many tokens, not of training, and not where a graph is
    recorded."""
    pytest.importorskip("triton")
    from moefuse.passes.lower import workspace_size
    from moefuse.report import launched

    def notes(tokens: int, mode: str | None = None, grad: bool = False) -> list[str]:
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            torch.compile(Experts(), backend="moefuse", mode=mode, fullgraph=True)(torch.randn(tokens, 64))
        report = moefuse.last_report()
        assert report is not None
        assert len(report.fused) == 1
        return [note for note in report.notes if "reduce-overhead" in note]

    assert not notes(8)  # on a CPU nothing is launched
    monkeypatch.setattr(workspace_size, "DEVICES", {"cpu"})
    assert notes(8) == [launched.NOTE.format(tokens="8")]
    assert not notes(8, mode="reduce-overhead")
    assert not notes(8, grad=True)
    assert not notes(launched.FEW + 1)
