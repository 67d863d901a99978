"""What is not read and not written: experts that nobody chose, weights of invalid ids, rows of nobody, other tokens, the inputs.

Fresh memory is NaN in all tests of the contract (``providers.py``).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.contract.measure import pull, right
from tests.contract.providers import F64, By, table
from tests.contract.rows import IDS, WEIGHTS, Row, X
from tests.contract.tier import EXPERTS, ROUTINGS, TierRow

CHOSEN = {"low_id": -1, "high_id": 3, "experts": 6}
ROWS = [
    Row("stacked", "all experts in one tensor", CHOSEN),
    Row("separate", "a tensor for each", {**CHOSEN, "separate": True}),
    Row("on-input", "routing weights in front", {**CHOSEN, "weight_on_input": True}),
    Row("terms", "factors of nobody", CHOSEN, rank=3),
    Row("codes", "biases of nobody beside packed weights", CHOSEN, encodings=("nibbles", "", "fp8 blocks")),
]
WILD = [-1, 6, 1 << 40, -(1 << 40)]


def _experts(args: list[object], places: tuple[int, ...]) -> list[Tensor]:
    """The floating-point parts of each expert, one by one."""
    parts = [args[i] for i in places if args[i]]
    flat = [[*p] if len(p) > 1 else list(p[0].unbind()) for p in parts]  # type: ignore[call-overload, arg-type]
    return [t for each in flat for t in each[3:6] if t.is_floating_point() and t.dtype.itemsize > 1]


@table(ROWS, dtypes=3)
def test_experts_that_nobody_chose_and_weights_of_no_id_are_not_read(by: By, row: Row, dtype: torch.dtype) -> None:
    """NaN there changes no bit; neither in gradients, which are zeros."""
    it = row.drawn(by, dtype)
    it.args[IDS][0, 0] = 99
    with by.running():
        want = it.run(it.args)
    invalid = (it.args[IDS] < 0) | (it.args[IDS] >= 6)
    it.args[WEIGHTS][invalid] = float("nan")
    for t in _experts(it.args, (3, 4, 5, *range(6, len(it.args)))):
        t.fill_(float("nan"))
    with by.running():
        assert torch.equal(it.run(it.args), want)
    if not by.trains or dtype not in by.computes(row.op, grad=True):
        return
    args = it.copied(grad=True)
    with by.running():
        out = it.run(args)
        grads = torch.autograd.grad(out, it.leaves(args), pull(out.detach()))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][invalid].any()
    for g in grads[2:]:
        assert row.case.get("separate") or not g[3:].any()


@pytest.mark.every_value(2)
@table(ROWS, few=True)
@pytest.mark.parametrize("wild", WILD, ids=["minus-one", "E", "huge", "huge-negative"])
@pytest.mark.parametrize("tokens", [4, 90], ids=["sorted-one-by-one", "sorted-at-once"])
def test_ids_out_of_range_contribute_nothing(by: By, row: Row, dtype: torch.dtype, wild: int, tokens: int) -> None:
    """As a slot whose weight is zero, whatever the weight is."""
    it = row.drawn(by, dtype, tokens=by.rows(tokens), low_id=0, high_id=6)
    it.args[IDS][::2, 1] = wild
    zeros = it.copied()
    zeros[WEIGHTS][::2, 1] = 0
    it.args[WEIGHTS][::2, 1] = float("nan")
    with by.running():
        assert torch.equal(it.run(it.args), it.run(zeros))


@table([Row("plain", "rows of one token"), *ROWS[2:]], dtypes=4, few=True)
@pytest.mark.parametrize("tokens", [5, 300])
def test_nan_stays_in_its_token(by: By, row: Row, dtype: torch.dtype, tokens: int) -> None:
    """One row less in a product of several may change the last bits of others, where the product is not the op's own."""
    it = row.drawn(by, dtype, tokens=by.rows(tokens), low_id=0, high_id=3, experts=3)
    it.args[IDS][4, 0] = -(1 << 40)
    with by.running():
        clean = it.run(it.args)
    it.args[X][2] = float("nan")
    it.args[WEIGHTS][4, 0] = float("nan")
    with by.running():
        out = it.run(it.args)
    others = torch.arange(len(out), device=by.device) != 2
    assert out[2].isnan().all()
    assert out[others].isfinite().all()
    torch.testing.assert_close(out[others], clean[others])


