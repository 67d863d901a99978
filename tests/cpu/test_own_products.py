"""Products of classes that do more than multiply by what is unpacked: they stay what they are, whatever numbers they have today.

What each would be without its step is fused; with numbers of today most steps change nothing, so it is what is computed that tells.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.cpu.test_fp8_operators import Compiled
from tests.programs.held import Channels, Expert, H
from tests.programs.own_products import (
    BACKWARD,
    HIDDEN,
    MORE,
    MORE_OF_GRADIENTS,
    PLACES,
    SAME,
    SHOWN,
    Dispatched,
    How,
    Layer,
    Limited,
    Place,
    kind,
)

EXAMPLES = 5 if settings().max_examples < 100 else 400
SIZES = (1.0, 1e12, 1e-9)


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def agree(compiled: Compiled, x: Tensor, *, train: bool = True) -> None:
    """Results, and gradients of tokens, are the program's, NaN for NaN."""
    found = []
    for run in (compiled.run, compiled.model):
        x = x.detach().requires_grad_(train)
        out = run(x)
        found.append([out.detach()])
        if train and out.requires_grad:
            found[-1] += torch.autograd.grad(out, x, torch.sin(torch.arange(out.numel())).view_as(out), allow_unused=True)
    for got, wanted in zip(*found, strict=True):
        largest = float(wanted.nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * largest, equal_nan=True)


def run(of: type, *, train: bool = True) -> Compiled:
    """With scales as they are, with larger and with smaller ones."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layer(of)
    compiled = Compiled(model)
    x = torch.randn(5, H)
    for size in SIZES:
        model.scale(size)
        agree(compiled, x, train=train)
        model.scale(1 / size)
    return compiled


def is_refused(compiled: Compiled, *texts: str) -> None:
    assert not compiled.ops, str(compiled.report)
    assert {s.code for s in compiled.report.skipped} == {"quantised"}, str(compiled.report)
    message = compiled.report.skipped[0].message
    assert any(text in message for text in texts), message


REFUSED: dict[str, tuple[How, str]] = {
    "rows are cut off": (How("rows", MORE["clamp"]), "unpacked weights: `clamp` of rows at "),
    "results are cut off": (How("result", MORE["clamp"]), "unpacked weights: `clamp` of rows at "),
    "results are numbers": (How("result", MORE["nan_to_num"]), "unpacked weights: `nan_to_num` of rows at "),
    "weights are cut off": (How("weight", MORE["clamp"]), "unpacked weights: `clamp` of scales at "),
    "scales are cut off": (How("scales", MORE["clamp"]), "unpacked weights: `clamp` of scales at "),
    "rows have no gradient": (How("rows", torch.detach), "their own product gives rows no gradient"),
    "half of a gradient": (How("gradient", MORE["half"], own=True), "multiplies by other numbers than its forward pass (apart by 5.0e-01)"),
    "a gradient is cut off": (How("gradient", MORE["clamp"], own=True), "more than a product: `clamp` of a gradient at "),
    "its weights are": (How("backward weight", MORE["where"], own=True), "more than a product: `abs` of scales at "),
    "a gradient is cut off behind": (How("result", MORE_OF_GRADIENTS["clipped"]), "more than a product: `clamp` of a gradient at "),
    "a hook": (How("rows", MORE_OF_GRADIENTS["hooked"]), "more than a product: `clamp` of a gradient at "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_more_than_a_product(name: str) -> None:
    """The message names the operation, and the class's line."""
    how, text = REFUSED[name]
    is_refused(run(kind(how)), text)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_a_product(own: bool, behind: bool) -> None:
    """What these are near to, and functions that are the gradient."""
    compiled = run(kind(How(own=own, behind=behind)))
    assert len(compiled.ops) == 1, str(compiled.report)


def test_dispatched() -> None:
    """The same of a class that has a say in aten's products alone."""
    compiled = run(Dispatched)
    assert len(compiled.ops) == 1, str(compiled.report)
    is_refused(run(Limited), "`clamp` of rows")


def test_operators_in_it() -> None:
    """What Python computes in them is seen; what nobody sees may be anything."""
    shown, hidden = (run(kind(How("weight", op)), train=False) for op in (SHOWN, HIDDEN))
    assert len(shown.ops) == 1, str(shown.report)
    is_refused(hidden, "`own_products_0a1b2c3::hidden`, which cannot be looked into")


@pytest.mark.parametrize("name", ["half of a gradient", "rows have no gradient"])
def test_without_gradients(name: str) -> None:
    """Nobody asks for them."""
    compiled = run(kind(REFUSED[name][0]), train=False)
    assert len(compiled.ops) == 1, str(compiled.report)


class Twice(Channels):
    """A bias is added twice."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or len(args) < 3 or args[2] is None:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return args[1].times(args[0]) + args[2] * 2


class Biased(Expert):
    def __init__(self, make: Any, dtype: torch.dtype) -> None:
        super().__init__(make, dtype)
        self.bias = torch.nn.Parameter(torch.randn(H, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down, bias = self.gate, self.up, self.down, self.bias
        return F.linear(F.silu(F.linear(x, gate, bias)) * F.linear(x, up, bias), down, bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [Channels, Twice])
def test_a_bias(of: type[Channels]) -> None:
    """It is added as it is, or the class is not read."""
    compiled = Compiled(Layer(of, Biased))
    agree(compiled, torch.randn(5, H))
    if of is Channels:
        assert len(compiled.ops) == 1, str(compiled.report)
    else:
        is_refused(compiled, "`mul` of a bias")


@st.composite
def hows(draw: st.DrawFn, same: bool) -> tuple[How, str]:
    place: Place = draw(st.sampled_from(PLACES))
    known = SAME if same else {**MORE, **(MORE_OF_GRADIENTS if place in ("rows", "result") else {})}
    name = draw(st.sampled_from(sorted(known)))
    own = place in BACKWARD or (name not in MORE_OF_GRADIENTS and draw(st.booleans()))
    return How(place, known[name], own=own, behind=draw(st.booleans())), f"{name} of {place}"


@settings(max_examples=EXAMPLES)
@given(hows(False))
def test_another_step_anywhere(drawn: tuple[How, str]) -> None:
    """Whatever it is, results and gradients are the program's, for scales of all sizes: it is refused, or read as what it is."""
    run(kind(drawn[0]))


@settings(max_examples=EXAMPLES)
@given(hows(True))
def test_steps_that_change_nothing(drawn: tuple[How, str]) -> None:
    """They are read."""
    compiled = run(kind(drawn[0]))
    assert len(compiled.ops) == 1, f"{drawn[1]}: {compiled.report}"
