"""Compiled layers under forward-mode AD, torch.func, fake tensors and create_graph: what eager gives, or what the compiler alone says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.torch_version import TorchVersion

import moefuse
from moefuse import _torch_private
from tests.conftest import without_code
from tests.cpu.test_torch_func import Dense, H, Layer, Loop, T

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """AOTAutograd in Inductor's place, which takes a second less, and loses tangents as that does; each graph that it compiled."""
    compiled: list[str] = []

    def aot(gm: torch.fx.GraphModule, inputs: Any, *rest: Any) -> Any:
        compiled.append("graph")
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    monkeypatch.setattr(_torch_private, "compile_fx", aot)
    return compiled


DUALS_LEFT = TorchVersion(torch.__version__) >= (2, 14)
"""Dynamo of this torch leaves a function whose arguments have tangents to eager ("Attempted to wrap a dual tensor input")."""


def dual(f: Callable[[Tensor], Tensor], x: Tensor, *, grad: bool) -> tuple[Tensor, Tensor | None]:
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))
        return primal.detach(), None if tangent is None else tangent.detach()


def fused() -> int:
    report = moefuse.last_report()
    return 0 if report is None else len(report.fused)


@pytest.mark.every_value(2)
@pytest.mark.parametrize("first", ["dual", "plain"])
@pytest.mark.parametrize(("grad", "frozen"), [(True, False), (True, True), (False, False)], ids=("grad", "frozen", "no_grad"))
@pytest.mark.parametrize("kind", [Loop, Dense])
def test_forward_mode_around_a_compiled_layer(kind: type[Layer], grad: bool, frozen: bool, first: str, behind: list[str]) -> None:
    """Whatever was compiled before: code of calls without tangents is not run with some, nor the other way round."""
    torch.manual_seed(0)
    layer, x = kind().requires_grad_(not frozen), torch.randn(T, H)
    compiled, expected = torch.compile(layer, backend="moefuse"), dual(copy.deepcopy(layer), x, grad=grad)
    for turn in ("dual", "plain", "dual") if first == "dual" else ("plain", "dual", "plain"):
        if turn == "dual":
            found = dual(compiled, x, grad=grad)
            assert found[1] is not None
            torch.testing.assert_close(found, expected)
        else:
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(compiled(x), layer(x))
        if not DUALS_LEFT:
            assert fused() == 1
    assert DUALS_LEFT or behind == ["graph"], "each kind of call has one graph, and a call without tangents has the compiler's"


def test_tangents_of_weights(behind: list[str]) -> None:
    """Of Parameters in whose places others stand, as functional_call puts them."""
    torch.manual_seed(0)
    layer, x = Loop(), torch.randn(T, H)
    compiled = torch.compile(layer, backend="moefuse")
    compiled(x)
    found = []
    for run, before in ((compiled, "_orig_mod."), (layer, "")):
        with torch.no_grad(), forward_ad.dual_level():
            duals = {before + n: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for n, p in layer.named_parameters()}
            found.append(forward_ad.unpack_dual(torch.func.functional_call(run, duals, (x,))).tangent)  # type: ignore[arg-type]
    assert found[0] is not None
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("grad", [True, False])
def test_jvp_of_a_compiled_layer(grad: bool, behind: list[str]) -> None:
    """Dynamo leaves a call inside of torch.func to eager."""
    torch.manual_seed(0)
    layer, x = Loop(), torch.randn(T, H)
    compiled = torch.compile(layer, backend="moefuse")
    with torch.set_grad_enabled(grad):
        compiled(x)
        found, expected = (torch.func.jvp(f, (x,), (torch.ones_like(x),)) for f in (compiled, layer))
    torch.testing.assert_close(found, expected)


def test_behind_inductor() -> None:
    """The whole way, in the order that lost tangents: the layer was compiled, and is called with one where no gradient is recorded."""
    torch.manual_seed(0)
    layer, x = Loop(), torch.randn(T, H)
    compiled = torch.compile(layer, backend="moefuse")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    assert fused() == 1
    found, expected = dual(compiled, x, grad=False), dual(layer, x, grad=False)
    assert found[1] is not None
    torch.testing.assert_close(found, expected)


@pytest.mark.every_value(2)
@pytest.mark.parametrize("compiled_before", [False, True])
@pytest.mark.parametrize("parameters", ["fake", "real"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_call_with_fake_tensors(grad: bool, parameters: str, compiled_before: bool, behind: list[str]) -> None:
    """What Inductor leaves to eager runs under fakes; code that moefuse has compiled for real tensors does not."""
    real = Loop()
    if compiled_before:
        torch.compile(real, backend="moefuse")(torch.randn(T, H))
        assert fused() == 1
    with torch.set_grad_enabled(grad), FakeTensorMode(allow_non_fake_inputs=parameters == "real", shape_env=ShapeEnv()):
        layer = Loop() if parameters == "fake" else real
        out = torch.compile(layer, backend="moefuse")(torch.randn(T, H))
    assert isinstance(out, FakeTensor)
    assert out.shape == (T, H)


def test_create_graph(behind: list[str]) -> None:
    """The first derivative is right; the second one is AOTAutograd's to refuse, and it does."""
    torch.manual_seed(0)
    layer, x = Loop(), torch.randn(T, H)
    compiled = torch.compile(layer, backend="moefuse")
    found, expected = (torch.autograd.grad(f(x).square().sum(), list(layer.parameters()), create_graph=True) for f in (compiled, layer))
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="double backward"):
        sum(g.square().sum() for g in found).backward()  # type: ignore[union-attr]


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("backend", ["inductor", "moefuse"])
def test_a_graph_that_is_kept_after_one_that_was_not(backend: str, donated: bool) -> None:
    """The first backward lets its code reuse what forward saved, so a later one may not keep the graph: torch's rule, with fused experts as
    without, and the way around it that limits.md names. (The test above starts with the one that keeps it.)"""
    import torch._functorch.config
    import torch._inductor.config

    torch.manual_seed(0)
    layer, x = Dense(), torch.randn(T, H)
    parameters = list(layer.parameters())
    # Code in a cache is of whichever backward was first when it was compiled.
    with torch._functorch.config.patch(donated_buffer=donated), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(layer, backend=without_code if backend == "inductor" else backend)
        torch.autograd.grad(compiled(x).square().sum(), parameters)
        assert backend == "inductor" or fused() == 1
        losses = [f(x).square().sum() for f in (compiled, layer)]
        for how in ({"create_graph": True}, {"retain_graph": True}, {}):
            if donated and how:
                with pytest.raises(RuntimeError, match="non-empty donated buffers"):
                    torch.autograd.grad(losses[0], parameters, **how)
                continue
            found, expected = (torch.autograd.grad(loss, parameters, **how) for loss in losses)
            torch.testing.assert_close(found, expected)
