"""What the ops compute: against their definition in float64, whoever runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.contract.measure import right
from tests.contract.providers import BF16, F16, F32, F64, PROVIDERS, By, table
from tests.contract.rows import BODIES, BOTH, CODED, SIZES, STORAGES, STORED, TERMS, WEIGHTS, Row
from tests.contract.tier import ALONE, PACKED, WHOLE
from tests.cpu.ops_case import every_body

PLAIN = Row("plain", "the smallest call")
TINY = {"tokens": 3, "hidden": 6, "inter": 4, "hidden_out": 7}


def check(by: By, row: Any, dtype: torch.dtype, **more: Any) -> None:
    """One call against float64."""
    it = row.drawn(by, dtype, **more)
    with by.running():
        out = it.run(it.args)
    assert out.is_contiguous()
    right(by, out, it.meaning(it.args), it.meaning(it.copied(F64)), dtype)


@table(BODIES, dtypes=3, in_turn=True)
def test_every_body(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype, **(TINY if by.interpreted else {}))


@table(STORED, dtypes=4, in_turn=True)
def test_every_storage(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(SIZES, lambda by: by.name == "cuda", dtypes=8)
def test_every_size(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(STORED, lambda by: by.name == "cuda")
def test_every_storage_of_many_rows(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype, tokens=700, hidden=136, inter=200, hidden_out=264, experts=6, top_k=2)


@table(TERMS, dtypes=2)
def test_terms(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)
    if by.device == "cuda":
        check(by, row, BF16, tokens=1500)


@table(CODED + BOTH, dtypes=3)
def test_weights_in_few_bits(by: By, row: Row, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table(ALONE + WHOLE + PACKED, dtypes=4)
def test_the_tier(by: By, row: Any, dtype: torch.dtype) -> None:
    check(by, row, dtype)


@table([PLAIN], lambda by: by.device == "cpu" and not by.interpreted and by.takes[0] == "experts", dtypes=4)
@pytest.mark.parametrize("tokens", [1, 3, 50], ids=["gemv", "few-rows", "rows-enough-to-widen"])
@pytest.mark.parametrize("on_input", [False, True], ids=["output", "input"])
def test_error_is_within_the_budget_of_the_reference(by: By, row: Row, dtype: torch.dtype, tokens: int, on_input: bool) -> None:
    """Against float64, no more than 1.1 times the error of the reference in the same dtype, and a floor of one rounding."""
    sizes = {"tokens": tokens, "hidden": 96, "inter": 64, "hidden_out": 96, "experts": 4, "weight_on_input": on_input}
    draws = [row.drawn(by, dtype, **sizes, seed=seed) for seed in range(6)]
    with by.running():
        found = torch.stack([it.run(it.args) for it in draws])
    exact = torch.stack([it.meaning(it.copied(F64)) for it in draws])
    own = torch.stack([it.meaning(it.args) for it in draws])
    error, allowed = (found.double() - exact).abs(), (own.double() - exact).abs()
    floor = torch.finfo(dtype).eps * exact.abs().max() * (64 if dtype == F64 else 1)
    assert error.max() <= 1.1 * allowed.max() + floor
    assert error.mean() <= 1.1 * allowed.mean() + floor / 100


@table([PLAIN, Row("on-input", "the same with weights first", {"weight_on_input": True})], few=True)
@pytest.mark.parametrize("wider", [F32, F64])
def test_out_dtype_keeps_the_sum(by: By, row: Row, dtype: torch.dtype, wider: torch.dtype) -> None:
    """In 16 bits a wider result has not been rounded; rounded it is the other one."""
    of = BF16 if BF16 in by.dtypes else F16
    wide, narrow = row.drawn(by, of, out_dtype=wider), row.drawn(by, of)
    with by.running():
        out, rounded = wide.run(wide.args), narrow.run(narrow.args)
    right(by, out, wide.meaning(wide.args), wide.meaning(wide.copied(F64)), of)
    assert torch.equal(out.to(of), rounded)


@table([PLAIN], lambda by: BF16 in by.dtypes)
def test_routing_weights_may_be_wider_than_x(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(by, BF16, bias=False, out_dtype=F32)
    it.args[WEIGHTS] = torch.full_like(it.args[WEIGHTS], 1.0, dtype=F32) + 2**-12  # not representable in bfloat16
    with by.running():
        out = it.run(it.args)
        ones = it.run([*it.args[:2], torch.ones_like(it.args[WEIGHTS]), *it.args[3:]])
    right(by, out, it.meaning(it.args), it.meaning(it.copied(F64)), BF16)
    assert not torch.equal(out, ones)


def any_call(by: By, data: st.DataObject) -> dict[str, Any]:
    """Any sizes, bodies and storages; ``whole``: features are multiples of 8, so that rows can come through descriptors."""
    most = 200 if by.device == "cuda" else 12 if by.interpreted else 24
    whole = 8 if data.draw(st.booleans(), "whole") else 1
    sizes = {name: whole * data.draw(st.integers(1, max(most // whole, 1)), name) for name in ("hidden", "inter", "hidden_out")}
    sizes |= {"tokens": data.draw(st.integers(0, by.rows(300))), "experts": data.draw(st.integers(1, 40 if by.device == "cuda" else 9))}
    sizes |= {"top_k": data.draw(st.integers(1, 5)), "seed": data.draw(st.integers(0, 99))}
    case = data.draw(st.sampled_from(every_body()))
    flags = {"bias": data.draw(st.booleans()), "weight_on_input": data.draw(st.booleans())}
    storage = STORAGES[data.draw(st.sampled_from(sorted(STORAGES)))]
    return {**sizes, **flags, **storage, "activation": case.activation, "gating": case.gating, "up_first": case.up_first}


each = pytest.mark.parametrize("by", [pytest.param(by, marks=by.marks(), id=by.name) for by in PROVIDERS if by.trains])


@each
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_call(by: By, data: st.DataObject) -> None:
    check(by, PLAIN, data.draw(st.sampled_from(by.dtypes)), **any_call(by, data))
