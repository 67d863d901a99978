"""Calls without tokens: one graph, fused as with tokens, where code reads counts on the host or loops over masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cpu.capture_case import Seen, capturing

H, E, K = 8, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 12), nn.GELU(), nn.Linear(12, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        return self.run(x, weights, ids)

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Split(Layer):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        counts = ids.view(-1).bincount(minlength=E).tolist()
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, x[order // K].split(counts), strict=True)])
        return torch.zeros_like(x).index_add(0, order // K, rows * weights.view(-1)[order, None])


class Ends(Layer):
    """Running offsets, and what experts give is written to its place."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        rows = x.repeat_interleave(K, 0)[order]
        ends = torch.cumsum(torch.bincount(ids.view(-1), minlength=E), 0)
        out, start = torch.zeros_like(rows), 0
        for i, expert in enumerate(self.experts):
            end = int(ends[i].item())
            out[start:end] = expert(rows[start:end])
            start = end
        back = torch.empty_like(out)
        back[order] = out
        return (back.view(-1, K, H) * weights[..., None]).sum(1)


class Narrow(Layer):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        rows, parts, at = x[order // K], [], 0
        for i, count in enumerate(torch.bincount(ids.view(-1), minlength=E).tolist()):
            parts.append(self.experts[i](rows.narrow(0, at, count)))
            at += count
        return (torch.cat(parts)[order.argsort()].view(-1, K, H) * weights[..., None]).sum(1)


class Asked(Layer):
    """DeepSeek's loop, without experts that have no tokens."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        ends = ids.view(-1).bincount().cpu().numpy().cumsum(0)
        out = torch.zeros_like(x)
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            token = (order // K)[start:end]
            rows = self.experts[i](x[token]) * weights.view(-1, 1)[order[start:end]]
            out.scatter_reduce_(0, token.view(-1, 1).repeat(1, H), rows, reduce="sum")
        return out


class Masked(Layer):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(ids == i)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Hit(Layer):
    """transformers' loop over the experts that somebody chose."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), F.one_hot(ids, E).permute(2, 1, 0)
        for i in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[i].squeeze(0))
            out.index_add_(0, token, self.experts[i](x[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize(
    ("kind", "grad"),
    [
        pytest.param(Split, False, marks=pytest.mark.thorough),
        (Split, True),
        (Ends, False),
        (Narrow, True),
        (Asked, False),
        (Masked, False),
        pytest.param(Masked, True, marks=pytest.mark.thorough),
        pytest.param(Hit, False, marks=pytest.mark.thorough),
        (Hit, True),
    ],
)
def test_one_graph(kind: type[Layer], grad: bool) -> None:
    """``fullgraph``, with tokens and without."""
    torch.manual_seed(0)
    layer, seen = kind(), Seen()
    run = torch.compile(layer, backend=capturing(seen, behind="aot_eager"), fullgraph=True)
    for calls, tokens in enumerate((5, 0), 1):
        torch._dynamo.reset()
        x = torch.randn(tokens, H)
        with torch.set_grad_enabled(grad):
            out, wanted = run(x), layer(x)
        torch.testing.assert_close(out, wanted)
        assert ([f.spec.top_k for f in seen.report.fused], seen.report.graph_breaks, seen.report.skipped) == ([K] * calls, [], [])
        if grad and tokens:
            assert out.requires_grad
            out.sum().backward()
        layer.zero_grad()
