"""What ``moefuse::experts`` computes: against the float64 reference, at every edge of its contract."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from moefuse.runtime import cpu, gemm, native
from tests.cpu.ops_case import Case, assert_as_exact, every_body, leaves, oracle_grads, reference, run, tensors, to

STORAGE = [
    pytest.param({}, id="stacked"),
    pytest.param({"transposed": True}, id="in-out-storage"),
    pytest.param({"separate": True}, id="a-parameter-per-expert"),
]
SIZES = [
    pytest.param({"tokens": 0}, id="no-tokens"),
    pytest.param({"tokens": 1}, id="one-token"),
    pytest.param({"tokens": 1, "top_k": 1}, id="one-slot"),
    pytest.param({"tokens": 3, "top_k": 0}, id="no-slots-per-token"),
    pytest.param({"experts": 1, "top_k": 1}, id="one-expert"),
    pytest.param({"experts": 4, "top_k": 4}, id="every-expert"),
    pytest.param({"tokens": 97, "hidden": 13, "inter": 7, "experts": 5, "top_k": 3, "hidden_out": 11}, id="odd-sizes-sorted-by-torch"),
    pytest.param({"tokens": 600, "experts": 4}, id="several-chunks"),
    pytest.param({"tokens": 9, "experts": 64, "top_k": 6}, id="mostly-empty-experts"),
    pytest.param({"low_id": 1, "high_id": 2}, id="all-tokens-to-one-expert-with-duplicates"),
    pytest.param({"tokens": 100, "low_id": 0, "high_id": 1}, id="one-expert-many-rows"),
    pytest.param({"low_id": -3, "high_id": 0}, id="no-valid-id"),
    pytest.param({"tokens": 70, "low_id": 3, "high_id": 6}, id="no-valid-id-sorted-by-torch"),
    pytest.param({"tokens": 300, "hidden": 160, "hidden_out": 160}, id="sum-one-slot-at-a-time"),
]


@pytest.fixture(autouse=True, params=["kernel", "portable"])
def _provider(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds with the C++ kernel and without it."""
    native.configure(request.param == "kernel")
    yield
    native.configure(True)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory that moefuse asks for holds NaN (or a huge integer), so reading it shows."""

    def poison(t: torch.Tensor) -> torch.Tensor:
        return t.fill_(math.nan if t.is_floating_point() else 1 << 20)

    def wrap(function: Any) -> Any:
        return lambda *args, **kwargs: poison(function(*args, **kwargs))

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


@pytest.mark.parametrize("case", every_body(), ids=lambda c: f"{c.activation}-{c.gating}{'-up-first' * c.up_first}")
def test_every_body_equals_the_reference(case: Case) -> None:
    for on_input in (False, True):
        c = case.with_(weight_on_input=on_input)
        torch.testing.assert_close(run(c.args(), **c.options), reference(c.args(), **c.options))


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_sizes_and_storage(size: dict[str, Any], storage: dict[str, Any]) -> None:
    for gating in ("merged", "separate", "plain"):
        c = Case(**size, **storage, gating=gating)
        args = c.args()
        out = run(args, **c.options)
        assert out.is_contiguous()
        torch.testing.assert_close(out, reference(args, **c.options))


def test_only_some_projections_have_a_bias() -> None:
    args = Case().args()
    for missing in (6, 8):
        some = [*args]
        some[missing] = []
        torch.testing.assert_close(run(some), reference(some))


def test_stacked_and_separate_lists_may_be_mixed() -> None:
    args = Case().args()
    mixed = [*args]
    mixed[3] = list(args[3][0].unbind(0))
    mixed[8] = list(args[8][0].unbind(0))
    assert torch.equal(run(mixed), run(args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 50], ids=["gemv", "few-rows", "rows-enough-to-widen"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_error_is_within_the_budget_of_the_reference(dtype: torch.dtype, tokens: int, on_input: bool) -> None:
    """Against float64, no more than 1.1 times the error of the reference in the same dtype, and a floor of one rounding."""
    c = Case(tokens=tokens, hidden=96, inter=64, hidden_out=96, experts=4, dtype=dtype, bias=True, weight_on_input=on_input)
    draws = [c.with_(seed=seed).args() for seed in range(6)]
    exact = torch.stack([reference(to(args, torch.float64), **c.options) for args in draws])
    error = (torch.stack([run(args, **c.options) for args in draws]).double() - exact).abs()
    allowed = (torch.stack([reference(args, **c.options) for args in draws]).double() - exact).abs()
    floor = torch.finfo(dtype).eps * exact.abs().max()
    assert error.max() <= 1.1 * allowed.max() + floor
    assert error.mean() <= 1.1 * allowed.mean() + floor / 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_gemm_equals_float32_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that has the instructions; several bands, both storage orders, with and without bias."""
    monkeypatch.setattr(gemm, "WIDENED", frozenset({dtype}))
    monkeypatch.setattr(gemm, "TILE", 64)
    a, w, bias = torch.randn(9, 33).to(dtype), torch.randn(50, 33).to(dtype), torch.randn(50).to(dtype)
    for b in (w.t(), w.t().contiguous()):
        for v in (None, bias):
            out = torch.empty(9, 50, dtype=dtype)
            gemm.mm_into(out, a, b, v)
            exact = a.double() @ b.double() + (0 if v is None else v.double())
            torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_gemv_of_a_large_bfloat16_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "MV_ELEMENTS", 1024 * 512)
    monkeypatch.setattr(gemm, "WIDENED", frozenset({torch.bfloat16}))
    w = torch.randn(1024, 512).bfloat16() / 22
    a, bias = torch.randn(1, 512).bfloat16(), torch.randn(1024).bfloat16()
    for v in (None, bias):
        out = torch.empty(1, 1024, dtype=torch.bfloat16)
        gemm.mm_into(out, a, w.t(), v)
        exact = a.double() @ w.double().t() + (0 if v is None else v.double())
        assert_as_exact(out, F.linear(a, w, v), exact)


