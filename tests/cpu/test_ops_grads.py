"""Gradients of ``moefuse::experts``: against autograd of the reference, only what is asked for, and what is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.runtime import providers
from tests.cpu.ops_case import (
    Case,
    assert_equally_finite,
    every_body,
    leaves,
    not_finite,
    oracle_grads,
    reference,
    run,
    tensors,
    to,
)  # fmt: skip
from tests.cpu.test_ops_values import SIZES, STORAGE, poisoned_empty

__all__ = ["poisoned_empty"]


def _pull(out: Tensor) -> Tensor:
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.dtype)


def _check(c: Case, args: list[Any]) -> None:
    out, want = run(args, **c.options), reference(args, **c.options)
    ours = torch.autograd.grad(out, leaves(args), _pull(out))
    torch.testing.assert_close(list(ours), oracle_grads(want, leaves(args), _pull(out)))
    assert [g.stride() for g in ours] == [p.stride() for p in leaves(args)]


@pytest.mark.parametrize("case", every_body(), ids=lambda c: f"{c.activation}-{c.gating}{'-up-first' * c.up_first}")
def test_every_body(case: Case) -> None:
    for on_input in (False, True):
        c = case.with_(weight_on_input=on_input)
        _check(c, c.args(requires_grad=True))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["torch", "C++"])
@pytest.mark.parametrize("case", every_body(), ids=lambda c: f"{c.activation}-{c.gating}{'-up-first' * c.up_first}")
def test_a_gradient_that_is_not_finite(case: Case, dtype: torch.dtype, value: float) -> None:
    """Where relu or a clamp is off the gradient is zero: selected as in eager, and not a product, which would be NaN."""
    c = case.with_(dtype=dtype, inter=9)
    args = c.args(requires_grad=True)
    out, want = run(args, **c.options), reference(args, **c.options)
    ours = torch.autograd.grad(out, leaves(args), not_finite(out, value))
    assert_equally_finite(list(ours), oracle_grads(want, leaves(args), not_finite(want, value)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_sizes_and_storage(size: dict[str, Any], storage: dict[str, Any]) -> None:
    c = Case(**size, **storage, gating="separate")
    _check(c, c.args(requires_grad=True))


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("gating", ["merged", "separate", "plain"])
def test_gradcheck(gating: str, on_input: bool) -> None:
    c = Case(tokens=3, hidden=3, inter=2, hidden_out=2, gating=gating, weight_on_input=on_input)
    args = c.args(requires_grad=True)

    def f(*flat: Tensor) -> Tensor:
        source = iter(flat)
        call = [[next(source) for _ in a] if isinstance(a, list) else next(source) if a.is_floating_point() else a for a in args]
        return run(call, **c.options)

    assert torch.autograd.gradcheck(f, leaves(args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_gradients(dtype: torch.dtype) -> None:
    """Against float64, no more than 1.5 times the error that autograd of the reference makes in this dtype."""
    c = Case(tokens=40, hidden=48, inter=32, hidden_out=48, experts=4, dtype=dtype)
    args = c.args(requires_grad=True)
    exact_args = [[t.detach().requires_grad_() for t in a] if isinstance(a, list) else a for a in to(args, torch.float64)]
    for i in (0, 2):
        exact_args[i] = exact_args[i].detach().requires_grad_()
    grads = []
    for function, call in ((run, args), (reference, args), (reference, exact_args)):
        out = function(call, **c.options)
        grads.append(torch.autograd.grad(out, leaves(call), _pull(out)))
    for a, b, exact in zip(*grads, strict=True):
        error, allowed = (a.double() - exact).norm(), (b.double() - exact).norm()
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps * exact.norm()


NAMES = ("x", "weights", "w_in", "w_up", "w_out", "b_in", "b_up", "b_out")


@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_only_what_is_asked_for(wanted: str, on_input: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input alone gets its gradient, and the backward op returns nothing else."""
    c = Case(gating="separate", weight_on_input=on_input)
    args = c.args()
    index = {"x": 0, "weights": 2, "w_in": 3, "w_up": 4, "w_out": 5, "b_in": 6, "b_up": 7, "b_out": 8}[wanted]
    target = args[index][0] if isinstance(args[index], list) else args[index]
    target.requires_grad_()
    counts: list[int] = []
    portable = providers.PROVIDERS["experts_backward"][-1]

    def spy(*a: Any) -> list[Tensor]:
        out: list[Tensor] = portable.run(*a)
        counts.append(len(out))
        return out

    monkeypatch.setitem(providers.PROVIDERS, "experts_backward", [providers.Provider("spy", lambda *a: None, spy)])
    out = run(args, **c.options)
    (ours,) = torch.autograd.grad(out, target, _pull(out))
    (theirs,) = torch.autograd.grad(reference(args, **c.options), target, _pull(out))
    torch.testing.assert_close(ours, theirs)
    assert counts == [1]


def test_no_tokens_keeps_autograd_connected() -> None:
    args = Case(tokens=0).args(requires_grad=True)
    out = run(args)
    assert out.requires_grad
    out.sum().backward()
    assert all(t.grad is not None and (t.grad == 0).all() for t in leaves(args))


def test_untouched_experts_get_zeros() -> None:
    args = Case(experts=6, low_id=2, high_id=3, separate=True).args(requires_grad=True)
    run(args).sum().backward()
    for e, w in enumerate(args[3]):
        assert w.grad is not None
        assert bool((w.grad != 0).any()) == (e == 2)


def test_gradient_of_an_expanded_output() -> None:
    """sum() hands back a gradient with stride 0."""
    args = Case().args(requires_grad=True)
    ours = torch.autograd.grad(run(args).sum(), leaves(args))
    theirs = torch.autograd.grad(reference(args).sum(), leaves(args))
    torch.testing.assert_close(ours, theirs)


def test_out_dtype_gradient_is_in_the_dtype_of_the_input() -> None:
    args = Case(dtype=torch.bfloat16).args(requires_grad=True)
    out = run(args, out_dtype=torch.float32)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in leaves(args))


def test_saved_tensors_do_not_depend_on_routing_and_hold_no_weight_copy() -> None:
    shapes = []
    for low, high in ((0, 1), (0, 3), (-5, 0)):
        saved: list[Tensor] = []

        def keep(t: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(t)
            return t

        args = Case(low_id=low, high_id=high).args(requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            run(args)
        shapes.append([tuple(t.shape) for t in saved])
        storages = {t.data_ptr() for t in leaves(args)}
        weights = [t for t in saved if t.dim() == 3]
        assert weights
        assert all(t.data_ptr() in storages for t in weights)
    assert shapes[0] == shapes[1] == shapes[2]


def test_checkpointing_works() -> None:
    args = Case().args(requires_grad=True)
    want = torch.autograd.grad(run(args).sum(), leaves(args))
    out = torch.utils.checkpoint.checkpoint(lambda x: run([x, *args[1:]]), args[0], use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), leaves(args)), want)


def test_inplace_change_between_forward_and_backward_is_refused() -> None:
    args = Case().args(requires_grad=True)
    out = run(args)
    with torch.no_grad():
        args[3][0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_grad_and_inference_mode() -> None:
    args = Case().args(requires_grad=True)
    want = run(args)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = run(args)
        assert not out.requires_grad
        torch.testing.assert_close(out, want)


def test_all_arguments_reach_every_tensor() -> None:
    """The helper's call really has a gradient for each floating tensor."""
    c = Case(gating="separate")
    assert len(leaves(c.args())) == len(tensors(c.args())) - 1
