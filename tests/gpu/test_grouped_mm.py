"""Experts with products by torch's grouped_mm on the device: right, without waiting, in a graph with other routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefuse.runtime import providers
from tests.cpu.ops_case import Case
from tests.gpu.gpu_case import assert_right, on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10), reason="the library loops here"),
]
SIZES = {"tokens": 3000, "hidden": 512, "inter": 384, "hidden_out": 256, "experts": 8, "top_k": 2, "bias": False}
BODIES: list[dict[str, Any]] = [
    {},
    {"up_first": True},
    {"transposed": True},
    {"gating": "interleaved", "activation": "swiglu_oai"},
    {"gating": "plain", "activation": "gelu"},
    {"weight_on_input": True},
    {"low_id": -4, "high_id": 3},
    {"out_dtype": torch.float32},
]


def planned(case: Case, args: list[Any], form: str) -> Any:
    from moefuse.kernels.triton.provide.library import LibraryPlan

    plan = LibraryPlan(case.call(args), form)
    return lambda: plan.run(case.call(args))


@pytest.mark.parametrize("changes", BODIES, ids=str)
@pytest.mark.parametrize("form", ["all", "down"])
def test_right_and_without_waiting(form: str, changes: dict[str, Any]) -> None:
    from moefuse.kernels.triton.provide import library as grouped_mm

    case = Case(**{**SIZES, **changes}, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    assert grouped_mm.supports(case.call(args)) is None
    call = planned(case, args, form)
    assert_right(call(), args, case.options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(again, args, case.options)


@pytest.mark.parametrize("form", ["all", "down"])
def test_a_graph_replays_with_other_routing(form: str) -> None:
    case = Case(**SIZES, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    call = planned(case, args, form)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    ids = args[1].clone()
    for other in (torch.zeros_like(ids), torch.full_like(ids, -1), ids.roll(1, 0)):
        args[1].copy_(other)
        graph.replay()
        assert torch.equal(out, call())
        assert_right(out, args, case.options)


def test_training_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of our own products, within the dtype; zeros for experts without rows."""
    from moefuse.kernels.triton import config
    from tests.cpu.ops_case import leaves, run

    for changes in ({}, {"transposed": True}, {"weight_on_input": True}, {"high_id": 5}):
        case = Case(**{**SIZES, **changes}, dtype=torch.bfloat16)
        args = on_gpu(case.args())
        for t in leaves(args):
            t.requires_grad_()
        found = []
        for preferred in ("own", "library"):
            monkeypatch.setattr(config, "PRODUCTS", preferred)
            providers.forget_records()
            out = run(args, **case.options)
            pull = torch.ones_like(out).cumsum(1).sin()
            found.append([out.detach(), *torch.autograd.grad(out, leaves(args), pull)])
        for own, library, t in zip(*found, [None, *leaves(args)], strict=True):
            assert float((own.double() - library.double()).norm()) <= 1e-2 * float(own.double().norm())
            assert t is None or library.stride() == t.stride()
        if "high_id" in changes:
            assert not any(g[5:].any() for g in found[1][3:])
