"""Fake tensors, schemas and autograd agree with what runs, and compiled programs call the ops as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.contract.providers import BF16, F32, F64, INTERPRETED, PROVIDERS, By, table
from tests.contract.rows import IDS, WEIGHTS, Row, X
from tests.contract.tier import TierRow, ops
from tests.cpu.ops_case import assert_as_exact

pytestmark = pytest.mark.skipif(INTERPRETED, reason="unset TRITON_INTERPRET")
PORTABLE = next(by for by in PROVIDERS if by.name == "portable")
ROWS: list[tuple[Row | TierRow, torch.dtype]] = [
    (Row("stacked", "the usual call"), F64),
    (Row("separate", "a tensor for each expert", {"separate": True, "gating": "separate"}), F64),
    (Row("in-out", "stored the other way", {"transposed": True, "gating": "interleaved", "weight_on_input": True}), F64),
    (Row("plain-bfloat16", "a wider result", {"bias": False, "gating": "plain", "activation": "relu2", "out_dtype": F32}), BF16),
    (Row("no-tokens", "no rows", {"tokens": 0}), F64),
    (Row("list-of-one", "one tensor that is no stack", {"experts": 1, "separate": True, "top_k": 1}), F64),
    (Row("terms", "factors", rank=3), F32),
    (Row("codes", "packed weights; opcheck cannot compare float8", encodings=("nibbles, zeros", "", "nibbles, zeros")), F32),
    (Row("codes-bfloat16", "and both", encodings=("int8 channels", "", "nibbles, zeros"), rank=3), BF16),
    *((TierRow(op, "an op of the tier", op), F64) for op in ("permute", "linear", "rows", "combine")),
    (TierRow("linear-separate", "a tensor for each expert", "linear", form="separate"), F64),
    (TierRow("linear-no-bias", "without", "linear", bias=False), F64),
    (TierRow("combine-no-weights", "without", "combine", bias=False), F64),
    (TierRow("coded", "packed weights", "linear", encoding="nibbles, zeros"), F64),
]


@pytest.mark.every_value
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("row", "dtype"), [pytest.param(*case, id=case[0].name) for case in ROWS])
def test_opcheck(row: Row | TierRow, dtype: torch.dtype, grad: bool) -> None:
    it = row.drawn(PORTABLE, dtype)
    op, options = it.call
    op = getattr(op, "default", op)
    torch.library.opcheck(op, tuple(it.copied(grad=grad)), options)


@pytest.mark.parametrize("form", ["stacked", "separate"])
def test_opcheck_of_the_tiers_gradients(form: str) -> None:
    """All gradients, and only some."""
    it = TierRow("linear", "its rows, offsets, weights and biases", "linear", form=form).drawn(PORTABLE, F64)
    xs, offsets, w, b = it.args
    ys, check = it.run(it.args), torch.library.opcheck
    for needs in ([True, True, True], [False, True, False]):
        check(ops.grouped_linear_backward.default, (ys, xs, offsets, w, b, needs))
    check(ops.expert_rows_backward.default, (ys, b, offsets))
    ys, weights, order, offsets, top_k, _ = TierRow("combine", "its slots", "combine").drawn(PORTABLE, F64).args
    check(ops.combine_backward.default, (ys.new_ones(len(weights), ys.shape[1]), ys, weights, order, offsets, top_k, [True, True]))


@table([row for row, _ in ROWS if isinstance(row, Row)], lambda by: by.name in ("portable", "c++"))
def test_meta_agrees(by: By, row: Row, dtype: torch.dtype) -> None:
    it = row.drawn(by, BF16)
    with by.running():
        real = it.run(it.args)
        meta = it.run([[t.to("meta") for t in a] if isinstance(a, list) else a.to("meta") for a in it.args])
    assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


COMPILED = [
    (Row("in-out", "stored the other way", {"transposed": True}), F32),
    (Row("separate", "a tensor for each expert", {"separate": True, "gating": "separate", "activation": "silu_clamp"}), F32),
    (Row("constants", "of an activation", {"activation": "swiglu_oai", "weight_on_input": True}), BF16),
    (Row("codes", "packed weights", encodings=("nibbles, zeros", "", "nibbles, zeros")), BF16),
    (TierRow("body", "all ops of the tier", "body", "transposed"), F32),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("row", "dtype"), [pytest.param(*case, id=case[0].name) for case in COMPILED])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_forward_and_backward_with_any_number_of_tokens(row: Any, dtype: torch.dtype) -> None:
    """One compilation serves every T; Inductor hands weights to the op with the strides they have."""
    counter, whole = CompileCounterWithBackend("inductor"), row.drawn(PORTABLE, dtype, **({"tokens": 17} if isinstance(row, Row) else {}))

    def around(function: Any) -> Any:
        return lambda args: function([args[X].sin(), *args[1:]]).to(torch.promote_types(dtype, F32)).cos()

    compiled = torch.compile(around(whole.run), backend=counter, fullgraph=True)
    for tokens in (3, 5, 4):
        results = []
        for function, of in ((compiled, None), (around(whole.run), None), (lambda args: around(whole.meaning)(args).double(), F64)):
            args = whole.copied(of)
            for i in (X, IDS, WEIGHTS):
                args[i] = args[i][:tokens].clone()
                torch._dynamo.mark_dynamic(args[i], 0)
            leaves = [t.requires_grad_() for t in whole.leaves(args)]
            out = function(args)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        for got, want, exact in zip(*results, strict=True):
            assert_as_exact(got, want, exact, dtype)
        assert [g.stride() for g in results[0][1:]] == [t.stride() for t in leaves]
    assert counter.frame_count == 1
