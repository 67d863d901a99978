"""``moefuse::router_logits``, and the pass that puts it in place of a router's product under ``options={"fuse_router": True}``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefuse.passes.block import router_topk
from tests.cpu.test_router import E, H, K, Layer, run

Routed = tuple[Tensor, Tensor]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OP = torch.ops.moefuse.router_logits
FEW, MANY = 4, 40


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device that has kernels."""
    monkeypatch.setattr(router_topk, "DEVICES", {"cpu"})


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((drawn(5, 9), drawn(4, 9, seed=1), None, torch.float32), id="plain"),
        pytest.param((drawn(2, 3, 9).bfloat16(), drawn(9, 4, seed=1).t(), drawn(4, seed=2), torch.bfloat16), id="mixed"),
        pytest.param((drawn(0, 9), drawn(4, 9, seed=1), None, torch.float32), id="no-tokens"),
        pytest.param((drawn(3, 0), drawn(4, 0, seed=1), drawn(4, seed=2), torch.float32), id="no-inputs"),
    ],
)
def test_opcheck(args: tuple[Any, ...]) -> None:
    torch.library.opcheck(OP.default, args)


def test_values() -> None:
    """16-bit factors are summed wide and rounded once."""
    x, w, bias = drawn(6, 200, dtype=torch.bfloat16), drawn(4, 200, seed=1, dtype=torch.bfloat16), drawn(4, seed=2)
    exact = F.linear(x.double(), w.double(), bias.double())
    torch.testing.assert_close(OP(x, w, bias, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(OP(x, w, bias, torch.bfloat16).double(), exact, rtol=2**-8, atol=1e-5)


def test_no_gradient() -> None:
    with pytest.raises(RuntimeError, match=r"^moefuse::router_logits has no gradient; it is for inference$"):
        OP(drawn(3, 8).requires_grad_(), drawn(4, 8), None, torch.float32)


def renormalised(logits: Tensor, x: Tensor) -> Routed:
    weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), K, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype), ids


def linear(it: Layer, x: Tensor) -> Routed:
    return renormalised(it.gate(x), x)


def linear_with_bias(it: Layer, x: Tensor) -> Routed:
    return renormalised(F.linear(input=x, weight=it.gate.weight, bias=it.bias), x)


def product(it: Layer, x: Tensor) -> Routed:
    return renormalised(x @ it.gate.weight.t(), x)


def product_of_views(it: Layer, x: Tensor) -> Routed:
    return renormalised(torch.matmul(x.view(2, -1, H), it.gate.weight.mT).reshape(-1, E).float(), x)


def contraction(it: Layer, x: Tensor) -> Routed:
    return renormalised(torch.einsum("th,eh->te", x, it.gate.weight), x)


def added_product(it: Layer, x: Tensor) -> Routed:
    return renormalised(torch.addmm(it.bias, x, it.gate.weight.t()), x)


def cast(it: Layer, x: Tensor) -> Routed:
    """DeepSeek-V3 and its heirs."""
    return renormalised(F.linear(x.type(torch.float32), it.gate.weight.type(torch.float32)), x)


def cast_product(it: Layer, x: Tensor) -> Routed:
    return renormalised(x.float() @ it.gate.weight.t().float(), x)


def cast_read_elsewhere(it: Layer, x: Tensor) -> Routed:
    """The cast stays for its other reader."""
    wide = x.float()
    weights, ids = renormalised(F.linear(wide, it.gate.weight.float()), x)
    return (weights * wide.mean()).to(x.dtype), ids


def one_cast(it: Layer, x: Tensor) -> Routed:
    """A weight that is kept in float32."""
    return renormalised(F.linear(x.float(), it.bias[:, None] * torch.ones(H)), x)


