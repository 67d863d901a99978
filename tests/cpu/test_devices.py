"""A replacement is made only where every op in it has a kernel: asked of the providers, with fake tensors of another device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from moefuse.passes.lower.devices import unsupported
from moefuse.runtime import providers
from tests.cpu.ops_case import Case

DEVICE = "meta"


def replacement(requires_grad: bool = False) -> list[Node]:
    """A graph's call of the op on ``DEVICE``."""
    graph = Graph()

    def node(value: torch.Tensor) -> Node:
        made = graph.placeholder("x")
        made.meta["example_value"] = value.to(DEVICE).requires_grad_(requires_grad and value.is_floating_point())
        return made

    args = [[node(t) for t in a] if isinstance(a, list) else node(a) for a in Case().args()]
    return [graph.call_function(torch.ops.moefuse.experts.default, tuple(args), {"activation": "silu"})]


@pytest.fixture
def kernel() -> Iterator[list[Any]]:
    """A provider for ``DEVICE`` that answers with what is in the list."""
    answers: list[Any] = [None]
    providers.register("experts", providers.Provider("there", lambda *a: answers[0], lambda *a: None, device=DEVICE))
    yield answers
    providers.unregister("experts", "there")


def test_no_kernel_at_all() -> None:
    assert unsupported(replacement(), False) == (DEVICE, "no kernel for experts")


def test_a_kernel_that_takes_the_call(kernel: list[Any]) -> None:
    assert unsupported(replacement(), False) is None


def test_a_kernel_that_says_why_not(kernel: list[Any]) -> None:
    kernel[0] = "only even numbers of tokens"
    assert unsupported(replacement(), False) == (DEVICE, "only even numbers of tokens")


def test_a_gradient_needs_kernels_of_its_own(kernel: list[Any]) -> None:
    """Grad mode alone is no training: something must require a gradient."""
    assert unsupported(replacement(), True) is None
    assert unsupported(replacement(requires_grad=True), False) is None
    assert unsupported(replacement(requires_grad=True), True) == (DEVICE, "no kernel for experts_forward (training)")


def test_the_cpu_has_everything() -> None:
    """Also when a provider for elsewhere is asked first."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2, requires_grad=True)
    assert unsupported([graph.call_function(torch.ops.moefuse.permute.default, (x, x, 3))], True) is None
