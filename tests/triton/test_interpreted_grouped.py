"""The grouped tier's Triton kernels at tiny sizes in Triton's interpreter: each op against the portable one in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.runtime import grouped
from tests.contract.tier import EXPERTS, ROUTINGS, draw, ids_of, ops
from tests.triton.interpreted_case import TIER, interpreted

pytestmark = [
    pytest.mark.sampled(6),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
    pytest.mark.usefixtures("ran"),
]
FORMS = ["stacked", "in-out", "separate", "mixed"]


@pytest.fixture
def ran() -> Iterator[list[str]]:
    from moefuse.kernels.triton.provide import grouped as tier

    with interpreted(tier, TIER) as names:
        yield names


def near(got: Tensor, exact: Tensor, own: Tensor) -> None:
    """The error is within twice the portable op's own in the same dtype, plus the roundings that the order of sums explains."""
    assert got.shape == own.shape
    assert got.dtype == own.dtype
    assert got.isfinite().all()
    if got.numel():
        roundings = 8 if got.dtype in (torch.float32, torch.float64) else 1
        floor = roundings * torch.finfo(got.dtype).eps * max(float(exact.abs().max()), 1.0)
        assert float((got.double() - exact).abs().max()) <= 2 * float((own.double() - exact).abs().max()) + floor


def lists(form: str, out: int, inp: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases: one tensor, stored the other way, one per expert, or one per expert with strides that differ."""
    w, b = draw(EXPERTS, out, inp, seed=1, dtype=dtype), draw(EXPERTS, out, seed=2, dtype=dtype)
    separate = [v.clone() for v in w], [v.clone() for v in b]
    if form == "mixed":
        separate[0][1] = separate[0][1].t().contiguous().t()
        separate[1][2] = separate[1][2].repeat_interleave(2)[::2]
    return {"stacked": ([w], [b]), "in-out": ([w.mT.contiguous().mT], [b])}.get(form, separate)


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() for t in tensors]


@pytest.mark.parametrize("at_once", [8192, 0], ids=["one sort", "chunks"])
def test_ids_of_any_kind(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, expanded, and of every integer dtype."""
    from moefuse.kernels.triton.host import sorted_rows

    monkeypatch.setattr(sorted_rows, "SORT_AT_ONCE", at_once)
    x = draw(300, 2)
    for ids in (ids_of(2, 300, -1, 5).t(), ids_of(300, 1, 0, 9).expand(-1, 3), ids_of(300, 2, 0, 250).to(torch.uint8)):
        assert all(torch.equal(a, b) for a, b in zip(ops.permute(x, ids, 5), grouped.permute(x, ids, 5), strict=True))


def test_only_what_is_asked_for() -> None:
    w, b = lists("stacked", 5, 3, torch.float32)
    xs, _, offsets = ops.permute(draw(5, 3, dtype=torch.float32), ids_of(5, 2, -1, 5), EXPERTS)
    grad = draw(10, 5, dtype=torch.float32)
    every = ops.grouped_linear_backward(grad, xs, offsets, w, b, [True, True, True])
    for i in range(3):
        (one,) = ops.grouped_linear_backward(grad, xs, offsets, w, b, [i == 0, i == 1, i == 2])
        assert torch.equal(one, every[i])


TILE_FORMS: list[dict[str, Any]] = [
    {"desc": True},
    {"rows_desc": True},
    {"persistent": True},
    {"store": 1},
    {"desc": True, "store": 2, "rows_desc": True, "persistent": True, "flatten": True},
]


@pytest.mark.parametrize("flags", TILE_FORMS, ids="+".join)
@pytest.mark.parametrize("form", FORMS[:3])
def test_forms_of_a_tile(flags: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors need rows of whole 16 bytes; the sizes are multiples of four and not of the tile, or of it (in-out needs that)."""
    from moefuse.kernels.triton.host import linear
    from moefuse.tuning.problem import Tiles

    monkeypatch.setattr(linear, "linear_sizes", lambda *a: Tiles(16, 16, 4, 1, 2, **flags))
    for out, inp in ((20, 28), (48, 32)):
        w, b = lists(form, out, inp, torch.float32)
        xs, _, offsets = ops.permute(draw(60, inp, dtype=torch.float32), ids_of(60, 2, -1, 5), EXPERTS)
        own = grouped.grouped_linear(xs, offsets, w, b)
        near(ops.grouped_linear(xs, offsets, w, b), grouped.grouped_linear(xs.double(), offsets, wide(w), wide(b)), own)
        grad = draw(120, out, dtype=torch.float32)
        (d_xs,) = ops.grouped_linear_backward(grad, xs, offsets, w, b, [True, False, False])
        (own,) = grouped.grouped_linear_backward(grad, xs, offsets, w, b, [True, False, False])
        (exact,) = grouped.grouped_linear_backward(grad.double(), xs.double(), offsets, wide(w), wide(b), [True, False, False])
        near(d_xs, exact, own)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_gradients_of_weights_by_descriptors(ids: Tensor, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the next expert and dead ones, all NaN, are seen by no descriptor; rows with gaps, sizes that are no multiples of a tile."""
    from moefuse.kernels.triton.host import wgrad
    from moefuse.tuning.problem import Tiles

    monkeypatch.setattr(wgrad, "grad_tiles", lambda *a: (16, Tiles(32, 16, 4, 1, 2)))
    for out, inp in ((20, 28), (16, 64)):
        w, _ = lists(form, out, inp, torch.float32)
        xs, _, offsets = grouped.permute(draw(ids.shape[0], inp, dtype=torch.float32), ids, EXPERTS)
        grad = torch.full((ids.numel(), out + 4), float("nan"))[:, :out].copy_(draw(ids.numel(), out, dtype=torch.float32))
        for t in (xs, grad):
            t[offsets[-1] :] = float("nan")
        want = grouped.grouped_linear_backward(grad, xs, offsets, w, [], [False, True, False])
        torch.testing.assert_close(ops.grouped_linear_backward(grad, xs, offsets, w, [], [False, True, False]), want)
        if offsets[-1] > offsets[-2]:
            xs[offsets[-2] :] = float("nan")  # the last expert's
            want = grouped.grouped_linear_backward(grad, xs, offsets, w, [], [False, True, False])
            got = ops.grouped_linear_backward(grad, xs, offsets, w, [], [False, True, False])
            torch.testing.assert_close(got, want, equal_nan=True)
