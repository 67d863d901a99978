"""Gradients: against those of the definition in float64, only what is asked for, and what is kept."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from tests.contract.measure import gradients_right, pull, results
from tests.contract.providers import BF16, F16, F32, F64, By, table
from tests.contract.rows import BODIES, BOTH, CODED, EDGES, FACTORS, IDS, MANY, SIZES, STORED, TERMS, WEIGHTS, Drawn, Row, X, without_gaps
from tests.contract.test_values import any_call, each
from tests.contract.tier import ALONE, PACKED, WHOLE, TierRow
from tests.cpu.ops_case import assert_equally_finite, not_finite, oracle_grads

PLAIN = Row("plain", "the smallest call")
TINY = {"tokens": 3, "hidden": 6, "inter": 4, "hidden_out": 7}
APART = Row("apart", "gate and up are projections of their own", {"gating": "separate"})
ON_INPUT = Row("apart-on-input", "routing weights in front", {"gating": "separate", "weight_on_input": True})
WITH_TERMS, WITH_CODES = Row("terms", "factors, too", rank=3), Row("codes", "packed weights", encodings=("fp8 blocks", "", "nibbles"))
BODY = TierRow("body", "all ops of the tier", "body")


def check(by: By, row: Row | TierRow, dtype: torch.dtype, **more: object) -> None:
    """Every gradient of one call, with the strides of what it is of."""
    it = row.drawn(by, dtype, **more)
    args = it.copied(grad=True)
    with by.running():
        ours = results(it.run, args, it)
    for g, t in zip(ours[1:], it.leaves(args), strict=True):  # of nothing, torch has several
        assert not t.numel() or g.stride() == (t if without_gaps(t) else torch.empty_like(t)).stride()
    gradients_right(by, ours, it)


@table(BODIES, dtypes=2, grad=True, in_turn=True)
def test_every_body(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype, **(TINY if by.interpreted else {}))


@table(STORED, dtypes=4, grad=True, in_turn=True)
def test_every_storage(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(EDGES, dtypes=2, grad=True)
def test_edges(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(MANY, lambda by: by.many, dtypes=2, grad=True)
def test_many_rows(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(SIZES, lambda by: by.name == "cuda", dtypes=8, grad=True)
def test_every_size(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(STORED, lambda by: by.name == "cuda", grad=True)
def test_every_storage_of_many_rows(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, BF16, tokens=3000, hidden=512, inter=384, hidden_out=512, experts=8, top_k=4)


@table([Row("bias", "86 gradients that cancel: autograd's own sum happened to be exact", {"weight_on_input": True, "seed": 1})],
       lambda by: F64 in by.computes("terms", True), grad=True)  # fmt: skip
def test_a_gradient_that_hangs_on_the_incoming_one_alone(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, F64, tokens=by.rows(86), hidden=1, inter=1, hidden_out=1, experts=1, top_k=1)


@table(TERMS, dtypes=2, grad=True)
def test_terms(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(CODED + BOTH, dtypes=2, grad=True)
def test_weights_in_few_bits(by: By, row: Row, dtype: torch.dtype) -> None:
    """Storage, scales and zeros have none."""
    check(by, row, dtype)


@table(ALONE + PACKED, dtypes=2, grad=True)
def test_the_tier(by: By, row: TierRow, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(WHOLE, dtypes=2, grad=True)
def test_the_tier_together(by: By, row: TierRow, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table([Row("factors", "float32 beside 16 bits, as PEFT has them", rank=3, factors=F32),
        Row("held", "experts in float32 with rows of 16 bits, as autocast asks for them", {"held": F32, "out_dtype": F32}),
        Row("result", "a wider result", {"out_dtype": F32}),
        Row("result-on-input", "and weights in front", {"out_dtype": F32, "weight_on_input": True})],
       lambda by: by.name in ("portable", "triton", "cuda"), grad=True)  # fmt: skip
def test_wider_than_the_rows(by: By, row: Row, dtype: torch.dtype) -> None:
    """Their gradients are as wide all the way: most are no numbers of 16 bits."""
    narrow = F16 if by.interpreted else BF16
    check(by, row, narrow)
    it = row.drawn(by, narrow)
    args = it.copied(grad=True)
    with by.running():
        grads = results(it.run, args, it)[1:]
    wide = [g for g, t in zip(grads, it.leaves(args), strict=True) if t.dtype == F32]
    assert all(g.dtype == F32 for g in wide)
    for g in (g for g in wide if g.dim() == 3 or by.name != "portable"):  # of a bias with one row it is that row
        assert float((g != g.to(narrow).float())[g != 0].double().mean()) > 0.5


@pytest.mark.every_value
@table(BODIES[::2], lambda by: by.device == "cpu", grad=True, few=True)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite(by: By, row: Row, dtype: torch.dtype, value: float) -> None:
    """Where relu or a clamp is off the gradient is zero: selected as in eager, and not a product, which would be NaN."""
    it = row.drawn(by, dtype, inter=9, tokens=5)
    args, same = it.copied(grad=True), it.copied(grad=True)
    with by.running():
        out = it.run(args)
        ours = list(torch.autograd.grad(out, it.leaves(args), not_finite(out.detach(), value)))
    out = it.meaning(same)
    assert_equally_finite(ours, oracle_grads(out, it.leaves(same), not_finite(out.detach(), value)), rtol=1e-4, atol=1e-5)


@table([APART, ON_INPUT, WITH_TERMS, WITH_CODES, BODY], lambda by: by.device == "cpu", grad=True)
def test_only_what_is_asked_for(by: By, row: Row, dtype: torch.dtype) -> None:
    """Each input alone gets the gradient that it gets with the others, to the bit, and the others get none."""
    it = row.drawn(by, dtype, **(TINY if by.interpreted else {}))
    args = it.copied(grad=True)
    with by.running():
        every = results(it.run, args, it)[1:]
        for i, expected in enumerate(every):
            alone = it.copied()
            leaf = it.leaves(alone)[i].requires_grad_()
            out = it.run(alone)
            (one,) = torch.autograd.grad(out, leaf, pull(out.detach()))
            assert torch.equal(one, expected), i


@table([PLAIN, APART, ON_INPUT, WITH_TERMS, BODY], lambda by: F64 in by.computes("terms", True) and not by.interpreted, grad=True)
def test_gradcheck(by: By, row: Row | TierRow, dtype: torch.dtype) -> None:
    it = row.drawn(by, F64, tokens=3, hidden=3, inter=2, hidden_out=2)
    args = it.copied(grad=True)

    def f(*flat: Tensor) -> Tensor:
        source = iter(flat)
        return it.run([
            a if i not in it.places else [next(source) for _ in a] if isinstance(a, list) else next(source) for i, a in enumerate(args)
        ])  # fmt: skip

    with by.running():
        assert torch.autograd.gradcheck(f, it.leaves(args))


@table([PLAIN, APART, WITH_TERMS], grad=True)
def test_an_expanded_gradient_and_a_transposed_input(by: By, row: Row, dtype: torch.dtype) -> None:
    """sum() hands back a gradient of stride 0; x may be any view."""
    it = row.drawn(by, dtype)
    found = []
    alone = contextlib.nullcontext
    for function, given_in, running in ((it.run, None, by.running), (it.meaning, None, alone), (it.meaning, F64, alone)):
        args = it.copied(given_in)
        args[X] = args[X].t().contiguous().t()
        for t in it.leaves(args):
            t.requires_grad_()
        with running():
            found.append(torch.autograd.grad(function(args).sum(), it.leaves(args)))
    for ours, own, exact in zip(*found, strict=True):
        error, allowed = float((ours.double() - exact).norm()), float((own.double() - exact).norm())
        assert error <= 2 * allowed + 16 * torch.finfo(dtype).eps * float(exact.norm())


@table([PLAIN, WITH_TERMS], grad=True)
def test_experts_that_nobody_chose_get_zeros(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(by, dtype, experts=6, low_id=2, high_id=3, separate=True)
    args = it.copied(grad=True)
    with by.running():
        it.run(args).sum().backward()
    for part in (args[3], *([] if len(args) < 10 else args[FACTORS])):
        assert [bool((w.grad != 0).any()) for w in part] == [e == 2 for e in range(len(part))]


@table([PLAIN, WITH_TERMS], grad=True)
def test_no_tokens_keep_autograd_connected(by: By, row: Row, dtype: torch.dtype) -> None:
    """Zeros and never None: data parallel ranks without tokens need them."""
    it = row.drawn(by, dtype, tokens=0)
    args = it.copied(grad=True)
    with by.running():
        it.run(args).sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in it.leaves(args))


def _kept(by: By, it: Drawn, args: list[Any]) -> list[Tensor]:
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with by.running(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        it.run(args)
    return saved


@table([PLAIN, WITH_TERMS, WITH_CODES], lambda by: by.name in ("portable", "c++"), grad=True)
def test_what_is_kept_depends_on_no_routing_and_is_no_weight(by: By, row: Row, dtype: torch.dtype) -> None:
    """Only inputs of the op, h, order, offsets, and u of the terms."""
    shapes = []
    for low, high in ((0, 1), (0, 3), (-5, 0)):
        it = row.drawn(by, dtype, low_id=low, high_id=high)
        args = it.copied(grad=True)
        saved = _kept(by, it, args)
        given = {t.data_ptr() for a in args for t in ([a] if isinstance(a, Tensor) else a)}
        own = [tuple(t.shape) for t in saved if t.data_ptr() not in given]
        shapes.append([tuple(t.shape) for t in saved])
        assert all(t.data_ptr() in given for t in saved if t.dim() == 3)
        slots, experts = args[IDS].numel(), by.sizes.get("experts", 3)
        expected = {(slots,), (experts + 1,)} | (set() if row.op == "experts" else {(slots, 2 * row.rank)})
        assert expected <= {*own}
        assert len(own) == len(expected) + 1
    assert shapes[0] == shapes[1] == shapes[2]


@table([PLAIN, WITH_TERMS], lambda by: by.name in ("portable", "c++"), grad=True)
def test_checkpoints_modes_and_changes_in_place(by: By, row: Row, dtype: torch.dtype) -> None:
    """A checkpoint computes the same; without gradients nothing wants any; what changes before backward is an error."""
    it = row.drawn(by, dtype)
    args = it.copied(grad=True)
    with by.running():
        expected = torch.autograd.grad(it.run(args).sum(), it.leaves(args))
        out = torch.utils.checkpoint.checkpoint(lambda x: it.run([x, *args[1:]]), args[X], use_reentrant=False)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), it.leaves(args)), expected))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found = it.run(args)
            assert not found.requires_grad
            torch.testing.assert_close(found, out.detach())
        out = it.run(args)
        with torch.no_grad():
            args[3][0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@table([PLAIN], lambda by: BF16 in by.dtypes, grad=True)
def test_gradients_of_a_wider_result_have_the_dtype_of_what_they_are_of(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(by, BF16, out_dtype=F32)
    args = it.copied(grad=True)
    with by.running():
        it.run(args).sum().backward()
    assert {t.grad.dtype for t in it.leaves(args) if t.grad is not None} == {BF16}
    assert args[WEIGHTS].grad is not None


@each
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_call(by: By, data: st.DataObject) -> None:
    check(by, PLAIN, data.draw(st.sampled_from(by.computes("experts", grad=True))), **any_call(by, data))
