"""The grouped tier on the device: values and gradients of every op, graphs, repeatability, no waiting, and a whole model that uses it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.runtime import grouped, providers
from tests.contract.tier import ops

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = {  # tokens, top_k, experts, inputs, outputs
    "few": (3, 2, 9, 96, 80),
    "some": (70, 4, 9, 96, 64),
    "many": (1500, 2, 6, 136, 264),
    "odd": (70, 3, 5, 51, 37),
    "wide": (3000, 4, 8, 512, 768),
    "sorted": (5000, 2, 20, 64, 32),
    "no tokens": (0, 2, 4, 64, 32),
    "one token": (1, 1, 4, 64, 32),
}
FORMS = ["stacked", "in-out", "separate"]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def inputs(size: str, form: str, dtype: torch.dtype) -> dict[str, Any]:
    """A call of each op; the last expert has no rows, and some ids are out of range."""
    tokens, top_k, experts, inp, out = SIZES[size]
    torch.manual_seed(0)
    ids = torch.randint(-1, experts - 1, (tokens, top_k), device="cuda")
    w = (torch.randn(experts, out, inp, device="cuda") * inp**-0.5).to(dtype)
    b = draw(experts, out, dtype=dtype)
    if form == "in-out":
        w = w.mT.contiguous().mT
    lists = (list(map(torch.clone, w)), list(map(torch.clone, b))) if form == "separate" else ([w], [b])
    return {
        "x": draw(tokens, inp, dtype=dtype),
        "ids": ids,
        "w": lists[0],
        "b": lists[1],
        "weights": torch.rand(tokens, top_k, device="cuda"),
    }


def leaves(call: dict[str, Any]) -> list[Tensor]:
    return [call["x"], call["weights"], *call["w"], *call["b"]]


def body(x: Tensor, ids: Tensor, weights: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
    """Every op of the tier once."""
    xs, order, offsets = ops.permute(x, ids, len(w) if len(w) > 1 else w[0].shape[0])
    h = ops.grouped_linear(xs, offsets, w, b) * ops.expert_rows(b, offsets, ids.numel())
    return ops.combine(h, weights, order, offsets, ids.shape[1], None)


def near(got: Tensor, exact: Tensor, own: Tensor) -> None:
    assert got.shape == own.shape
    assert got.dtype == own.dtype
    if got.numel():
        roundings = 16 if got.dtype in (torch.float32, torch.float64) else 2
        floor = roundings * torch.finfo(got.dtype).eps * max(float(exact.detach().abs().max()), 1.0)
        error, allowed = (float((t.detach().double() - exact.detach()).abs().max()) for t in (got, own))
        assert error <= 2 * allowed + floor, f"error {error:.3g}, the portable op's {allowed:.3g}"


def test_triton_runs_the_ops() -> None:
    call = inputs("few", "stacked", torch.bfloat16)
    assert providers.select("permute", call["x"], call["ids"], 9).name == "triton"
    assert providers.select("expert_rows", call["b"], call["ids"], 3).name == "triton"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_of_every_op(size: str, form: str, dtype: torch.dtype) -> None:
    call = inputs(size, form, dtype)
    _, top_k, experts, *_ = SIZES[size]
    w, b = call["w"], call["b"]
    xs, order, offsets = ops.permute(call["x"], call["ids"], experts)
    want = grouped.permute(call["x"], call["ids"], experts)
    assert all(torch.equal(g, t) for g, t in zip((xs, order, offsets), want, strict=True))
    wide = [[t.double() for t in part] for part in (w, b)]
    near(
        ops.grouped_linear(xs, offsets, w, b),
        grouped.grouped_linear(xs.double(), offsets, *wide),
        grouped.grouped_linear(xs, offsets, w, b),
    )
    grad = draw(xs.shape[0], w[0].shape[-2], dtype=dtype)
    needs = [True, True, True]
    found = ops.grouped_linear_backward(grad, xs, offsets, w, b, needs)
    exact = grouped.grouped_linear_backward(grad.double(), xs.double(), offsets, *wide, needs)
    for got, e, own in zip(found, exact, grouped.grouped_linear_backward(grad, xs, offsets, w, b, needs), strict=True):
        near(got, e, own)
    assert torch.equal(ops.expert_rows(b, offsets, xs.shape[0]), grouped.expert_rows(b, offsets, xs.shape[0]))
    for got, e in zip(ops.expert_rows_backward(grad, b, offsets), exact[-len(b) :], strict=True):
        near(got, e, e.to(dtype))
    rest = (call["weights"], order, offsets, top_k)
    near(ops.combine(grad, *rest, None), grouped.combine(grad.double(), *rest, None), grouped.combine(grad, *rest, None))
    d_out = draw(call["x"].shape[0], grad.shape[1], dtype=dtype)
    found = ops.combine_backward(d_out, grad, *rest, [True, True])
    exact = grouped.combine_backward(d_out.double(), grad.double(), *rest, [True, True])
    for got, e, own in zip(found, exact, grouped.combine_backward(d_out, grad, *rest, [True, True]), strict=True):
        near(got, e, own)


def test_gradcheck() -> None:
    call = inputs("few", "stacked", torch.float64)
    call["x"], call["w"], call["weights"] = call["x"][:, :5], [call["w"][0][:, :4, :5]], call["weights"].double()
    call["b"] = [call["b"][0][:, :4]]
    for t in leaves(call):
        t.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, r, w, b: body(x, call["ids"], r, [w], [b]), leaves(call))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", ["few", "wide", "sorted"])
def test_a_graph_replays_with_other_routing(size: str, form: str) -> None:
    """Forward of the whole tier, captured once."""
    call = inputs(size, form, torch.bfloat16)
    with torch.no_grad():
        body(**call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = body(**call)
        ids = call["ids"].clone()
        for other in (torch.zeros_like(ids), torch.full_like(ids, -1), ids.roll(1, 0), ids):
            call["ids"].copy_(other)
            call["x"].normal_()
            call["w"][0].neg_()
            graph.replay()
            assert torch.equal(out, body(**call))


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_never_wait_and_repeat(form: str) -> None:
    call = inputs("wide", form, torch.bfloat16)
    for t in leaves(call):
        t.requires_grad_()
    pull = draw(3000, 768, dtype=torch.bfloat16)

    def once() -> list[Tensor]:
        return list(torch.autograd.grad(body(**call), leaves(call), pull))

    want = once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    junk = torch.full((32 << 20,), float("nan"), device="cuda")
    del junk
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(once(), want, strict=True))


class Block(torch.nn.Module):
    """Experts with an activation that no template describes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 8, bias=False)
        self.up = torch.nn.ModuleList(torch.nn.Linear(64, 96) for _ in range(8))
        self.down = torch.nn.ModuleList(torch.nn.Linear(96, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(self.gate(x).float(), -1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(8):
            token, slot = torch.where(ids == e)
            h = self.down[e](self.up[e](x[token]).sin().square())
            out.index_add_(0, token, h * weights[token, slot, None].to(x.dtype))
        return out


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_body_without_a_template_is_fused(dtype: torch.dtype) -> None:
    """Through the backend, forward and one backward, without waiting; equal to eager within the dtype."""
    import moefuse

    torch.manual_seed(0)
    block = Block().to("cuda", dtype)
    exact = copy.deepcopy(block).double()
    x = draw(40, 64, dtype=dtype)
    compiled = torch.compile(block, backend="moefuse")
    got, want, truth = compiled(x), block(x), exact(x.double())
    report = moefuse.last_report()
    assert report is not None
    assert [(s.code, s.message) for s in report.skipped] == []
    assert len(report.fused) == 1
    near(got, truth, want)
    pull = draw(40, 64, dtype=dtype)
    grads = [torch.autograd.grad(out, list(m.parameters()), pull.to(out.dtype)) for out, m in ((got, block), (want, block), (truth, exact))]
    for a, own, e in zip(*grads, strict=True):
        near(a, e, own)
