"""Routed experts and a shared one in two launches of vectors: values at tiny sizes in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moefuse.ops.body import encode

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning")


def arguments(
    tokens: int = 3, top_k: int = 2, experts: int = 5, hidden: int = 12, inter: int = 7, wide: int = 16, *, gated: bool = True,
    merged: bool = True, shared_merged: bool = False, up_first: bool = False, activation: str = "silu", dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """A call of ``moefuse::experts_and_shared``."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def body(merged: bool, first: bool) -> tuple[Any, ...]:
        args = (1.702, 7.0) if activation == "swiglu_oai" else ()
        return encode(activation, args, "merged" if merged else "separate", first and merged, False)

    x, weights, gate = some(tokens, hidden) * hidden**0.5, some(tokens, top_k).abs(), some(tokens, 1).abs()
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    if device != "meta":
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    first = [some(experts, 2 * inter, hidden)] if merged else [some(experts, inter, hidden), some(experts, inter, hidden)]
    second = [some(2 * wide, hidden)] if shared_merged else [some(wide, hidden), some(wide, hidden)]
    routed = [x, ids, weights, *first, some(experts, hidden, inter)]
    shared = [x, *([gate] if gated else []), *second, some(hidden, wide)]
    counts, own = [1, len(first) - 1, 1, 0, 0, 0], [int(gated), 1, len(second) - 1, 1, 0, 0, 0]
    return (routed, counts, *body(merged, up_first), dtype, shared, own, *body(shared_merged, not up_first))


def check(**sizes: Any) -> None:
    """Against the op in order in double precision; every buffer begins as NaN."""
    from moefuse.kernels.triton import joined_plan

    args = arguments(**sizes)
    wide = [t.double() if t.is_floating_point() else t for t in args[0]], [t.double() for t in args[6]]
    wide[1][0] = wide[0][0]
    exact = torch.ops.moefuse.experts_and_shared(wide[0], *args[1:5], torch.float64, wide[1], *args[7:], 0)
    own = torch.ops.moefuse.experts_and_shared(*args, 0)
    joined_plan.forget()
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **more: empty(*size, **more).fill_(float("nan")))
        out = joined_plan.run(*args)
    assert out is not None
    assert out.dtype == own.dtype
    error, theirs = ((t.double() - exact).abs().max().item() for t in (out, own))
    assert error <= 1.1 * theirs + 4 * torch.finfo(out.dtype).eps * exact.abs().max().item()


@pytest.fixture(autouse=True)
def _as_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the configuration would not choose vectors for so many slots."""
    from moefuse.kernels.triton import joined_plan
    from moefuse.kernels.triton.config import Config, Vectors

    monkeypatch.setattr(joined_plan, "_vectors", lambda *a: Config(0, Vectors(4, 8), Vectors(4, 8, at=2)))


@quiet
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="a last piece with fewer features"),
        pytest.param({"wide": 14}, id="whole pieces"),
        pytest.param({"wide": 3}, id="less than one piece"),
        pytest.param({"gated": False}, id="no weight per token"),
        pytest.param({"merged": False, "shared_merged": True}, id="the other storages"),
        pytest.param({"up_first": True, "shared_merged": True}, id="up before gate, and gate before up"),
        pytest.param({"tokens": 1, "top_k": 1, "experts": 1, "inter": 1, "wide": 1, "hidden": 1}, id="ones"),
        pytest.param({"inter": 8, "wide": 32, "hidden": 16, "top_k": 6}, id="even, more slots than one round"),
        pytest.param({"dtype": torch.float16}, id="float16"),
        pytest.param({"dtype": torch.bfloat16, "activation": "gelu_tanh"}, id="bfloat16"),
        pytest.param({"activation": "swiglu_oai"}, id="constants"),
    ],
)
def test_values(sizes: dict[str, Any]) -> None:
    check(**sizes)


@quiet
@given(
    tokens=st.integers(1, 4), top_k=st.integers(1, 5), experts=st.integers(1, 6), hidden=st.integers(1, 12), inter=st.integers(1, 9),
    wide=st.integers(1, 20), gated=st.booleans(), merged=st.booleans(), shared_merged=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_sizes(**sizes: Any) -> None:
    check(**sizes)


@pytest.mark.parametrize("change", ["other tokens", "other activation", "input weight", "bias", "transposed"])
def test_what_it_leaves(change: str) -> None:
    """None: the two run one after another, or on two streams."""
    from moefuse.kernels.triton import joined_plan

    args = list(arguments(inter=8, wide=8, hidden=8))
    if change == "other tokens":
        args[6] = [args[6][0].clone(), *args[6][1:]]
    elif change == "other activation":
        args[8] = encode("relu", (), "separate", False, False)[0]
    elif change == "input weight":
        args[2] = encode("silu", (), "merged", False, True)[0]
    elif change == "bias":
        args[0], args[1] = [*args[0], torch.zeros(5, 8)], [1, 0, 1, 0, 0, 1]
    else:
        args[0] = [*args[0][:4], args[0][4].transpose(1, 2).contiguous().transpose(1, 2)]
    assert joined_plan.run(*args) is None
