"""``moefuse::experts_extended`` against the experts whose weights have the terms added."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.lora_case import SCALES, SMALL, arguments, merged, ours, results, tensors

T, E, K, H, INNER = SMALL


@pytest.mark.parametrize("stacked", [True, False], ids=("stacked", "list"))
@pytest.mark.parametrize("on_input", [False, True], ids=("output", "input"))
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
def test_values_and_gradients(gating: str, on_input: bool, stacked: bool) -> None:
    """Every gradient there is, in float64: of tokens, routing weights, weights, biases, A and B, of experts without tokens too."""
    args = arguments(gating, torch.float64, torch.float64, stacked=stacked)
    options = {"gating": gating, "weight_on_input": on_input}
    found = torch.ops.moefuse.experts_extended(*args, scales=SCALES, **options)
    expected = merged(args, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, theirs = (torch.autograd.grad(y, tensors(args), seed, retain_graph=True, materialize_grads=True) for y in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_float32_factors_beside_bfloat16() -> None:
    """Gradients of float32 factors are float32 all the way, and a frozen base has none."""
    args = arguments("merged", torch.bfloat16, torch.float32, bias=False)
    factors = [t for part in args[9:] for t in part]
    for t in (t for part in args[3:9] for t in part):
        t.requires_grad_(False)
    out = torch.ops.moefuse.experts_extended(*args, scales=SCALES)
    grads = torch.autograd.grad(out.float().square().sum(), factors)
    again = torch.autograd.grad(torch.ops.moefuse.experts_extended(*args, scales=SCALES).float().square().sum(), factors)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert {g.dtype for g in grads} == {torch.float32}
    assert any(bool((g != g.bfloat16().float()).any()) for g in grads)
    wide = [a.detach().double() if isinstance(a, Tensor) else [t.detach().double().requires_grad_() for t in a] for a in args]
    wide[1] = args[1]
    theirs = torch.autograd.grad(merged(wide).square().sum(), [t for part in wide[9:] for t in part])
    for mine, exact in zip(grads, theirs, strict=True):
        assert float((mine - exact).norm()) <= 0.02 * float(exact.norm())


def test_under_autocast() -> None:
    """It computes in the dtypes of what it is given: outside of compiled code autocast would round the terms alone."""
    args = arguments("separate", torch.float32, torch.float32)
    expected = results(args, ours, gating="separate")
    with torch.autocast("cpu", torch.bfloat16):
        found = results(args, ours, gating="separate")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_kept_for_backward_does_not_depend_on_weights() -> None:
    """Nothing as large as a weight with its term is saved: only inputs of the op, h, order, offsets and u."""
    args = arguments("merged", torch.float32, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.ops.moefuse.experts_extended(*args, scales=SCALES)
    given = {t.data_ptr() for t in tensors(args)}
    own = sorted(tuple(t.shape) for t in saved if t.data_ptr() not in given)
    assert own == sorted([(T * K, 2 * INNER), (T * K,), (E + 1,), (T * K, 6)])


def test_meta_agrees() -> None:
    args = arguments("merged", torch.float32, torch.float32)
    op = torch.ops.moefuse.experts_extended.default
    torch.library.opcheck(op, tuple(args), {"scales": SCALES}, test_utils=("test_schema", "test_faketensor"))


def _narrow(at: int) -> Any:
    return lambda args: [*args[:at], [args[at][0][:, :, :-1]], *args[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "given", "legal"),
    [
        (_narrow(9), "`a_in` holds 5 experts of shape [3, 11]", "5 experts of shape [r, 12]"),
        (_narrow(10), "`l_in` holds 5 experts of shape [20, 2]", "5 experts of shape [20, 3]"),
        (lambda a: [*a[:11], a[9], a[10], *a[13:]], "`a_up` holds 1 tensors", "an empty list, for there is no such projection"),
    ],
)
def test_errors_name_the_argument(change: Any, given: str, legal: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"argument {given}; legal: {legal}")):
        torch.ops.moefuse.experts_extended(*change(arguments("merged", torch.float32, torch.float32)), scales=SCALES)


def test_no_tokens() -> None:
    """Gradients of factors are dense zeros, never None: data parallel ranks without tokens need them."""
    args = arguments("merged", torch.float32, torch.float32)
    args[0], args[1], args[2] = torch.empty(0, H), torch.empty(0, K, dtype=torch.int64), torch.empty(0, K)
    out = torch.ops.moefuse.experts_extended(*args, scales=SCALES)
    grads = torch.autograd.grad(out.sum(), [t for part in args[9:] for t in part])
    assert out.shape == (0, H)
    assert all(not g.any() for g in grads)
