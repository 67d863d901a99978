"""What Inductor gets for ``moefuse::topk`` on a CUDA device: the kernel's own call, which writes to its results and to nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

KERNEL = torch.ops.higher_order.triton_kernel_wrapper_functional


@pytest.fixture
def compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks Triton's driver what to analyse the kernel for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(type(driver), "active", property(lambda self: Driver()))


def traced(k: int, device: str, *sizes: Any, dtype: torch.dtype = torch.float32, transposed: bool = False, mode: Any = None) -> list[Node]:
    import moefuse.ops  # noqa: F401  (registers the op)

    def router(scores: Tensor) -> Any:
        return torch.ops.moefuse.topk(scores.exp(), k)

    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        scores = torch.empty(*sizes, device=device, dtype=dtype)
        gm = aot_export_joint_simple(router, (scores.mT if transposed else scores,), trace_joint=False)
    return list(gm.graph.nodes)


@pytest.mark.usefixtures("compiles_for_hopper")
@pytest.mark.parametrize("sizes", [(8, 128), (2, 3, 64), (0, 16)], ids=["rows", "three-dimensions", "no-tokens"])
def test_a_kernel_that_writes_its_results(sizes: tuple[int, ...]) -> None:
    (call,) = (n for n in traced(4, "cuda", *sizes) if n.target is KERNEL)
    assert call.kwargs["tensors_to_clone"] == ["values", "ids"]
    assert call.kwargs["kwargs"]["K"] == 4
    assert all(n >= 1 for n in call.kwargs["grid"][0])


@pytest.mark.usefixtures("compiles_for_hopper")
def test_any_number_of_tokens() -> None:
    """One graph for every T, without a guard; no grid is empty."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    tokens = mode.from_tensor(torch.empty(8), symbolic_context=sizes, source=ConstantSource("x")).shape[0]
    (call,) = (n for n in traced(4, "cuda", tokens, 128, mode=mode) if n.target is KERNEL)
    size = call.kwargs["grid"][0][0].meta["val"]
    assert isinstance(size, torch.SymInt)
    assert [size.node.expr.subs({tokens.node.expr: n}) for n in (0, 1, 9)] == [1, 1, 3]
    assert not mode.shape_env.guards


@pytest.mark.usefixtures("compiles_for_hopper")
def test_rows_are_dense() -> None:
    """The kernel is told strides, so Inductor must have no choice of them."""
    nodes = traced(2, "cuda", 16, 8, transposed=True)
    (call,) = (n for n in nodes if n.target is KERNEL)
    assert (call.kwargs["kwargs"]["stride_t"], call.kwargs["kwargs"]["stride_e"]) == (16, 1)
    assert any(n.target is torch.ops.aten.clone.default for n in nodes)


@pytest.mark.usefixtures("compiles_for_hopper")
@pytest.mark.parametrize("biased", [False, True])
def test_a_whole_router(biased: bool) -> None:
    from moefuse.ops.meaning.recipe import Recipe

    def router(logits: Tensor, bias: Tensor) -> Any:
        return torch.ops.moefuse.route(logits, bias if biased else None, *Recipe(4, "softmax", 8, 2, 2).arguments, torch.bfloat16)

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = torch.empty(3, 64, device="cuda", dtype=torch.bfloat16), torch.empty(64, device="cuda")
        nodes = aot_export_joint_simple(router, inputs, trace_joint=False).graph.nodes
    (call,) = (n for n in nodes if n.target is KERNEL)
    assert call.kwargs["tensors_to_clone"] == ["weights", "ids"]
    assert call.kwargs["kwargs"]["weights"].meta["val"].dtype == torch.bfloat16
    assert call.kwargs["kwargs"]["BIAS"] == biased


@pytest.mark.parametrize(("experts", "k", "reason"), [(128, 8, None), (2048, 8, "2048 experts"), (128, 40, "40 experts per token")])
def test_the_passes_ask_the_kernels(experts: int, k: int, reason: str | None) -> None:
    """With the arguments of the ops' schemas."""
    from torch.fx import Graph

    from moefuse.ops.meaning.recipe import Recipe
    from moefuse.passes.lower.devices import unsupported

    graph = Graph()
    logits = graph.placeholder("logits")
    with FakeTensorMode():
        logits.meta["example_value"] = torch.empty(4, experts, device="cuda")
    calls = [
        graph.call_function(torch.ops.moefuse.topk.default, (logits, k)),
        graph.call_function(torch.ops.moefuse.route.default, (logits, None, *Recipe(k).arguments, torch.float32)),
        graph.call_function(torch.ops.moefuse.route.default, (logits, logits, *Recipe(k).arguments, torch.float32)),
    ]
    for call in calls:
        answer = unsupported([call], grad=False)
        assert (answer is None) if reason is None else (answer is not None and reason in answer[1])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.float64)])
def test_elsewhere_the_op_stays(device: str, dtype: torch.dtype) -> None:
    targets = [n.target for n in traced(4, device, 8, 128, dtype=dtype)]
    assert torch.ops.moefuse.topk.default in targets
    assert KERNEL not in targets


def traced_logits(tokens: Any, experts: int, hidden: int, *, turned: bool = False, mode: Any = None) -> list[Node]:
    """The graph of a router's product in float32 from bfloat16 factors."""
    import moefuse.ops  # noqa: F401  (registers the op)

    def product(x: Tensor, w: Tensor) -> Any:
        return (torch.ops.moefuse.router_logits(x, w, None, torch.float32).exp(),)

    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        x, w = (torch.empty(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((tokens, hidden), (experts, hidden)))
        w = torch.empty(hidden, experts, device="cuda", dtype=torch.bfloat16).t() if turned else w
        return list(aot_export_joint_simple(product, (x, w), trace_joint=False).graph.nodes)


@pytest.mark.usefixtures("compiles_for_hopper")
@pytest.mark.parametrize("turned", [False, True])
def test_logits_of_few_tokens(turned: bool) -> None:
    """One kernel, which copies neither factor."""
    nodes = traced_logits(3, 64, 1024, turned=turned)
    (call,) = (n for n in nodes if n.target is KERNEL)
    assert call.kwargs["tensors_to_clone"] == ["out"]
    assert call.kwargs["grid"] == [(32, 3, 1)]
    assert not [n for n in nodes if n.target in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)]


@pytest.mark.usefixtures("compiles_for_hopper")
def test_logits_of_many_tokens() -> None:
    """The library's product into float32, for any number of tokens."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    symbol = mode.from_tensor(torch.empty(300), symbolic_context=sizes, source=ConstantSource("x")).shape[0]
    for tokens, where in ((300, None), (symbol, mode)):
        nodes = traced_logits(tokens, 64, 1024, mode=where)
        assert [n.target for n in nodes if "mm" in str(n.target)] == [torch.ops.aten.mm.dtype]
        assert not [n for n in nodes if n.target in (KERNEL, torch.ops.aten._to_copy.default)]
    assert not mode.shape_env.guards  # type: ignore[union-attr]
