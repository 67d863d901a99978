"""Every argument error of the ops: its whole text, from the kernel and from the fake alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moefuse.ops  # noqa: F401  (registers torch.ops.moefuse)
from moefuse.ops.meaning.call import Body, ExpertsCall, join
from moefuse.ops.meaning.encoding import Encoding
from moefuse.ops.meaning.recipe import Recipe
from moefuse.runtime import providers

ops = torch.ops.moefuse
FLOATS = "float16, bfloat16, float32, float64"
INTS = "int64, int32, int16, int8, uint8"
ACTIVATIONS = "'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2', 'sigmoid', 'tanh', 'identity', 'swiglu_oai', 'silu_clamp', 'mish'"
WEIGHT = "one stacked tensor [E, out, in], or one tensor [out, in] per expert"
VECTOR = "one stacked tensor [E, out], or one tensor [out] per expert"


def z(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ids(*shape: int) -> Tensor:
    return z(*shape, dtype=torch.int64)


# T=5, H=6, I=4, E=3, K=2, Hout=7
EXPERTS: dict[str, Any] = {
    "x": z(5, 6),
    "ids": ids(5, 2),
    "weights": z(5, 2),
    "w_in": [z(3, 8, 6)],
    "w_up": [],
    "w_out": [z(3, 7, 4)],
    "b_in": [],
    "b_up": [],
    "b_out": [],
}
SEPARATE = {"gating": "separate", "w_in": [z(3, 4, 6)], "w_up": [z(3, 4, 6)]}


Row = tuple[str, dict[str, Any], str]
"""A name, what is changed of legal values, and what the error says."""


def named(rows: list[Row]) -> list[Any]:
    return [pytest.param(changes, text, id=name) for name, changes, text in rows]


def kind(text: str) -> type[Exception]:
    return TypeError if "dtype" in text else ValueError


EXPERTS_ERRORS: list[Row] = [
    ("x-rank", {"x": z(1, 5, 6)}, "argument `x` has shape [1, 5, 6]; legal: [T, H]"),
    ("x-dtype", {"x": ids(5, 6)}, f"argument `x` has dtype int64; legal: {FLOATS}"),
    ("ids-rank", {"ids": ids(10)}, "argument `ids` has shape [10]; legal: [T, K]"),
    ("ids-dtype", {"ids": z(5, 2)}, f"argument `ids` has dtype float32; legal: {INTS}"),
    ("ids-rows", {"ids": ids(4, 2)}, "argument `ids` has shape [4, 2]; legal: [T, K] with T=5, the rows of `x`"),
    ("weights-rank", {"weights": z(10)}, "argument `weights` has shape [10]; legal: [T, K], the shape of `ids`"),
    ("weights-dtype", {"weights": ids(5, 2)}, f"argument `weights` has dtype int64; legal: {FLOATS}"),
    ("weights-rows", {"weights": z(4, 2)}, "argument `weights` has shape [4, 2]; legal: [5, 2], the shape of `ids`"),
    ("weights-columns", {"weights": z(5, 3)}, "argument `weights` has shape [5, 3]; legal: [5, 2], the shape of `ids`"),
    ("ids-device", {"ids": ids(5, 2).to("meta")}, "argument `ids` is on meta; legal: cpu, the device of `x`"),
    ("weights-device", {"weights": z(5, 2).to("meta")}, "argument `weights` is on meta; legal: cpu, the device of `x`"),
    ("weight-device", {"w_in": [z(3, 8, 6).to("meta")]}, "argument `w_in` is on meta; legal: cpu, the device of `x`"),
    ("gating", {"gating": "glu"}, "argument `gating` is 'glu'; legal: 'merged', 'interleaved', 'separate', 'plain'"),
    ("activation", {"activation": "swish"}, f"argument `activation` is 'swish'; legal: {ACTIVATIONS}"),
    ("args", {"activation_args": [1.0]}, "argument `activation_args` has 1 values; legal: 0 for activation 'silu'"),
    ("args-named", {"activation": "swiglu_oai"},
     "argument `activation_args` has 0 values; legal: 2 (alpha, limit) for activation 'swiglu_oai'"),
    ("plain-with-gated-activation", {"gating": "plain", "activation": "silu_clamp", "activation_args": [1.0]},
     "argument `gating` is 'plain'; legal: a gated form, because activation 'silu_clamp' mixes gate and up"),
    ("up-first", {**SEPARATE, "up_first": True},
     "argument `up_first` is True; legal: False for gating 'separate'; only 'merged' and 'interleaved' have an order"),
    ("out-dtype", {"out_dtype": torch.int32}, f"argument `out_dtype` is int32; legal: None, {FLOATS}"),
    ("w-in-empty", {"w_in": []}, f"argument `w_in` is empty; legal: {WEIGHT}"),
    ("w-in-rank", {"w_in": [z(24)]}, f"argument `w_in[0]` has shape [24] in a list of 1; legal: {WEIGHT}"),
    ("w-in-ranks", {"w_in": [z(8, 6), z(1, 8, 6)]}, f"argument `w_in[1]` has shape [1, 8, 6] in a list of 2; legal: {WEIGHT}"),
    ("w-in-shapes-differ", {"w_in": [z(8, 6), z(8, 6), z(8, 5)]},
     "argument `w_in[2]` has shape [8, 5]; legal: [8, 6], the shape of `w_in[0]`"),
    ("w-in-dtype", {"w_in": [z(3, 8, 6).half()]}, "argument `w_in` has dtype float16; legal: float32, the dtype of `x`"),
    ("w-in-one-dtype", {"w_in": [z(8, 6), z(8, 6).half(), z(8, 6)]},
     "argument `w_in[1]` has dtype float16; legal: float32, the dtype of `x`"),
    ("w-in-hidden", {"w_in": [z(3, 8, 5)]}, "argument `w_in` holds 3 experts of shape [8, 5]; legal: 6 input features"),
    ("w-in-odd", {"w_in": [z(3, 7, 6)]}, "argument `w_in` has 7 output features; legal: an even number for gating 'merged' (gate and up)"),
    ("w-up-unwanted", {"w_up": [z(3, 4, 6)]},
     "argument `w_up` holds 1 tensors; legal: an empty list for gating 'merged'; only 'separate' has it"),
    ("b-up-unwanted", {"b_up": [z(3, 4)]},
     "argument `b_up` holds 1 tensors; legal: an empty list for gating 'merged'; only 'separate' has it"),
    ("w-up-missing", {**SEPARATE, "w_up": []}, f"argument `w_up` is empty; legal: {WEIGHT}"),
    ("w-up-experts", {**SEPARATE, "w_up": [z(2, 4, 6)]}, "argument `w_up` holds 2 experts of shape [4, 6]; legal: 3 experts, as in `w_in`"),
    ("w-up-width", {**SEPARATE, "w_up": [z(3, 5, 6)]}, "argument `w_up` holds 3 experts of shape [5, 6]; legal: 4 output features"),
    ("w-out-width", {"w_out": [z(3, 7, 8)]}, "argument `w_out` holds 3 experts of shape [7, 8]; legal: 4 input features"),
    ("w-out-list-length", {"w_out": [z(7, 4), z(7, 4)]},
     "argument `w_out` holds 2 experts of shape [7, 4]; legal: 3 experts, as in `w_in`"),
    ("b-in-rank", {"b_in": [z(3, 8, 1)]}, f"argument `b_in[0]` has shape [3, 8, 1] in a list of 1; legal: {VECTOR}"),
    ("b-in-count", {"b_in": [z(2, 8)]}, "argument `b_in` holds 2 vectors of size 8; legal: 3 vectors, one per expert"),
    ("b-in-size", {"b_in": [z(3, 4)]}, "argument `b_in` holds 3 vectors of size 4; legal: size 8, the output features of its projection"),
    ("b-out-size", {"b_out": [z(3, 8)]},
     "argument `b_out` holds 3 vectors of size 8; legal: size 7, the output features of its projection"),
    ("b-out-dtype", {"b_out": [z(3, 7).double()]}, "argument `b_out` has dtype float64; legal: float32, the dtype of `x`"),
]  # fmt: skip


def both(call: Callable[[bool], Any], error: type[Exception], text: str) -> None:
    """The error comes from the kernel, and from the fake."""
    for fake in (False, True):
        with pytest.raises(error) as caught:
            call(fake)
        assert str(caught.value).split("\n", 1)[0] == text, fake


def faked(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [mode.from_tensor(t) for t in value]
    return value


def invoke(op: Any, values: dict[str, Any], fake: bool) -> Any:
    if not fake:
        return op(**values)
    mode = FakeTensorMode()
    with mode:
        return op(**{k: faked(v, mode) for k, v in values.items()})


@pytest.mark.parametrize(("changes", "text"), named(EXPERTS_ERRORS))
def test_experts(changes: dict[str, Any], text: str) -> None:
    both(lambda fake: invoke(ops.experts, {**EXPERTS, **changes}, fake), kind(text), f"moefuse::experts: {text}")


@pytest.mark.parametrize(("changes", "text"), named(EXPERTS_ERRORS[:3]))
def test_experts_under_autograd(changes: dict[str, Any], text: str) -> None:
    """The differentiated path names the public op too."""
    values = {**EXPERTS, **changes, "w_out": [z(3, 7, 4).requires_grad_()]}
    with pytest.raises(kind(text)) as caught:
        ops.experts(**values)
    assert str(caught.value) == f"moefuse::experts: {text}"


EMPTY: list[Tensor] = []
FAMILY: dict[str, dict[str, Any]] = {
    "experts_extended": {"codes": EMPTY, **{f"{side}_{name}": EMPTY for name in ("in", "up", "out") for side in "al"}},
}
"""Ops with all arguments of ``moefuse::experts``, and what they have beside these."""


@pytest.mark.parametrize("op", FAMILY)
@pytest.mark.parametrize(("changes", "text"), named([row for row in EXPERTS_ERRORS if row[0] != "weight-device"][::4]))
def test_the_op_that_was_called_is_named(op: str, changes: dict[str, Any], text: str) -> None:
    values = {**EXPERTS, **FAMILY[op], **changes}
    both(lambda fake: invoke(getattr(ops, op), values, fake), kind(text), f"moefuse::{op}: {text}")


GROUPED: dict[str, Any] = {"xs": z(10, 6), "offsets": ids(4), "w": [z(3, 4, 6)], "b": []}
OTHERS: dict[str, tuple[dict[str, Any], list[Row]]] = {
    "permute": ({"x": z(5, 6), "ids": ids(5, 2), "num_experts": 3}, [
        ("x-rank", {"x": z(6)}, "argument `x` has shape [6]; legal: [T, H]"),
        ("ids-rank", {"ids": ids(5)}, "argument `ids` has shape [5]; legal: [T, K]"),
        ("ids-dtype", {"ids": z(5, 2)}, f"argument `ids` has dtype float32; legal: {INTS}"),
        ("ids-rows", {"ids": ids(4, 2)}, "argument `ids` has shape [4, 2]; legal: [T, K] with T=5, the rows of `x`"),
        ("ids-device", {"ids": ids(5, 2).to("meta")}, "argument `ids` is on meta; legal: cpu, the device of `x`"),
        ("num-experts", {"num_experts": 0}, "argument `num_experts` is 0; legal: 1 or more"),
    ]),
    "grouped_linear": (GROUPED, [
        ("xs-rank", {"xs": z(10)}, "argument `xs` has shape [10]; legal: [S, in]"),
        ("xs-dtype", {"xs": ids(10, 6)}, f"argument `xs` has dtype int64; legal: {FLOATS}"),
        ("w-empty", {"w": []}, f"argument `w` is empty; legal: {WEIGHT}"),
        ("w-dtype", {"w": [z(3, 4, 6).half()]}, "argument `w` has dtype float16; legal: float32, the dtype of `xs`"),
        ("w-width", {"w": [z(3, 4, 5)]}, "argument `w` has 5 input features; legal: 6, the columns of `xs`"),
        ("b-size", {"b": [z(3, 5)]}, "argument `b` holds 3 vectors of size 5; legal: size 4, the output features of its projection"),
        ("offsets-rank", {"offsets": ids(4, 1)}, "argument `offsets` has shape [4, 1]; legal: [E + 1]"),
        ("offsets-dtype", {"offsets": ids(4).int()}, "argument `offsets` has dtype int32; legal: int64"),
        ("offsets-size", {"offsets": ids(3)}, "argument `offsets` has shape [3]; legal: [E + 1] = [4] for 3 experts"),
        ("offsets-device", {"offsets": ids(4).to("meta")}, "argument `offsets` is on meta; legal: cpu, the device of `xs`"),
    ]),
    "grouped_linear_coded": ({
        **GROUPED, "w": [z(3, 4, 6, dtype=torch.int8)], "codes": [z(3, 4, 1)], "encoding": str(Encoding("s8", (1, 0))),
    }, [
        ("xs-rank", {"xs": z(10)}, "argument `xs` has shape [10]; legal: [S, in]"),
        ("w-width", {"w": [z(3, 4, 5, dtype=torch.int8)]}, "argument `w` has 5 input features; legal: 6, the columns of `xs`"),
        ("offsets-size", {"offsets": ids(3)}, "argument `offsets` has shape [3]; legal: [E + 1] = [4] for 3 experts"),
    ]),
    "expert_rows": ({"v": [z(3, 4)], "offsets": ids(4), "num_rows": 10}, [
        ("v-rank", {"v": [z(3, 4, 5)]}, f"argument `v[0]` has shape [3, 4, 5] in a list of 1; legal: {VECTOR}"),
        ("offsets-size", {"offsets": ids(3)}, "argument `offsets` has shape [3]; legal: [E + 1] = [4] for 3 experts"),
        ("offsets-device", {"offsets": ids(4).to("meta")}, "argument `offsets` is on meta; legal: cpu, the device of `v`"),
        ("num-rows", {"num_rows": -1}, "argument `num_rows` is -1; legal: 0 or more"),
    ]),
    "combine": ({"ys": z(10, 6), "weights": z(5, 2), "order": ids(10), "offsets": ids(4), "top_k": 2, "out_dtype": None}, [
        ("ys-rank", {"ys": z(10)}, "argument `ys` has shape [10]; legal: [S, H]"),
        ("ys-dtype", {"ys": ids(10, 6)}, f"argument `ys` has dtype int64; legal: {FLOATS}"),
        ("order-rank", {"order": ids(5, 2)}, "argument `order` has shape [5, 2]; legal: [S]"),
        ("order-dtype", {"order": ids(10).int()}, "argument `order` has dtype int32; legal: int64"),
        ("order-size", {"order": ids(9)}, "argument `order` has shape [9]; legal: [S] = [10], the rows of `ys`"),
        ("offsets-size", {"offsets": ids(1)}, "argument `offsets` has shape [1]; legal: [E + 1] with E >= 1"),
        ("order-device", {"order": ids(10).to("meta")}, "argument `order` is on meta; legal: cpu, the device of `ys`"),
        ("offsets-device", {"offsets": ids(4).to("meta")}, "argument `offsets` is on meta; legal: cpu, the device of `ys`"),
        ("top-k", {"top_k": 0}, "argument `top_k` is 0; legal: 1 or more"),
        ("top-k-divides", {"top_k": 3, "weights": None}, "argument `top_k` is 3; legal: a divisor of S=10, the rows of `ys`"),
        ("weights-rank", {"weights": z(10)}, "argument `weights` has shape [10]; legal: [T, K]"),
        ("weights-dtype", {"weights": ids(5, 2)}, f"argument `weights` has dtype int64; legal: {FLOATS}"),
        ("weights-device", {"weights": z(5, 2).to("meta")}, "argument `weights` is on meta; legal: cpu, the device of `ys`"),
        ("weights-k", {"weights": z(5, 3)}, "argument `weights` has shape [5, 3]; legal: [T, K] with K=2, the value of `top_k`"),
        ("weights-t", {"weights": z(4, 2)}, "argument `weights` has shape [4, 2]; legal: [T, K] with T*K=10, the rows of `ys`"),
        ("out-dtype", {"out_dtype": torch.int32}, f"argument `out_dtype` is int32; legal: None, {FLOATS}"),
    ]),
    "topk": ({"scores": z(5, 8), "k": 2}, [
        ("scores-rank", {"scores": z()}, "argument `scores` has shape []; legal: [..., E]"),
        ("scores-dtype", {"scores": ids(5, 8)}, f"argument `scores` has dtype int64; legal: {FLOATS}"),
        ("k-many", {"k": 9}, "argument `k` is 9; legal: 0 to the number of experts, 8"),
        ("k-negative", {"k": -1}, "argument `k` is -1; legal: 0 to the number of experts, 8"),
    ]),
    "route": ({**dataclasses.asdict(Recipe(2)), "logits": z(5, 8), "bias": None, "out_dtype": torch.float32}, [
        ("logits-dtype", {"logits": ids(5, 8)}, f"argument `logits` has dtype int64; legal: {FLOATS}"),
        ("k-many", {"k": 9}, "argument `k` is 9; legal: 0 to the number of experts, 8"),
        ("bias", {"bias": z(7)}, "argument `bias` has shape [7]; legal: [E] with E=8, the last dimension of `logits`"),
        ("score", {"score": "tanh"}, "argument `score` is 'tanh'; legal: 'identity', 'softmax', 'sigmoid'"),
        ("weight", {"weight": "tanh"}, "argument `weight` is 'tanh'; legal: 'identity', 'softmax', 'sigmoid'"),
        ("out-dtype", {"out_dtype": torch.int32}, f"argument `out_dtype` is int32; legal: {FLOATS}"),
        ("groups", {"groups": 3}, "argument `groups` is 3; legal: 0, or a divisor of the number of experts, 8"),
        ("kept", {"groups": 4, "kept": 5}, "argument `kept` is 5; legal: 0 to the number of groups, 4"),
        ("best", {"groups": 4, "best": 3}, "argument `best` is 3; legal: 0 to the experts of a group, 2"),
    ]),
    "router_logits": ({"x": z(5, 6), "w": z(8, 6), "bias": None, "out_dtype": torch.float32}, [
        ("x-rank", {"x": z()}, "argument `x` has shape []; legal: [..., H]"),
        ("x-dtype", {"x": ids(5, 6)}, f"argument `x` has dtype int64; legal: {FLOATS}"),
        ("w-rank", {"w": z(2, 8, 6)}, "argument `w` has shape [2, 8, 6]; legal: [E, H]"),
        ("w-inputs", {"w": z(8, 7)}, "argument `w` has shape [8, 7]; legal: [E, H] with H=6, the last dimension of `x`"),
        ("bias", {"bias": z(7)}, "argument `bias` has shape [7]; legal: [E] with E=8, the first dimension of `w`"),
        ("out-dtype", {"out_dtype": torch.int32}, f"argument `out_dtype` is int32; legal: {FLOATS}"),
    ]),
}  # fmt: skip
"""Of the other ops: legal values, and what is wrong with others."""

OF_OTHERS = [pytest.param(op, {**legal, **row[1]}, row[2], id=f"{op}-{row[0]}") for op, (legal, rows) in OTHERS.items() for row in rows]


@pytest.mark.parametrize(("op", "values", "text"), OF_OTHERS)
def test_other_ops(op: str, values: dict[str, Any], text: str) -> None:
    both(lambda fake: invoke(getattr(ops, op), values, fake), kind(text), f"moefuse::{op}: {text}")


def test_expert_rows_of_nothing() -> None:
    text = "moefuse::expert_rows: argument `v` is empty; legal: one stacked tensor [E, n], or one tensor [n] per expert"
    with pytest.raises(ValueError, match=r"^moefuse::expert_rows: argument `v` is empty") as caught:
        ops.expert_rows([], ids(4), 10)
    assert str(caught.value) == text


def test_internal_forward_has_no_gradient() -> None:
    tensors, counts = join([z(5, 6).requires_grad_(), *list(EXPERTS.values())[1:3]], list(EXPERTS.values())[3:9])
    with pytest.raises(RuntimeError, match=r"moefuse::experts_forward is internal and has no gradient; call the public op it belongs to"):
        ops.experts_forward(tensors, counts, *Body().encode(), torch.float32)


def test_provider_for_an_unknown_op() -> None:
    provider = providers.Provider("mine", lambda *a: None, lambda *a: None)
    with pytest.raises(ValueError, match=r"^no op 'expert' to provide; ops: experts, experts_forward, "):
        providers.register("expert", provider)


def test_providers_are_asked_in_order_and_say_why_not() -> None:
    """The seam for other kernels: the newest first, a reason hands the call on, the portable one is last."""
    never = providers.Provider("never", lambda *a: "no such device", lambda *a: None)
    marker = providers.Provider("marker", lambda call: None if call.x.shape[0] == 5 else "only 5 tokens", lambda *a: z(1))
    try:
        providers.register("experts", marker)
        providers.register("experts", never)
        assert ops.experts(**EXPERTS).shape == (1,)
        values = {**EXPERTS, "x": z(4, 6), "ids": ids(4, 2), "weights": z(4, 2)}
        assert ops.experts(**values).shape == (4, 7)
        reasons = providers.explain("experts", ExpertsCall.of(**values))
        gpu = {
            "triton": "tensors on cpu, the kernels run on CUDA devices",
            "grouped_mm": "tensors on cpu, the kernels run on CUDA devices",
            "dense": "tensors on cpu, where reading the routing costs nothing",
        }
        assert reasons == {"never": "no such device", "marker": "only 5 tokens", **gpu, "portable": None}
    finally:
        providers.unregister("experts", "never")
        providers.unregister("experts", "marker")
        providers.unregister("experts", "portable")
    assert [p.name for p in providers.PROVIDERS["experts"]] == ["triton", "grouped_mm", "dense", "portable"]


def test_a_legal_kind_says_nothing_of_others() -> None:
    """Kinds that were legal are looked up; each thing that makes a call another kind is checked again."""
    from moefuse.ops.meaning import checks

    w = [z(4, 6) for _ in range(3)]
    separate = {**EXPERTS, **SEPARATE, "w_in": w, "w_up": list(w), "w_out": [z(7, 4) for _ in range(3)]}
    for legal, options in ((EXPERTS, {}), (separate, {"gating": "separate"})):
        data = {name: value for name, value in legal.items() if name != "gating"}

        def check(data: dict[str, Any] = data, **changes: Any) -> Any:
            return checks.check_experts(ExpertsCall.of(**data, **changes))

        assert check(**options) == check(**options)
        for name in ("x", "ids", "weights", "w_in", "w_out"):
            value = data[name]
            first = value if isinstance(value, Tensor) else value[-1]
            for other in (
                first.new_zeros(first.shape[1:]),
                first.to(torch.complex64),
                first.to("meta"),
                first.new_zeros([9, *first.shape[1:]]),
            ):
                wrong = other if isinstance(value, Tensor) else [*value[:-1], other]
                with pytest.raises((TypeError, ValueError)):
                    check({**data, name: wrong}, **options)
        with pytest.raises(ValueError, match="activation"):
            check(activation="none", **options)
        with pytest.raises(TypeError, match="out_dtype"):
            check(out_dtype=torch.int64, **options)


def test_legal_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.ops.meaning import checks

    monkeypatch.setattr(checks, "_MAX_LEGAL", 3)
    monkeypatch.setattr(checks, "_legal", {})
    for tokens in range(1, 9):
        checks.check_experts(ExpertsCall.of(**{**EXPERTS, "x": z(tokens, 6), "ids": ids(tokens, 2), "weights": z(tokens, 2)}))
        assert len(checks._legal) <= 3
