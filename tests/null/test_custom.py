"""Operators of libraries that are read as the operator of ATen that they are, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

from moefuse.passes.graph.calls import call_of
from moefuse.passes.ir.facts import Sum
from tests.null import library_ops
from tests.null.rules_case import E, H, call, fact_of


def read(op: Any, *more: Any, trained: bool = False, together: bool = False, **kwargs: Any) -> Any:
    graph = torch.fx.Graph()
    values = (torch.zeros(7, 4, requires_grad=trained), torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 4, requires_grad=trained))
    nodes = []
    for name, value in zip(("out", "index", "src"), values, strict=True):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["example_value"] = value
    node = graph.call_function(op, (nodes,) if together else (*nodes, *more), kwargs)
    node.meta["example_value"] = torch.zeros(7, 4)
    found = call_of(node)
    assert found is not None
    return found.name, tuple(a.name if isinstance(a, torch.fx.Node) else a for a in found.args), dict(found.kwargs)


@pytest.mark.parametrize("packet", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_another_name_of_an_operator(trained: bool, packet: bool) -> None:
    op = library_ops.deterministic
    assert read(op.overloadpacket if packet else op, trained=trained) == ("scatter_add", ("out", 0, "index", "src"), {})
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_number_that_it_is_given(dim: int) -> None:
    assert read(library_ops.along, dim) == ("scatter_add", ("out", dim, "index", "src"), {})


def test_lists_and_names_are_not_read() -> None:
    assert read(library_ops.of_list, together=True)[0] == "moefuse_tests::_of_list"
    assert read(library_ops.along, dim=0)[0] == "moefuse_tests::_along"


def test_without_gradients_no_formula_is_needed() -> None:
    assert read(library_ops.untrained)[0] == "scatter_add"


@pytest.mark.parametrize("op", library_ops.ALIKE.values(), ids=library_ops.ALIKE)
def test_what_is_no_operator_of_aten_keeps_its_name(op: Any) -> None:
    """A branch, a loop and what Python holds may do something else in another call; two operations are not one."""
    assert read(op)[0] == op._schema.name


@pytest.mark.parametrize("op", library_ops.OTHER_GRADIENTS.values(), ids=library_ops.OTHER_GRADIENTS)
def test_with_other_gradients_it_is_another_operator(op: Any) -> None:
    assert read(op)[0] == "scatter_add"
    assert read(op, trained=True)[0] == op._schema.name


@pytest.mark.parametrize(("op", "known"), [(library_ops.deterministic, True), (library_ops.ALIKE["a factor"], False)])
def test_rules_see_what_it_computes(op: Any, known: bool) -> None:
    def function(x: Any, ids: Any, weights: Any, w_up: Any, w_out: Any) -> Any:
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = F.linear(F.silu(F.linear(x[tok], w_up[e])), w_out[e]) * weights[tok, slot, None]
            out = call(op, x, out, tok[:, None].expand(-1, H), y)
        return out

    fact = fact_of(function)
    assert isinstance(fact, Sum) is known
