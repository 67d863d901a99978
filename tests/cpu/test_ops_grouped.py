"""The grouped tier: permute, grouped_linear, expert_rows, combine, alone and as an expert body without a template."""

from __future__ import annotations

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
