"""Backward of ``moefuse::experts`` in three ops, as on a GPU: the same gradients as at once, and less memory held between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from moefuse.ops import autograd
from moefuse.ops.meaning.grad_calls import Needs
from moefuse.runtime import native, providers
from tests.cpu.ops_case import Case, leaves, reference, run

SMALL = Case(dtype=torch.float32)
CASES = [
    pytest.param(SMALL, id="stacked"),
    pytest.param(SMALL.with_(gating="separate", separate=True), id="a-parameter-per-expert"),
    pytest.param(SMALL.with_(gating="interleaved", transposed=True, weight_on_input=True), id="weight-on-input"),
    pytest.param(SMALL.with_(gating="plain", activation="relu2", bias=False, out_dtype=torch.float64), id="plain"),
    pytest.param(SMALL.with_(tokens=0), id="no-tokens"),
    pytest.param(SMALL.with_(low_id=-3, high_id=0), id="no-id-in-range"),
    pytest.param(SMALL.with_(tokens=700, experts=2), id="several-chunks"),
]


@pytest.fixture(autouse=True)
def _portable() -> Iterator[None]:
    """Both ways run in plain torch, so their results are the same to the bit."""
    native.configure(False)
    yield
    native.configure(True)


def gradients(case: Case, wanted: list[int], parts: bool) -> list[Tensor]:
    args = case.args()
    inputs = [leaves(args)[i].requires_grad_() for i in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "IN_PARTS", ("cpu",) if parts else ())
        out = run(args, **case.options)
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        return list(torch.autograd.grad(out, inputs, pull))


@pytest.mark.parametrize("case", CASES)
def test_the_same_to_the_bit(case: Case) -> None:
    every = list(range(len(leaves(case.args()))))
    for whole, parts in zip(gradients(case, every, False), gradients(case, every, True), strict=True):
        assert whole.stride() == parts.stride()
        assert torch.equal(whole, parts)


@given(
    st.sets(st.integers(0, 7), min_size=1),
    st.sampled_from(["merged", "separate"]),
    st.booleans(),
    st.sampled_from(["experts_backward_rows", "experts_backward_in", "experts_backward_out"]),
)
def test_any_set_of_gradients(wanted: set[int], gating: str, on_input: bool, name: str) -> None:
    """A part runs if it has something to do, and returns that and no more; the second one is called for tokens, and for weights."""
    case = SMALL.with_(gating=gating, weight_on_input=on_input)
    at = [i for i in sorted(wanted) if i < len(leaves(case.args()))]
    if not at:
        return
    flags = [i in at for i in range(8)] if gating == "separate" else [i in at for i in (0, 1, 2, 8, 3, 4, 8, 5)]
    need = Needs.of(flags, on_input)
    expected = {
        "experts_backward_rows": [need.h + need.w_out + need.products],
        "experts_backward_in": [need.x + (need.weights and on_input), need.w_in + need.w_up + need.b_in + need.b_up],
        "experts_backward_out": [need.w_out + need.b_out],
    }[name]
    seen: list[int] = []
    portable = providers.PROVIDERS[name][-1]

    def spy(*args: Any) -> list[Tensor]:
        out: list[Tensor] = portable.run(*args)
        seen.append(len(out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(providers.PROVIDERS, name, [providers.Provider("spy", lambda *a: None, spy)])
        parts = gradients(case, at, True)
    assert seen == [count for count in expected if count]
    for whole, part in zip(gradients(case, at, False), parts, strict=True):
        assert torch.equal(whole, part)


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("wanted", range(8))
def test_the_whole_returns_what_is_asked_for_alone(wanted: int, on_input: bool) -> None:
    """One gradient, and no other was computed."""
    case, counts, portable = SMALL.with_(gating="separate", weight_on_input=on_input), [], providers.PROVIDERS["experts_backward"][-1]

    def spy(*a: Any) -> list[Tensor]:
        out: list[Tensor] = portable.run(*a)
        counts.append(len(out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(providers.PROVIDERS, "experts_backward", [providers.Provider("spy", lambda *a: None, spy)])
        gradients(case, [wanted], False)
    assert counts == [1]


@pytest.mark.parametrize("case", CASES[:5])
def test_opcheck(case: Case) -> None:
    args = case.args()
    x, ids, weights, *lists = args
    w_in, w_up, w_out, b_in, b_up, b_out = lists
    body = case.call().body.encode()
    counts = [len(part) for part in lists]
    flat = [t for part in lists for t in part]
    out, h, order, offsets = torch.ops.moefuse.experts_forward([x, ids, weights, *flat], counts, *body, x.dtype)
    grad = torch.ones_like(out)
    needs = [True, True, *map(bool, lists)]

    def check(op: Any, tensors: list[Tensor], *parts: list[Tensor]) -> Any:
        call = (
            [*tensors, *(t for part in parts for t in part)],
            [len(part) for part in parts],
            Needs.of(needs, case.weight_on_input).encode(),
            *body,
        )
        torch.library.opcheck(op.default, call)
        return op(*call)

    ops = torch.ops.moefuse
    d_h, a, *_ = check(ops.experts_backward_rows, [grad, weights, h, order, offsets], w_out, b_out)
    check(ops.experts_backward_in, [x, weights, d_h, order, offsets], w_in, w_up, b_in, b_up)
    check(ops.experts_backward_out, [grad, weights, order, offsets], [a], w_out, b_out)


def test_a_second_derivative_is_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have none of their own: a part that is asked for one says so."""
    monkeypatch.setattr(autograd, "IN_PARTS", ("cpu",))
    args, other = SMALL.args(requires_grad=True), SMALL.args(requires_grad=True)
    found, expected = (
        torch.autograd.grad(torch.autograd.grad(out.sum(), given[0], create_graph=True)[0].square().sum(), given[0])
        for given, out in ((args, run(args)), (other, reference(other, **SMALL.options)))
    )
    torch.testing.assert_close(found, expected)
    monkeypatch.setattr(autograd, "_whole", lambda tensors: False)
    (d_x,) = torch.autograd.grad(run(args).sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="moefuse::experts can be differentiated once, not twice"):
        d_x.sum().backward()


