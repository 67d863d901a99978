"""Spellings of research and remote code: each is fused, or refused in words that its author understands; values always hold."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.programs.check import compare, execute
from tests.programs.research import SPELLINGS, TWINS, Layer
from tests.programs.research.base import H

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TOKENS = 6


def checked(
    cls: type[Layer], tokens: int, dtype: torch.dtype = torch.float32, *, train: bool = True, grad: bool = True, seeds: int = 2
) -> Seen:
    """Compile, and hold outputs and gradients of two inputs against float64; eager's own error is the budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = cls().to(dtype).train(train)
    exact, twin, seen = copy.deepcopy(model).double(), copy.deepcopy(model), Seen()
    compiled = torch.compile(model, backend=capturing(seen), dynamic=False)
    for seed in range(seeds):
        x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)).to(dtype)
        runs = [
            execute(lambda t, call=call: (call(t),), module, (x.to(wide),), grad=grad)
            for call, module, wide in ((compiled, model, dtype), (twin, twin, dtype), (exact, exact, torch.float64))
        ]
        compare(*runs)
    return seen


def line_of(cls: type[Layer]) -> str:
    """``file:line`` of the statement with the comment ``# at: <class>``; the file alone where there is none."""
    path = inspect.getsourcefile(cls)
    lines, _ = inspect.findsource(cls)
    found = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# at: {cls.__name__}")]
    return f"{path}:{found[0]}" if found else f"{path}:"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cls", SPELLINGS.values(), ids=SPELLINGS)
def test_spelling(cls: type[Layer]) -> None:
    expected = cls.expected
    seen = checked(cls, TOKENS, train=expected.train, grad=expected.grad)
    found = [(f.tier, f.domain) for f in seen.report.fused]
    assert found == ([(expected.tier, expected.domain)] if expected.tier else []), str(seen.report)
    here = line_of(cls)
    assert [(s.code, s.message) for s in seen.report.skipped if s.location == here] == (
        [(expected.code, expected.message)] if expected.code else []
    )
    assert [s.code for s in seen.report.skipped if s.location != here] == ([expected.after] if expected.after else []), str(seen.report)
    assert (len(seen.graphs) == 1 and not seen.report.graph_breaks) == expected.whole, str(seen.report)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("cls", SPELLINGS.values(), ids=SPELLINGS)
def test_few_and_odd_tokens(cls: type[Layer], tokens: int) -> None:
    seen = checked(cls, tokens, train=cls.expected.train, grad=cls.expected.grad, seeds=1)
    expected = cls.expected.tier if tokens > 1 or not cls.expected.several else None
    assert [f.tier for f in seen.report.fused] == ([expected] if expected else []), str(seen.report)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("cls", TWINS.values(), ids=TWINS)
def test_twin(cls: type[Layer]) -> None:
    seen = checked(cls, TOKENS)
    assert seen.report.fused == [], str(seen.report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["DeepseekTrain", "MakeMoE", "SparseDispatcher", "NormInside", "ThreeOperands", "LowRank"])
def test_bfloat16(name: str) -> None:
    """Rounding of the program's own dtype is the budget."""
    cls = SPELLINGS[name]
    seen = checked(cls, TOKENS, torch.bfloat16)
    assert [f.tier for f in seen.report.fused] == [cls.expected.tier], str(seen.report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["DeepseekTrain", "SparseDispatcher", "LlamaMoe"])
def test_through_inductor(name: str) -> None:
    """What user code gets: the backend by name, no graph break, and compiled code."""
    torch.manual_seed(0)
    model = SPELLINGS[name]()
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="moefuse", fullgraph=True)
    x = torch.randn(TOKENS, H)
    ours, eager, truth = (
        execute(lambda t, call=call: (call(t),), module, (x.to(next(module.parameters()).dtype),))
        for call, module in ((compiled, model), (twin, twin), (exact, exact))
    )
    compare(ours, eager, truth)
    assert len(moefuse.last_report().fused) == 1