def test_out_dtype_keeps_the_float32_sum() -> None:
    c = Case(dtype=torch.bfloat16, out_dtype=torch.float32)
    args = c.args()
    out = run(args, **c.options)
    assert out.dtype == torch.float32
    assert_as_exact(out, reference(args, **c.options), reference(to(args, torch.float64)), c.dtype)
    assert torch.equal(out.bfloat16(), run(args))


def test_routing_weights_may_be_wider_than_x() -> None:
    args = Case(dtype=torch.bfloat16, bias=False).args()
    args[2] = torch.full_like(args[2], 1.0, dtype=torch.float32) + 2**-12  # not representable in bfloat16
    options = {"out_dtype": torch.float32}
    assert_as_exact(run(args, **options), reference(args, **options), reference(to(args, torch.float64)), torch.bfloat16)
    ones = [*args[:2], torch.ones_like(args[2]), *args[3:]]
    assert not torch.equal(run(args, out_dtype=torch.float32), run(ones, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [4, 200], ids=["sorted-by-python", "sorted-by-torch"])
def test_any_integer_dtype_of_ids(dtype: torch.dtype, tokens: int) -> None:
    c = Case(tokens=tokens, low_id=0, experts=200 if dtype != torch.int8 else 100)
    args = c.args()
    want = run(args)
    args[1] = args[1].to(dtype)
    assert torch.equal(run(args), want)


@pytest.mark.parametrize("wild", [-1, 3, 1 << 40, -(1 << 40)], ids=["minus-one", "E", "huge", "huge-negative"])
@pytest.mark.parametrize("tokens", [4, 200], ids=["sorted-by-python", "sorted-by-torch"])
@pytest.mark.parametrize("on_input", [False, True])
def test_ids_out_of_range_contribute_nothing_whatever_their_weight(wild: int, tokens: int, on_input: bool) -> None:
    c = Case(tokens=tokens, low_id=0, high_id=3, weight_on_input=on_input)
    args = c.args(requires_grad=True)
    kept = [t.detach().clone() for t in (args[1], args[2])]
    with torch.no_grad():
        args[1][::2, 1] = wild
        args[2][::2, 1] = math.nan
        kept[1][::2, 1] = 0
    out = run(args, **c.options)
    same = [args[0], args[1], kept[1], *args[3:]]
    assert torch.equal(out, run(same, **c.options))
    grads = torch.autograd.grad(out.sum(), leaves(args))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][::2, 1] == 0).all()


@pytest.mark.parametrize("tokens", [4, 200], ids=["sorted-by-python", "sorted-by-torch"])
def test_nan_stays_in_its_row(tokens: int) -> None:
    c = Case(tokens=tokens, low_id=0, high_id=3)
    args = c.args()
    clean = run(args, **c.options)
    args[0][2] = math.nan
    out = run(args, **c.options)
    assert out[2].isnan().all()
    others = torch.arange(tokens) != 2
    assert torch.equal(out[others], clean[others])


def test_slots_are_summed_in_order() -> None:
    """1e8 + 1 - 1e8 in float32 is 0 in this order, 1 in another."""
    one = torch.ones(3, 1, 1)
    args = [torch.ones(1, 1), torch.tensor([[0, 1, 2]]), torch.tensor([[1e8, 1.0, -1e8]]), [one], [], [one], [], [], []]
    options = {"gating": "plain", "activation": "identity"}
    assert run(args, **options).item() == reference(args, **options).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 400], ids=["few", "many"])
