"""The C++ kernels of training: against autograd of the reference, in every body, dtype and storage, and when they step aside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.runtime import native, providers
from tests.cpu.ops_case import Case, assert_as_exact, every_body, leaves, reference, run, to

pytestmark = pytest.mark.skipif(not native.ready("train"), reason="no working C++ compiler")

STORAGE = [
    pytest.param({}, id="stacked"),
    pytest.param({"transposed": True}, id="in-out-storage"),
    pytest.param({"separate": True}, id="a-parameter-per-expert"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BIG: dict[str, Any] = {"tokens": 230, "hidden": 70, "inter": 37, "hidden_out": 131}


class Log:
    """Calls of the two ops that the C++ kernels left."""

    def __init__(self) -> None:
        self.general: list[str] = []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log, run_provider = Log(), providers.run

    def spy(op: str, *args: Any) -> Any:
        log.general.append(op)
        return run_provider(op, *args)

    monkeypatch.setattr(providers, "run", spy)
    return log


@pytest.fixture(autouse=True)
def widened() -> Iterator[None]:
    """16-bit GEMMs run in float32, also on a CPU that has instructions for them."""
    native.widen(True, True)
    yield
    native.widen(torch.float16 in native.WIDENED, torch.bfloat16 in native.WIDENED)


def pull_of(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)


def gradients(function: Any, args: list[Any], c: Case) -> list[Tensor]:
    out = function(args, **c.options)
    return [out.detach(), *torch.autograd.grad(out, leaves(args), pull_of(out))]


def exact(args: list[Any], c: Case) -> list[Tensor]:
    wide = [[t.detach().requires_grad_() for t in a] if isinstance(a, list) else a for a in to(args, torch.float64)]
    for i in (0, 2):
        wide[i] = wide[i].detach().requires_grad_()
    out = reference(wide, **{**c.options, "out_dtype": None})
    pull = pull_of(torch.empty(out.shape, dtype=c.out_dtype or c.dtype)).double()
    return [out.detach(), *torch.autograd.grad(out, leaves(wide), pull)]


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGE)
def test_every_body_within_the_error_of_autograd(storage: dict[str, Any], dtype: torch.dtype, log: Log) -> None:
    """No more than 1.5 times the error of the reference in this dtype, against float64. Odd sizes, several chunks, ids out of range."""
    for i, case in enumerate(every_body()):
        out_dtype = (None, torch.float32, torch.float64)[i % 3]
        c = case.with_(**storage, **BIG, dtype=dtype, weight_on_input=i % 2 == 0, out_dtype=out_dtype)
        args = c.args(requires_grad=True)
        log.general.clear()
        ours = gradients(run, args, c)
        assert log.general == []
        assert [g.stride() for g in ours[1:]] == [t.stride() for t in leaves(args)]
        for a, b, truth in zip(ours, gradients(reference, args, c), exact(args, c), strict=True):
            assert a.dtype == b.dtype
            error, allowed = (a.double() - truth).norm(), (b.double() - truth).norm()
            assert error <= 1.5 * allowed + 2 * torch.finfo(dtype).eps * truth.norm(), (case, float(error), float(allowed))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 17])
def test_few_tokens(tokens: int, log: Log) -> None:
    """No rows at all, experts without rows, and rests of every vector loop."""
    c = Case(tokens=tokens, dtype=torch.float32, hidden=17, inter=3, hidden_out=5, experts=6)
    args = c.args(requires_grad=True)
    for ours, theirs in zip(gradients(run, args, c), gradients_or_zeros(args, c), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert log.general == []


def gradients_or_zeros(args: list[Any], c: Case) -> list[Tensor]:
    out = reference(args, **c.options)
    if not out.requires_grad:
        return [out, *(torch.zeros_like(t) for t in leaves(args))]
    grads = torch.autograd.grad(out, leaves(args), pull_of(out), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves(args), grads, strict=True))]


NAMES = ("x", "weights", "w_in", "w_up", "w_out", "b_in", "b_up", "b_out")


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("wanted", NAMES)
def test_each_gradient_alone(wanted: str, on_input: bool, log: Log) -> None:
    """What is not asked for is not computed, and nothing that is depends on it."""
    c = Case(gating="separate", weight_on_input=on_input, dtype=torch.float32, **BIG)
    args = c.args()
    index = {"x": 0, "weights": 2, "w_in": 3, "w_up": 4, "w_out": 5, "b_in": 6, "b_up": 7, "b_out": 8}[wanted]
    target = args[index][0] if isinstance(args[index], list) else args[index]
    target.requires_grad_()
    out = run(args, **c.options)
    (ours,) = torch.autograd.grad(out, target, pull_of(out))
    (theirs,) = torch.autograd.grad(reference(args, **c.options), target, pull_of(out))
    assert_as_exact(ours, theirs, exact(args, c)[1 + NAMES.index(wanted)])
    assert log.general == []


def test_an_expanded_gradient_and_a_transposed_input(log: Log) -> None:
    """sum() hands back a gradient of stride 0; x may be any view."""
    c = Case(dtype=torch.float32, **BIG)
    args = c.args(requires_grad=True)
    args[0] = args[0].detach().t().contiguous().t().requires_grad_()
    wide = to(args, torch.float64)
    calls = ((run, args), (reference, args), (reference, wide))
    for gradients_of_one in zip(*(torch.autograd.grad(f(a).sum(), leaves(a)) for f, a in calls), strict=True):
        assert_as_exact(*gradients_of_one)
    assert log.general == []


def test_nan_stays_in_its_token_and_its_expert() -> None:
    """A poisoned token spoils its own gradient and those of its experts, and no other."""
    c = Case(dtype=torch.float32, top_k=1, low_id=0, high_id=3, bias=False, **BIG)
    args = c.args(requires_grad=True)
    poisoned = args[0].detach().clone()
    poisoned[5] = math.nan
    args[0] = poisoned.requires_grad_()
    out = run(args)
    d_x, d_w = torch.autograd.grad(out, [args[0], args[3][0]], torch.ones_like(out))
    assert d_x[5].isnan().all()
    assert d_x[torch.arange(230) != 5].isfinite().all()
    hit = int(args[1][5, 0])
    assert [bool(d_w[e].isnan().any()) for e in range(3)] == [e == hit for e in range(3)]


def test_the_same_bits_every_time() -> None:
    c = Case(dtype=torch.float32, experts=16, top_k=4, **BIG)
    args = c.args(requires_grad=True)
    first = gradients(run, args, c)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(run, args, c), strict=True))


def test_one_expert_with_most_of_the_rows(log: Log) -> None:
    """Its chunk runs on all threads before the others run one to a thread."""
    c = Case(dtype=torch.float32, experts=12, top_k=2, tokens=900, hidden=70, inter=37, hidden_out=131, low_id=0, high_id=12)
    args = c.args(requires_grad=True)
    args[1][:, 0] = 3
    for ours, theirs, truth in zip(gradients(run, args, c), gradients(reference, args, c), exact(args, c), strict=True):
        assert_as_exact(ours, theirs, truth)
    assert log.general == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"dtype": torch.float64}, id="float64"),
        pytest.param({"strided": True}, id="weights-with-gaps"),
        pytest.param({"widen": False, "dtype": torch.bfloat16}, id="a-cpu-with-bfloat16-instructions"),
    ],
)
def test_what_goes_to_the_general_ops(change: dict[str, Any], log: Log) -> None:
    """These calls are right too, and the portable code has them."""
    if not change.get("widen", True):
        native.widen(False, False)
    c = Case(tokens=40, dtype=change.get("dtype", torch.float32))
    args = c.args(requires_grad=True)
    if "strided" in change:
        wide = torch.zeros(3, 8, 9, requires_grad=True)
        args[3] = [wide[:, :, :6]]
        leaf = wide
    else:
        leaf = args[3][0]
    (ours,) = torch.autograd.grad(run(args).float().square().sum(), leaf)
    (theirs,) = torch.autograd.grad(reference(args).float().square().sum(), leaf)
    assert (ours - theirs).norm() <= 4 * torch.finfo(c.dtype).eps * theirs.norm()
    assert "experts_backward" in log.general


def test_a_provider_for_the_cpu_comes_first() -> None:
    """A registered provider takes the op back from the C++ kernel, and gives it back."""
    calls: list[str] = []
    portable = providers.PROVIDERS["experts_backward"][-1]

    def spy(*args: Any) -> Any:
        calls.append("spy")
        return portable.run(*args)

    args = Case(dtype=torch.float32).args(requires_grad=True)
    providers.register("experts_backward", providers.Provider("spy", lambda *a: None, spy))
    try:
        run(args).sum().backward()
        assert calls == ["spy"]
    finally:
        providers.unregister("experts_backward", "spy")
    run(args).sum().backward()
    assert calls == ["spy"]
