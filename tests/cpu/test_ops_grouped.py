"""The grouped tier: permute, grouped_linear, expert_rows, combine, alone and as an expert body without a template."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import moefuse.ops  # noqa: F401  (registers torch.ops.moefuse)
from tests.cpu.ops_case import assert_as_exact, to

ops = torch.ops.moefuse
F = torch.nn.functional


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_ids(tokens: int, top_k: int, low: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, (tokens, top_k), generator=torch.Generator().manual_seed(seed))


ROUTINGS = [
    pytest.param(draw_ids(5, 2, -1, 5), id="some-ids-out-of-range"),
    pytest.param(draw_ids(0, 2, 0, 4), id="no-tokens"),
    pytest.param(draw_ids(1, 1, 0, 4), id="one-slot"),
    pytest.param(draw_ids(7, 3, 2, 3), id="all-to-one-expert"),
    pytest.param(draw_ids(4, 2, -3, 0), id="no-valid-id"),
    pytest.param(draw_ids(90, 3, -1, 5).to(torch.int8), id="many-rows-int8"),
]
EXPERTS = 4


@pytest.mark.parametrize("ids", ROUTINGS)
def test_permute_sorts_stably_with_invalid_ids_last(ids: Tensor) -> None:
    x = draw(ids.shape[0], 3)
    xs, order, offsets = ops.permute(x, ids, EXPERTS)
    key = [e if 0 <= e < EXPERTS else EXPERTS for e in ids.flatten().tolist()]
    want = sorted(range(len(key)), key=key.__getitem__)
    assert order.tolist() == want
    assert offsets.tolist() == [sum(k < e for k in key) for e in range(EXPERTS + 1)]
    assert torch.equal(xs, x[order // ids.shape[1]])


@pytest.mark.parametrize("ids", ROUTINGS)
@pytest.mark.parametrize("form", ["stacked", "in-out-storage", "separate"])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_linear(ids: Tensor, form: str, bias: bool) -> None:
    xs, _, offsets = ops.permute(draw(ids.shape[0], 3), ids, EXPERTS)
    w, b = draw(EXPERTS, 5, 3, seed=1), draw(EXPERTS, 5, seed=2)
    lists = {"stacked": ([w], [b]), "in-out-storage": ([w.mT.contiguous().mT], [b]), "separate": (list(w), list(b))}[form]
    out = ops.grouped_linear(xs, offsets, lists[0], lists[1] if bias else [])
    want = torch.zeros_like(out)
    for e, (a, z) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        want[a:z] = F.linear(xs[a:z], w[e], b[e] if bias else None)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("ids", ROUTINGS)
def test_expert_rows(ids: Tensor) -> None:
    _, order, offsets = ops.permute(draw(ids.shape[0], 3), ids, EXPERTS)
    v = draw(EXPERTS, 5)
    slots = ids.numel()
    key = ids.flatten()[order].long()
    valid = (key >= 0) & (key < EXPERTS)
    want = torch.where(valid[:, None], v[key.clamp(0, EXPERTS - 1)], 0)
    for form in ([v], list(v)):
        assert torch.equal(ops.expert_rows(form, offsets, slots), want)


@pytest.mark.parametrize("ids", ROUTINGS)
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_ignores_rows_past_the_valid_ones(ids: Tensor, weighted: bool) -> None:
    tokens, top_k = ids.shape
    _, order, offsets = ops.permute(draw(tokens, 3), ids, EXPERTS)
    ys, weights = draw(tokens * top_k, 3, seed=1), draw(tokens, top_k, seed=2)
    by_slot = torch.zeros_like(ys)
    by_slot[order] = ys
    valid = ((ids >= 0) & (ids < EXPERTS))[:, :, None]
    want = torch.where(valid, by_slot.view(tokens, top_k, 3) * (weights[:, :, None] if weighted else 1), 0).sum(1)
    ys[int(offsets[-1]) :] = math.nan
    weights[~valid[:, :, 0]] = math.nan
    out = ops.combine(ys, weights if weighted else None, order, offsets, top_k, None)
    torch.testing.assert_close(out, want)
    assert ops.combine(ys, None, order, offsets, top_k, torch.float32).dtype == torch.float32


def test_combine_gradient_is_finite_when_dead_rows_are_nan() -> None:
    ids = torch.tensor([[0, 9], [1, -1]])
    _, order, offsets = ops.permute(draw(2, 3), ids, EXPERTS)
    ys, weights = draw(4, 3), draw(2, 2)
    ys[2:] = math.nan
    weights[:, 1] = math.nan
    d_ys, d_weights = torch.autograd.grad(
        ops.combine(ys.requires_grad_(), weights.requires_grad_(), order, offsets, 2, None).sum(), (ys, weights)
    )
    assert d_ys.isfinite().all()
    assert (d_ys[2:] == 0).all()
    assert (d_weights[:, 1] == 0).all()
    assert d_weights.isfinite().all()


def body(x: Tensor, ids: Tensor, weights: Tensor, w: list[Tensor], b: list[Tensor], scale: list[Tensor], w2: list[Tensor]) -> Tensor:
    """An expert no template describes: normalised by a per-expert vector, then the square of a sine."""
    xs, order, offsets = ops.permute(x, ids, EXPERTS)
    h = ops.grouped_linear(xs, offsets, w, b)
    h = F.layer_norm(h, h.shape[-1:]) * ops.expert_rows(scale, offsets, h.shape[0])
    ys = ops.grouped_linear(h.sin().square(), offsets, w2, [])
    return ops.combine(ys, weights, order, offsets, ids.shape[1], None)


def loop_body(x: Tensor, ids: Tensor, weights: Tensor, w: list[Tensor], b: list[Tensor], scale: list[Tensor], w2: list[Tensor]) -> Tensor:
    out = torch.zeros((x.shape[0], w2[0].shape[-2]), dtype=x.dtype) + 0 * x.sum()
    for e in range(EXPERTS):
        token, slot = torch.where(ids == e)
        h = F.linear(x[token], w[0][e], b[0][e])
        h = F.layer_norm(h, h.shape[-1:]) * scale[0][e]
        out = out.index_add(0, token, F.linear(h.sin().square(), w2[0][e]) * weights[token, slot, None])
    return out


def body_args(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0, top_k: int = 2) -> list[Any]:
    args: list[Any] = [draw(tokens, 3, seed=seed), draw_ids(tokens, top_k, -1, EXPERTS + 1, seed), draw(tokens, top_k, seed=seed + 1)]
    args += [[draw(EXPERTS, 5, 3)], [draw(EXPERTS, 5)], [draw(EXPERTS, 5)], [draw(EXPERTS, 5, 2).mT]]
    args = [[t.to(dtype) for t in a] if isinstance(a, list) else a.to(dtype) if a.is_floating_point() else a for a in args]
    for t in body_leaves(args):
        t.requires_grad_()
    return args


def body_leaves(args: list[Any]) -> list[Tensor]:
    return [args[0], args[2], *(t for a in args[3:] for t in a)]


@given(tokens=st.integers(0, 30), top_k=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_custom_body_equals_the_loop_with_its_gradients(tokens: int, top_k: int, seed: int) -> None:
    args = body_args(tokens, seed=seed, top_k=top_k)
    out, want = body(*args), loop_body(*args)
    torch.testing.assert_close(out, want)
    pull = draw(*out.shape, seed=7)
    ours = torch.autograd.grad(out, body_leaves(args), pull)
    theirs = torch.autograd.grad(want, body_leaves(args), pull, allow_unused=True)
    for a, b, p in zip(ours, theirs, body_leaves(args), strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)
        assert a.stride() == p.stride()


def test_gradcheck() -> None:
    args = body_args(4)

    def f(*flat: Tensor) -> Tensor:
        return body(flat[0], args[1], flat[1], *([t] for t in flat[2:]))

    assert torch.autograd.gradcheck(f, body_leaves(args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_float64(dtype: torch.dtype) -> None:
    args = body_args(40, dtype)
    assert_as_exact(body(*args), loop_body(*args), loop_body(*to(args, torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_accumulates_in_float32(dtype: torch.dtype) -> None:
    """256 + 1 + 1 is 256 in bfloat16 steps, 258 in float32."""
    ids = torch.tensor([[0, 1, 2]])
    xs, order, offsets = ops.permute(torch.ones(1, 1, dtype=dtype), ids, 3)
    out = ops.combine(xs, torch.tensor([[256.0, 1.0, 1.0]]), order, offsets, 3, None)
    assert out.item() == 258


def test_bitwise_equal_from_run_to_run() -> None:
    def once() -> list[Tensor]:
        args = body_args(50, torch.float32)
        out = body(*args)
        return [out, *torch.autograd.grad(out.square().sum(), body_leaves(args))]

    first = once()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


def test_only_what_is_asked_for() -> None:
    args = body_args(6)
    for target in body_leaves(args):
        for t in body_leaves(args):
            t.requires_grad_(t is target)
        (ours,) = torch.autograd.grad(body(*args).sum(), target)
        (theirs,) = torch.autograd.grad(loop_body(*args).sum(), target)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
def test_opcheck(requires_grad: bool, separate: bool) -> None:
    x, ids, weights = draw(5, 3), draw_ids(5, 2, -1, 5), draw(5, 2)
    xs, order, offsets = ops.permute(x, ids, EXPERTS)
    w, b = draw(EXPERTS, 4, 3), draw(EXPERTS, 4)
    lists = [[t.clone() for t in a] if separate else [a] for a in (w, b)]
    ys = ops.grouped_linear(xs, offsets, *lists)
    for t in (x, weights, xs, ys, *lists[0], *lists[1]):
        t.requires_grad_(requires_grad)
    check = torch.library.opcheck
    check(ops.permute.default, (x, ids, EXPERTS))
    check(ops.grouped_linear.default, (xs, offsets, *lists))
    check(ops.grouped_linear.default, (xs, offsets, lists[0], []))
    check(ops.expert_rows.default, (lists[1], offsets, 10))
    check(ops.combine.default, (ys, weights, order, offsets, 2, None))
    check(ops.combine.default, (ys, None, order, offsets, 2, torch.float32))
    if not requires_grad:
        check(ops.grouped_linear_backward.default, (ys, xs, offsets, *lists, [True, True, True]))
        check(ops.grouped_linear_backward.default, (ys, xs, offsets, *lists, [False, True, False]))
        check(ops.expert_rows_backward.default, (ys, lists[1], offsets))
        check(ops.combine_backward.default, (x.new_ones(5, 4), ys, weights, order, offsets, 2, [True, True]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_forward_and_backward_with_any_number_of_tokens() -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(body, backend=counter, fullgraph=True)
    for tokens in (6, 9, 3, 20):
        args = body_args(tokens, torch.float32)
        for t in args[:3]:
            torch._dynamo.mark_dynamic(t, 0)
        exact = to(args, torch.float64)
        results = [(f(*a), body_leaves(a)) for f, a in ((compiled, args), (body, args), (loop_body, exact))]
        for triple in zip(*([out, *torch.autograd.grad(out.sum(), of)] for out, of in results), strict=True):
            assert_as_exact(*triple)
    assert counter.frame_count == 1
