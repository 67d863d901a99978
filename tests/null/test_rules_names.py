"""Canonical names: however an operation is spelled, the rules see one name, one order of arguments, and whether it writes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from moefuse.passes.graph.calls import call_of
from moefuse.passes.rules import RULES, rule
from tests.null.rules_case import call, trace

SPELLINGS: list[tuple[Callable[..., Any], str, bool]] = [
    (lambda x, x2: x * x2, "mul", False),
    (lambda x, x2: torch.mul(x, x2), "mul", False),
    (lambda x, x2: torch.multiply(input=x, other=x2), "mul", False),
    (lambda x, x2: x.multiply(x2), "mul", False),
    (lambda x, x2: x.mul_(x2), "mul", True),
    (lambda x, x2: call(operator.imul, x, x, x2), "mul", True),
    (lambda x, x2: torch.ops.aten.mul.Tensor(x, x2), "mul", False),
    (lambda x, x2: x / x2, "div", False),
    (lambda x, x2: torch.true_divide(x, x2), "div", False),
    (lambda x, x2: x.divide_(x2), "div", True),
    (lambda x, x2: x - x2, "sub", False),
    (lambda x, x2: torch.subtract(x, x2), "sub", False),
    (lambda x, x2: x + x2, "add", False),
    (lambda x, x2: call(operator.iadd, x, x, x2), "add", True),
    (lambda x, x2: x @ x2.T, "matmul", False),
    (lambda x, x2: torch.cat([x, x2]), "cat", False),
    (lambda x, x2: torch.concatenate([x, x2]), "cat", False),
    (lambda x: F.silu(x), "silu", False),
    (lambda x: F.silu(x, inplace=True), "silu", True),
    (lambda x: F.relu(x), "relu", False),
    (lambda x: torch.relu_(x), "relu", True),
    (lambda x: x.clip(min=0), "clamp", False),
    (lambda x: torch.clamp_(x, 0, 1), "clamp", True),
    (lambda x: torch.negative(x), "neg", False),
    (lambda x: x.bfloat16(), "to", False),
    (lambda x: x.to(torch.bfloat16), "to", False),
    (lambda x: x.type(torch.bfloat16), "to", False),
    (lambda x: x.swapaxes(0, 1), "transpose", False),
    (lambda x: torch.swapdims(x, 0, 1), "transpose", False),
    (lambda x: torch.moveaxis(x, 0, 1), "movedim", False),
    (lambda ids: ids == 1, "eq", False),
    (lambda ids: torch.eq(ids, 1), "eq", False),
    (lambda ids: ids.eq(1), "eq", False),
    (lambda ids: ids != 1, "ne", False),
    (lambda ids: torch.not_equal(ids, 1), "ne", False),
    (lambda ids: ~(ids == 1), "bitwise_not", False),
    (lambda ids: torch.logical_not(ids == 1), "bitwise_not", False),
    (lambda x, x2: torch.max(x, x2), "maximum", False),
    (lambda x, x2: x.min(other=x2), "minimum", False),
    (lambda x: x.max(-1), "max", False),
    (lambda x: x.max(), "max", False),
    (lambda ids: torch.logical_or(ids == 1, ids == 2), "bitwise_or", False),
    (lambda ids: torch.argwhere(ids), "nonzero", False),
    (lambda ids: ids // 2, "floor_divide", False),
]


@pytest.mark.parametrize(("function", "name", "inplace"), SPELLINGS)
def test_spellings_of_one_operation(function: Callable[..., Any], name: str, inplace: bool) -> None:
    call = call_of(trace(function).returned)
    assert call is not None
    assert (call.name, call.inplace) == (name, inplace)


def test_keywords_of_the_first_argument_come_first() -> None:
    """`torch.mul(input=x, other=y)` and `torch.mul(x, y)` have their tensor in one place."""
    traced = trace(lambda x, x2: torch.mul(input=x, other=x2))
    call = call_of(traced.returned)
    assert call is not None
    assert [str(a) for a in call.args] == ["x"]
    assert list(call.kwargs) == ["other"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, x2: torch.where(x > 0, x, x2),
        lambda x, x2: x.where(x > 0, x2),
        lambda x, x2: x.where(condition=x > 0, other=x2),
        lambda x, x2: torch.where(x > 0, input=x, other=x2),
        lambda x, x2: torch.where(condition=x > 0, input=x, other=x2),
        lambda x, x2: torch.ops.aten.where.self(x > 0, x, x2),
    ],
)
def test_a_condition_comes_first(function: Callable[..., Any]) -> None:
    """What is kept comes first of a method, and of the keywords of the function."""
    traced = trace(function)
    call = call_of(traced.returned)
    assert call is not None
    assert call.name == "where"
    condition, *kept = call.args
    assert (call_of(condition).name, [str(v) for v in (*kept, *call.kwargs.values())]) == ("gt", ["x", "x2"])  # type: ignore[union-attr]


def test_casts_by_name_carry_their_dtype() -> None:
    call = call_of(trace(lambda x: x.half()).returned)
    assert call is not None
    assert call.args[1:] == (torch.float16,)


@pytest.mark.parametrize("op", ["placeholder", "output"])
def test_what_is_no_operation_has_no_call(op: str) -> None:
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    assert call_of(next(iter(graph.find_nodes(op=op)))) is None


def test_a_name_has_one_rule() -> None:
    """Two families that claim one operation would depend on the order of imports."""
    with pytest.raises(ValueError, match=r"operation 'softmax' has two rules: moefuse\.passes\.rules\.rows\.reductions and "):
        rule("softmax")(lambda ctx, node: None)
    assert RULES["softmax"].__module__ == "moefuse.passes.rules.rows.reductions"


def test_what_a_triton_kernel_of_the_users_may_write_to() -> None:
    """Any tensor that it gets; a call of it has no name that says so."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    given = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}, "kwargs": {"x": x, "y": y}}
    call = call_of(graph.call_function(triton_kernel_wrapper_mutation, (), given))
    assert call is not None
    assert call.inplace
    assert call.targets == (x, y)
