"""The router's kernel on the device: values against torch.topk, graphs, repeatability, no waiting, and through torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.recipe import Recipe, route_reference
from moefuse.ops.meaning.reference import topk_reference
from moefuse.runtime import providers

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SIZES = [(1, 128, 8), (7, 8, 2), (64, 64, 6), (300, 512, 10), (1, 1, 1), (33, 1024, 32), (5000, 256, 8), (0, 64, 8), (3, 257, 9)]


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    assert providers.select("topk", scores, k).name == "triton"
    return torch.ops.moefuse.topk(scores, k)  # type: ignore[no-any-return]


def distinct(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Scores no two of which are equal in a row, in any order."""
    values = torch.arange(experts, device="cuda", dtype=torch.float32) - experts // 3
    return values[torch.rand(tokens, experts, device="cuda").argsort(-1)].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_what_torch_gives(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    scores = distinct(tokens, experts, dtype)
    for got, want in zip(topk(scores, k), torch.topk(scores, k), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_any_bits(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    """Every NaN, both zeros, numbers that are not normal, ties: what the definition gives, to the bit."""
    kind = INTEGERS[dtype]
    bits = torch.iinfo(kind)
    scores = torch.randint(bits.min, bits.max, (tokens, experts), dtype=kind).view(dtype)
    scores[::2, ::3] = torch.tensor([0.0, -0.0]).to(dtype)[torch.randint(2, scores[::2, ::3].shape)]
    values, ids = topk(scores.cuda(), k)
    want_values, want_ids = topk_reference(scores, k)
    assert torch.equal(ids.cpu(), want_ids)
    assert torch.equal(values.cpu().view(kind), want_values.view(kind))


def test_strides() -> None:
    for scores in (
        distinct(16, 40, torch.float32).t(),
        distinct(30, 64, torch.bfloat16)[::3, ::2],
        distinct(6, 32, torch.float32).view(2, 3, 32),
    ):
        for got, want in zip(topk(scores, 4), topk_reference(scores, 4), strict=True):
            assert torch.equal(got, want)


def test_a_graph_replays_with_other_scores_and_the_host_never_waits() -> None:
    scores = distinct(64, 128, torch.float32)
    topk(scores, 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, ids = topk(scores, 8)
    for _ in range(3):
        scores.copy_(distinct(64, 128, torch.float32))
        graph.replay()
        want = torch.topk(scores, 8)
        assert torch.equal(values, want.values)
        assert torch.equal(ids, want.indices)
    torch.cuda.set_sync_debug_mode("error")
    try:
        topk(scores, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bitwise_equal_from_run_to_run() -> None:
    scores = torch.randint(0, 3, (4096, 128), device="cuda").float()
    first = topk(scores, 8)
    for _ in range(5):
        assert all(map(torch.equal, topk(scores, 8), first))


def test_one_launch() -> None:
    scores = distinct(64, 128, torch.float32)
    topk(scores, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        topk(scores, 8)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert [n for n in names if "choose" in n or "Mem" in n] == ["choose"], names


RECIPES = {
    "softmax": (128, Recipe(8, "softmax", renormalise=True)),
    "sigmoid": (64, Recipe(6, "sigmoid", by_choice=False, renormalise=True, eps=1e-20, scale=2.5)),
    "chosen": (32, Recipe(4, weight="softmax")),
    "groups": (256, Recipe(8, "sigmoid", 8, 4, 2, by_choice=False, renormalise=True, eps=1e-20, scale=2.5)),
    "odd groups": (160, Recipe(6, "softmax", 8, 3, 1, lowest=False, scale=16.0)),
    "widest": (1024, Recipe(32, "softmax", 16, 4, 2, renormalise=True, least=0.5)),
}


@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_routers(name: str, dtype: torch.dtype, tokens: int) -> None:
    """Ids as the definition gives them, but where what the choice is made by is nearly equal; and their weights. Equal from run to run."""
    experts, recipe = RECIPES[name]
    logits, bias = torch.randn(tokens, experts, device="cuda").to(dtype), torch.randn(experts, device="cuda") * 0.1
    assert providers.select("route", logits, bias, recipe, dtype).name == "triton"
    weights, ids = torch.ops.moefuse.route(logits, bias, *recipe.arguments, dtype)
    want_weights, want_ids = route_reference(logits, bias, recipe, dtype)
    alike = (ids == want_ids).all(-1)
    assert int((~alike).sum()) <= tokens // 100
    torch.testing.assert_close(weights[alike], want_weights[alike], rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-7)
    again = torch.ops.moefuse.route(logits, bias, *recipe.arguments, dtype)
    assert all(map(torch.equal, again, (weights, ids)))


LOGITS = [(1, 128, 2048), (8, 60, 1000), (3, 256, 7168), (5, 4, 20001), (17, 128, 2048), (16, 9, 130), (300, 256, 7168), (0, 16, 64)]


@pytest.mark.parametrize("kinds", [(torch.bfloat16,) * 3, (torch.float16, torch.float16, torch.float32), (torch.float32,) * 3,
                                   (torch.bfloat16, torch.float32, torch.float32)])  # fmt: skip
@pytest.mark.parametrize(("tokens", "experts", "hidden"), LOGITS)
def test_logits(tokens: int, experts: int, hidden: int, kinds: tuple[torch.dtype, ...]) -> None:
    """Within the rounding of a float32 sum and of the result, by the kernel and by the library; equal from run to run."""
    x = torch.randn(tokens, hidden, device="cuda").to(kinds[0])
    w, bias = torch.randn(experts, hidden, device="cuda").to(kinds[1]), torch.randn(experts, device="cuda")
    for weight, added in ((w, None), (w.t().contiguous().t(), bias)):
        assert providers.select("router_logits", x, weight, added, kinds[2]).name == "triton"
        got = torch.ops.moefuse.router_logits(x, weight, added, kinds[2])
        exact = torch.nn.functional.linear(x.double(), w.double(), None if added is None else added.double())
        size = x.double().abs() @ w.double().abs().t() + bias.double().abs()
        assert bool(((got - exact).abs() <= 2.0**-20 * size + torch.finfo(kinds[2]).eps / 2 * exact.abs()).all())
        assert torch.equal(torch.ops.moefuse.router_logits(x, weight, added, kinds[2]), got)


class Block(torch.nn.Module):
    """A router as DeepSeek-V3 has it, in front of experts that are matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16))
        self.experts = torch.nn.Parameter(torch.randn(64, 1024, 32, device="cuda", dtype=torch.bfloat16) / 32)

    def forward(self, x: Tensor) -> Any:
        logits = torch.nn.functional.linear(x.float(), self.w.float())
        weights, ids = torch.topk(logits.softmax(-1), 4)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros(len(x), 32, device=x.device, dtype=x.dtype)
        for e in range(64):
            out = out + (x @ self.experts[e]) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_router_that_casts_both_factors(tokens: int, dynamic: bool) -> None:
    """In a compiled layer nothing is copied: for few tokens the router is two launches, for many the library's product is one of them."""
    import moefuse

    block = Block()
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(block, backend="moefuse", dynamic=dynamic, options={"fuse_router": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x), rtol=2**-6, atol=2**-6)
        report = moefuse.last_report()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compiled(x)
            torch.cuda.synchronize()
    assert report is not None
    assert any("one kernel and one for its logits" in note for note in report.notes), report
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert ("few_logits" in names) == (tokens == 1), names  # torch never makes a symbol of 1
    assert names.count("route") == 1
    assert len(names[: names.index("route")]) <= 2, names  # the library may split the sum over H
    if tokens == 1:
        assert names[:2] == ["few_logits", "route"], names


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_router_in_a_compiled_layer(dynamic: bool) -> None:
    import moefuse
    from tests.cpu.test_fuse_router import groups_by_two
    from tests.cpu.test_router import H, Layer, T

    model: Any = Layer(groups_by_two).cuda()
    compiled = torch.compile(model, backend="moefuse", dynamic=dynamic, options={"fuse_router": True})
    with torch.no_grad():
        for tokens in (T, 5) if dynamic else (T,):
            x = torch.randn(tokens, H, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
            torch.testing.assert_close(compiled(x), model(x))
    report = moefuse.last_report()
    assert report is not None
    assert [n for n in report.notes if n.startswith("the router at")]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_in_a_compiled_layer(dynamic: bool) -> None:
    """The layer calls the op, and gives the same with and without it, gradients too."""
    import moefuse
    from tests.cpu.test_router import H, Layer, T, by_groups

    results: list[list[Tensor]] = []
    for on in (True, False):
        torch._dynamo.reset()
        model: Any = Layer(by_groups).cuda()
        x = torch.randn(T, H, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        out = torch.compile(model, backend="moefuse", dynamic=dynamic, options={"router_topk": on})(x)
        report = moefuse.last_report()
        assert report is not None
        assert len(report.fused) == 1
        assert len([n for n in report.notes if "top-k" in n]) == (3 if on else 0)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*list(model.experts.parameters()), model.gate.weight])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