def test_bitwise_equal_from_run_to_run(dtype: torch.dtype, tokens: int) -> None:
    c = Case(tokens=tokens, hidden=64, inter=32, hidden_out=64, experts=8, dtype=dtype)

    def once() -> list[torch.Tensor]:
        args = c.args(requires_grad=True)
        out = run(args, **c.options)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves(args))]

    first = once()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


def test_weights_are_read_live() -> None:
    """p.data changes do not bump a version; the op must see them all the same."""
    c = Case(separate=True)
    args = c.args(requires_grad=True)
    before = run(args, **c.options)
    for t in tensors(args)[3:]:
        t.data.mul_(1.5)
    after = run(args, **c.options)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, reference(args, **c.options))


def test_inputs_are_not_changed() -> None:
    for tokens in (1, 5, 200):
        args = Case(tokens=tokens).args()
        copies = [t.clone() for t in tensors(args)]
        run(args)
        assert all(torch.equal(a, b) for a, b in zip(tensors(args), copies, strict=True))


def test_inputs_of_any_strides() -> None:
    args = Case(tokens=50, low_id=0).args()
    want = run(args)
    wide = torch.zeros(100, 12, dtype=torch.float64)
    wide[::2, ::2] = args[0]
    args[0] = wide[::2, ::2]
    args[1], args[2] = args[1].t().contiguous().t(), args[2].t().contiguous().t()
    args[3] = [torch.stack([args[3][0], args[3][0]], dim=1)[:, 0]]
    torch.testing.assert_close(run(args), want)


def test_meta_and_fake_agree_with_the_kernel() -> None:
    c = Case(dtype=torch.bfloat16, out_dtype=torch.float32)
    args = c.args()
    real = run(args, **c.options)
    meta = run([[t.to("meta") for t in a] if isinstance(a, list) else a.to("meta") for a in args], **c.options)
    assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


def test_peak_memory_is_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary as large as all pre-activations: the largest pre-activation buffer is one chunk."""
    native.configure(False)
    seen: list[tuple[int, ...]] = []
    project = cpu.project

    def spy(out: torch.Tensor, *rest: Any) -> None:
        seen.append(tuple(out.shape))
        project(out, *rest)

    monkeypatch.setattr(cpu, "project", spy)
    c = Case(tokens=2000, experts=16, low_id=0, high_id=16)
    run(c.args())
    assert max(rows for rows, _ in seen) <= max(cpu.CHUNK_ROWS, 2000 * 2 // 16 * 2)


@pytest.mark.parametrize("tokens", [39, 40, 41], ids=["one-short-of-a-block", "whole-blocks", "one-over"])
def test_a_large_call_goes_in_blocks_of_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 10 tokens here; the values are the same."""
    native.configure(False)
    c = Case(tokens=tokens)
    want = run(c.args(), **c.options)
    calls: list[int] = []
    sort = cpu.groups_of_ids
    monkeypatch.setattr(cpu, "groups_of_ids", lambda ids, experts: calls.append(len(ids)) or sort(ids, experts))
    monkeypatch.setattr(cpu, "BLOCK_BYTES", 10 * 2 * 7 * 8)
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 1)
    torch.testing.assert_close(run(c.args(), **c.options), want)
    assert calls == [20, 20, 20, *{39: [18], 40: [20], 41: [20, 2]}[tokens]]


@given(
    tokens=st.integers(0, 90),
    hidden=st.integers(1, 9),
    inter=st.integers(1, 9),
    experts=st.integers(1, 9),
    top_k=st.integers(0, 4),
    body=st.sampled_from(every_body()),
    storage=st.sampled_from([{}, {"transposed": True}, {"separate": True}]),
    bias=st.booleans(),
    on_input=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_call_equals_the_reference_with_its_gradients(
    tokens: int,
    hidden: int,
    inter: int,
    experts: int,
    top_k: int,
    body: Case,
    storage: dict[str, Any],
    bias: bool,
    on_input: bool,
    seed: int,
) -> None:
    sizes = {"tokens": tokens, "hidden": hidden, "inter": inter, "experts": experts, "top_k": top_k, "seed": seed}
    c = body.with_(**sizes, **storage, bias=bias, weight_on_input=on_input)
    args = c.args(requires_grad=True)
    out, want = run(args, **c.options), reference(args, **c.options)
    torch.testing.assert_close(out, want)
    pull = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(out, leaves(args), pull)
    torch.testing.assert_close(list(ours), oracle_grads(want, leaves(args), pull))
