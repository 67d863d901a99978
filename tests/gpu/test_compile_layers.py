"""``moefuse.compile_layers`` on a GPU: every number of tokens, graphs of CUDA, gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import moefuse
from tests.cpu.test_compile_layers import SIZES, Around, Sequences, graphs
from tests.dist import layers

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def close(got: Tensor, wanted: Tensor) -> None:
    """Of values in double precision."""
    torch.testing.assert_close(got.double(), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_one_graph_for_all_layers_and_sizes(first: int, mode: str | None) -> None:
    """Whichever size comes first."""
    model = Around(layers.Stacked).cuda()
    exact = copy.deepcopy(model).double()
    moefuse.compile_layers(model, mode=mode)
    with torch.no_grad():
        for tokens in (first, *SIZES, 300, *SIZES):
            x = torch.randn(tokens, layers.H, device="cuda")
            close(model(x), exact(x.double()))
    assert graphs() == 1
    assert [report.layers for report in moefuse.reports()] == [(10, 10)]


def test_inference_mode_beside_no_grad() -> None:
    model = Sequences(4).cuda()
    exact = copy.deepcopy(model).double()
    moefuse.compile_layers(model)
    for (batch, length), inference in itertools.product(((1, 5), (1, 1), (3, 1), (2, 4), (1, 7), (0, 3)), (False, True)):
        x = torch.randn(batch, length, layers.H, device="cuda")
        with torch.inference_mode(inference), torch.no_grad():
            close(model(x), exact(x.double()))
    assert graphs() == 2


def test_training() -> None:
    model = Around(layers.Stacked).cuda()
    exact = copy.deepcopy(model).double()
    moefuse.compile_layers(model)
    for tokens in SIZES:
        x = torch.randn(tokens, layers.H, device="cuda")
        for one, given in ((model, x), (exact, x.double())):
            one.zero_grad()
            one(given).square().sum().backward()
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad.double(), q.grad, atol=2e-3 * float(q.grad.abs().max() + 1), rtol=1e-2)
    assert graphs() <= 6