@table([Row("plain", "rows of one token and its expert", {"bias": False})], grad=True)
def test_nan_stays_in_its_token_and_expert_backwards(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(by, dtype, tokens=by.rows(40), top_k=1, low_id=0, high_id=3, experts=3)
    it.args[X][5] = float("nan")
    args = it.copied(grad=True)
    with by.running():
        out = it.run(args)
        d_x, d_w = torch.autograd.grad(out, [args[X], args[3][0]], torch.ones_like(out))
    assert d_x[5].isnan().all()
    assert d_x[torch.arange(len(d_x), device=by.device) != 5].isfinite().all()
    assert [bool(d.isnan().any()) for d in d_w] == [e == int(args[IDS][5, 0]) for e in range(3)]


@table([*ROWS[:2], *ROWS[3:]], dtypes=2, few=True)
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_inputs_are_not_changed(by: By, row: Row, dtype: torch.dtype, tokens: int) -> None:
    it = row.drawn(by, dtype, tokens=by.rows(tokens))
    before = it.copied()
    with by.running():
        it.run(it.args)
    for mine, theirs in zip(it.args, before, strict=True):
        for a, b in zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@table([*ROWS[:2], *ROWS[3:]])
def test_what_experts_are_held_in_is_read_live(by: By, row: Row, dtype: torch.dtype) -> None:
    """``p.data`` changes do not bump a version; storage that is quantised again is another weight."""
    it = row.drawn(by, dtype, low_id=0)
    with by.running():
        before = it.run(it.args)
    for part in it.args[3:]:
        for t in part:
            t.data.add_(1) if not t.is_floating_point() else t.data.mul_(1.5) if t.dtype.itemsize > 1 else None
    fresh = [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in it.args]
    with by.running():
        after = it.run(it.args)
        assert not torch.equal(before, after)
        assert torch.equal(after, it.run(fresh))
    if row.op != "codes":
        right(by, after, it.meaning(it.args), it.meaning(it.copied(F64)), dtype)


@table([TierRow(f"{op}-{ids}", "rows of nobody, and their routing weights", op, ids)
        for op in ("linear", "combine") for ids in ("some-ids-out-of-range", "no-valid-id", "many-rows-int8")], dtypes=2)  # fmt: skip
def test_rows_of_nobody(by: By, row: TierRow, dtype: torch.dtype) -> None:
    """They may hold NaN, and so may what comes back for them: results and gradients of all others are as without."""
    it = row.drawn(by, dtype)
    ids = ROUTINGS[row.ids].to(by.device)
    invalid = (ids < 0) | (ids >= EXPERTS)
    dead = int((~invalid).sum())
    clean, dirty = it.copied(), it.copied()
    dirty[0][dead:] = float("nan")
    if row.op == "combine":
        dirty[1][invalid] = float("nan")
    found = []
    for args in (clean, dirty):
        for t in it.leaves(args):
            t.requires_grad_()
        with by.running():
            out = it.run(args)
            grad = pull(out.detach())
            if row.op == "linear" and args is dirty:
                grad[dead:] = float("nan")
            found.append([out.detach(), *torch.autograd.grad(out, it.leaves(args), grad)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.isfinite().all()
    if row.op == "linear":
        assert not found[1][0][dead:].any()
    assert not found[1][1][dead:].any()
    assert row.op != "combine" or not found[1][2][invalid].any()


@table([TierRow("linear", "views of every kind", "linear")])
def test_views_of_every_kind(by: By, row: TierRow, dtype: torch.dtype) -> None:
    """Columns with gaps, expanded gradients, weights that overlap, weights between other numbers."""
    it = row.drawn(by, dtype)
    xs, offsets, (w,), b = it.args
    nan = float("nan")
    gaps = xs.new_full((len(xs), 2 * xs.shape[1] + 1), nan)[:, 1::2].copy_(xs)
    holes = w.new_full((EXPERTS, 2 * w.shape[1], w.shape[2] + 3), nan)[:, ::2, 1:-2].copy_(w)
    ones = torch.ones(1, 1, dtype=dtype, device=by.device).expand(len(xs), w.shape[1])
    for weight in (w, w[:1].expand(EXPERTS, -1, -1), holes):
        found = []
        for rows in (gaps, xs):
            given = [rows.detach().requires_grad_(), offsets, [weight.detach().requires_grad_()], [b[0].detach().requires_grad_()]]
            if rows is xs:
                out = it.meaning(given)
            else:
                with by.running():
                    out = it.run(given)
                    found.append([out, *torch.autograd.grad(out, [given[0], *given[2], *given[3]], ones)])
                continue
            found.append([out, *torch.autograd.grad(out, [given[0], *given[2], *given[3]], ones)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