def compiled(route: Callable[..., Routed], tokens: int, dtype: torch.dtype, dynamic: bool = False) -> tuple[Any, Tensor, Tensor]:
    """(operations in the graph, result, what the model gives)."""
    model = Layer(route).to(dtype)
    x = drawn(tokens, H, seed=5, dtype=dtype)
    with torch.no_grad():
        out, report, names = run(model, x, dynamic, fuse_router=True)
        assert (len(report.fused), names["moefuse.route"]) == (1, 1)
        assert ("kernel and one for its logits" in report.notes[0]) == bool(names["moefuse.router_logits"])
        return names, out, model(x)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, **({"rtol": 2**-6, "atol": 2**-6} if a.dtype == torch.bfloat16 else {}))


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", [linear, linear_with_bias, product, product_of_views, contraction, added_product, cast_read_elsewhere])
def test_few_tokens(route: Callable[..., Routed], dtype: torch.dtype) -> None:
    names, out, wanted = compiled(route, FEW, dtype)
    assert names["moefuse.router_logits"] == 1
    assert names["linear"] + names["matmul"] + names["addmm"] + names["einsum"] == 0
    close(out, wanted)


@pytest.mark.every_value(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tokens", [1, MANY])
@pytest.mark.parametrize("route", [cast, cast_product])
def test_casts_of_both_factors(route: Callable[..., Routed], tokens: int, dynamic: bool) -> None:
    """Neither factor is copied."""
    names, out, wanted = compiled(route, tokens, torch.bfloat16, dynamic)
    assert names["moefuse.router_logits"] == 1
    assert names["type"] + names["float"] == 0
    close(out, wanted)


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("route", "dtype", "dynamic"),
    [(linear, BF16, False), (linear, F32, False), (cast, F32, False), (one_cast, BF16, False), (linear, BF16, True), (cast, F32, True)],
)
def test_what_a_library_does_well_stays(route: Callable[..., Routed], dtype: torch.dtype, dynamic: bool) -> None:
    """And what may be few tokens or many."""
    names, out, wanted = compiled(route, MANY, dtype, dynamic)
    assert not names["moefuse.router_logits"]
    close(out, wanted)


@pytest.mark.parametrize("route", [cast, linear])
def test_one_graph_for_any_number_of_tokens(route: Callable[..., Routed]) -> None:
    """Whether tokens are few is not asked where their number is a symbol."""
    model = Layer(route).bfloat16()
    compiled = torch.compile(model, backend="moefuse", dynamic=True, options={"fuse_router": True})
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (FEW, MANY, FEW + 1):
            x = drawn(tokens, H, seed=5, dtype=torch.bfloat16)
            close(compiled(x), model(x))


def logits_read_elsewhere(it: Layer, x: Tensor) -> Routed:
    logits = it.gate(x)
    weights, ids = renormalised(logits, x)
    return weights + logits.mean(), ids


def scaled_addition(it: Layer, x: Tensor) -> Routed:
    return renormalised(torch.addmm(it.bias, x, it.gate.weight.t(), beta=2.0), x)


def added_matrix(it: Layer, x: Tensor) -> Routed:
    return renormalised(torch.addmm(it.bias.expand(len(x), E), x, it.gate.weight.t()), x)


@pytest.mark.parametrize("route", [logits_read_elsewhere, scaled_addition, added_matrix])
def test_what_is_more_than_the_op_stays(route: Callable[..., Routed]) -> None:
    names, out, wanted = compiled(route, FEW, torch.float32)
    assert not names["moefuse.router_logits"]
    close(out, wanted)


def changed_behind_the_cast(it: Layer, x: Tensor) -> Routed:
    """The product must see the tokens as they were when they were cast."""
    x = x.clone()
    wide = x.float()
    x.mul_(-3.0)
    return renormalised(F.linear(wide, it.gate.weight.float()), x)


def test_a_write_between_cast_and_product() -> None:
    names, out, wanted = compiled(changed_behind_the_cast, FEW, torch.bfloat16)
    assert names["float"] == 1
    assert names["moefuse.router_logits"] == 1
    close(out, wanted)
    torch._dynamo.reset()
    names, out, wanted = compiled(changed_behind_the_cast, MANY, torch.bfloat16)
    assert not names["moefuse.router_logits"]
    close(out, wanted)


def test_gradients_keep_the_product() -> None:
    model, x = Layer(linear), drawn(FEW, H, seed=5)
    out, report, names = run(model, x, fuse_router=True)
    assert len(report.fused) == 1
    assert not names["moefuse.router_logits"] + names["moefuse.route"]
    close(out, model(x))
