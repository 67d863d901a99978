"""A layer that reads what another gave, with nothing in between: no norm, no residual, not even a view."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch import Tensor, nn

from moefuse.config import Options
from tests.cpu.capture_case import Seen, capturing, plain
from tests.programs import check
from tests.programs.chain import Chain, chain, fitted, rows_for
from tests.programs.program import Masked, Noise, Program, Selected, Slots, Sorted
from tests.strategies import FEW, PHASES, programs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

T, H = 6, 8


class Layer(nn.Module):
    """A loop over a list of experts."""

    def __init__(self, inter: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k, self.gate = top_k, nn.Linear(H, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, inter), nn.GELU(), nn.Linear(inter, H)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


def results(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, grad: bool) -> list[Tensor]:
    """The output, and gradients of the input and of all weights."""
    x = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        out = run(x)
    return [out.detach(), *(torch.autograd.grad(out.square().sum(), [x, *model.parameters()]) if grad else ())]


def same(compiled: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, grad: bool) -> None:
    """Results are as far from those in float64 as eager's are, or a few roundings."""
    exact = copy.deepcopy(model).double()
    for got, eager, true in zip(
        results(compiled, model, x, grad), results(model, model, x, grad), results(exact, exact, x.double(), grad), strict=True
    ):
        allowed = 2 * float((eager - true).abs().max()) + 16 * 2.0**-23 * float(true.abs().max())
        assert float((got - true).abs().max()) <= allowed


@pytest.mark.parametrize("grad", [False, True])
def test_a_loop_behind_loops_of_other_sizes(grad: bool) -> None:
    """The last one has the sizes of the first: one proof speaks for both."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(12, 3, 2), Layer(20, 4, 3), Layer(12, 3, 2)), torch.randn(T, H)
    seen = Seen()
    same(torch.compile(model, backend=capturing(seen, plain())), model, x, grad)
    assert (len(seen.graphs), len(seen.report.fused), seen.report.skipped) == (1, 3, [])


def test_any_layer_behind_any_other() -> None:
    """Also where both go by one router: rows of the first one's sum are those of the second one's tokens."""

    @settings(phases=PHASES, max_examples=FEW, suppress_health_check=list(HealthCheck))
    @given(st.lists(programs(dtypes=("float32",)), min_size=2, max_size=2), st.booleans())
    def run(layers: list[Program], shared: bool) -> None:
        found = fitted(layers, shared)
        assume(found is not None)
        model = chain(found, shared)  # type: ignore[arg-type]
        x = rows_for(model, 0)
        assume(x is not None)
        compare(model, x)  # type: ignore[arg-type]

    run()


SHARED = [Program(spelling=Selected()), Program(spelling=Selected(gather="index_select"), noise=Noise(noop="clone"))]
MASKED = [Program(spelling=Masked()), Program(spelling=Masked(weight="scatter", accumulate="list_sum"))]
BY_SLOT = [Program(), Program(spelling=Slots())]
BY_ORDER = [Program(spelling=Selected(find="any_mask", combine="set_sum")), Program(spelling=Sorted())]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layers", "shared"),
    [(SHARED, True), (MASKED, False), (MASKED, True), (BY_SLOT, False), (BY_ORDER, False)],
    ids=["rows of a sum", "masks", "masks of one router", "slots", "sorted"],
)
def test_a_sum_is_a_plain_tensor_to_the_next_layer(layers: list[Program], shared: bool) -> None:
    model = chain(fitted(layers, shared) or [], shared)
    compare(model, next(x for seed in range(20) if (x := rows_for(model, seed)) is not None))


def compare(model: Chain, x: Tensor) -> None:
    """Both layers are fused, in one graph; the result, and all gradients, are within an error budget."""
    torch._dynamo.reset()
    outcome, exact = check.Outcome(), model.exact()
    compiled = torch.compile(model, backend=check.light(outcome), fullgraph=True)
    got, eager = (check.execute(lambda x, f=f: (f(x),), model, (x,)) for f in (compiled, model))
    # Each layer's own error goes through the other.
    check.compare(got, eager, check.execute(lambda x: (exact(x),), exact, (x.double(),)), factor=8)
    assert (len(outcome.fused), outcome.skipped, outcome.graphs) == (2, [], 1), str(outcome)


class Itself(nn.Module):
    """Experts that read the sum that they are added to: in place each finds what those before it have added, else what it was first."""

    def __init__(self, find: str, inplace: bool) -> None:
        super().__init__()
        self.find, self.inplace, self.gate = find, inplace, nn.Linear(H, 3, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(3, 4, H)), nn.Parameter(torch.randn(3, H, 4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = x + 1
        read = out.view(-1, H) if self.find == "view" else out
        for e in range(3):
            tok, slot = torch.where(ids == e)
            y = F.linear(F.gelu(F.linear(read[tok], self.up[e])), self.down[e]) * weights[tok, slot, None]
            out = out.index_add_(0, tok, y) if self.inplace else out.index_add(0, tok, y)
        return out


@pytest.mark.parametrize("find", ["name", "view"])
@pytest.mark.parametrize("inplace", [False, True])
def test_experts_that_read_the_sum_they_are_added_to(find: str, inplace: bool) -> None:
    """Without the verification, which would catch what the facts get wrong."""
    torch.manual_seed(0)
    model, x, outcome = Itself(find, inplace), torch.randn(T, H), check.Outcome()
    same(torch.compile(model, backend=check.light(outcome, Options(verify="off")), fullgraph=True), model, x, False)
    assert len(outcome.fused) == (0 if inplace else 1)
    if not inplace:
        torch._dynamo.reset()
        same(torch.compile(model, backend=check.light(outcome), fullgraph=True), model, x, False)
        assert (len(outcome.fused), outcome.skipped) == (2, [])
