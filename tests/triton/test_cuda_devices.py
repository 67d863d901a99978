"""Which replacements are made on CUDA, asked with fake tensors: no device is needed for the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from moefuse.passes.lower.devices import unsupported
from tests.contract.tier import EXPERTS, draw, ids_of, ops
from tests.cpu.lora_case import SCALES, arguments as lora_arguments
from tests.cpu.ops_case import Case


def called(op: Any, args: list[Any], dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False, **options: Any) -> list[Node]:
    """A graph's call of ``op`` on fake CUDA tensors."""
    graph = Graph()

    def node(value: Any) -> Any:
        if isinstance(value, list):
            return [node(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        made = graph.placeholder("x")
        fake = torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device="cuda")
        made.meta["example_value"] = fake.requires_grad_(requires_grad and value.is_floating_point())
        return made

    with FakeTensorMode(allow_non_fake_inputs=True):
        return [graph.call_function(op, tuple(map(node, args)), options)]


def calls() -> dict[str, list[Any]]:
    """Arguments of every public op."""
    x, ids, weights, w, b = draw(5, 3), ids_of(5, 2, -1, 5), draw(5, 2), [draw(EXPERTS, 5, 3)], [draw(EXPERTS, 5)]
    order, offsets = torch.arange(10), torch.arange(EXPERTS + 1)
    return {
        "experts": Case().args(),
        "experts_extended": lora_arguments("merged", torch.float64, torch.float64),
        "permute": [x, ids, EXPERTS],
        "grouped_linear": [draw(10, 3), offsets, w, b],
        "expert_rows": [b, offsets, 10],
        "combine": [draw(10, 3), weights, order, offsets, 2, None],
    }


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["experts", "experts_extended", "permute", "grouped_linear", "expert_rows", "combine"])
def test_every_op_has_kernels(name: str, grad: bool) -> None:
    options: dict[str, Any] = {"activation": "silu"} if name.startswith("experts") else {}
    options |= {"scales": SCALES} if name == "experts_extended" else {}
    target = getattr(ops, name).default
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert unsupported(called(target, calls()[name], dtype, grad, **options), grad) is None


def test_what_torch_computes_is_everywhere() -> None:
    """``moefuse::own`` is a clone: it has no kernels, and needs none."""
    assert unsupported(called(ops.own.default, [torch.zeros(3)], requires_grad=True), True) is None


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_dtype_without_kernels_is_named(grad: bool) -> None:
    answer = unsupported(called(ops.grouped_linear.default, calls()["grouped_linear"], torch.complex64, grad), grad)
    assert answer == ("cuda", "no kernel for torch.complex64")