def _backward(monkeypatch: pytest.MonkeyPatch, before: Callable[[Tensor], Tensor], case: Case = SMALL) -> list[str]:
    """Lines of the compiled backward of experts, whose tokens come out of ``before``."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(autograd, "IN_PARTS", ("cpu",))
    args = case.args(requires_grad=True)

    def step() -> Any:
        out = torch.compile(lambda x: run([before(x), *args[1:]], **case.options).sin())(args[0])
        return torch.autograd.grad(out.sum(), leaves(args))

    _, codes = run_and_get_code(step)
    (code,) = (code for code in codes if "experts_backward_rows" in code)
    return code.splitlines()


def _calls(lines: list[str], part: str) -> list[int]:
    return [i for i, line in enumerate(lines) if f"{part}.default(" in line]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_program_frees_what_a_part_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """h before the second part runs, its gradient before the third."""
    lines = _backward(monkeypatch, lambda x: x)
    (rows,), (tokens, weights), (last,) = (_calls(lines, f"experts_backward_{part}") for part in ("rows", "in", "out"))
    h, d_h = (re.findall(r"\w+", lines[at].split("default([")[1])[2] for at in (rows, tokens))
    freed = [next(i for i, line in enumerate(lines) if re.search(rf"\bdel {name}\b", line)) for name in (h, d_h)]
    assert rows < freed[0] < tokens < weights < freed[1] < last


@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_of_weights_wait_for_the_memory_of_earlier_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor orders its own products."""
    wide = torch.randn(SMALL.hidden, 512)
    lines = _backward(monkeypatch, lambda x: (x @ wide).softmax(-1) @ wide.T, SMALL.with_(inter=512))
    products = [i for i, line in enumerate(lines) if "extern_kernels.mm(" in line]
    assert products[-1] < _calls(lines, "experts_backward_in")[-1]
