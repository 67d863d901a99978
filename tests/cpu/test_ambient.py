"""What surrounds the first call: whatever the program has switched on, moefuse's own work while compiling neither sees nor changes it."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import Options
from moefuse.pipeline import rewrite
from tests.cpu.capture_case import Seen, capturing
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H, I, T = 4, 8, 12, 6  # noqa: E741


class Loop(nn.Module):
    """The loop that only capture gets into one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.ReLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


class Stacked(nn.Module):
    """Every expert on every token, summed under a mask: what is drawn to verify it are tables."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.up, self.down = nn.Parameter(torch.randn(E, H, I) / 3), nn.Parameter(torch.randn(E, I, H) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        table = torch.zeros(len(x), E, dtype=x.dtype, device=x.device).scatter(1, ids, weights)
        return torch.einsum("teh,te->th", torch.bmm(torch.bmm(x.expand(E, *x.shape), self.up).relu(), self.down).transpose(0, 1), table)


LAYERS = [Loop, Stacked]


def pair(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model), torch.randn(T, H)


def same_gradients(got: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(got.named_parameters(), expected.parameters(), strict=True):
        # An expert without tokens has no gradient in eager and a zero one behind a fused op.
        want = torch.zeros_like(p) if q.grad is None else q.grad
        assert p.grad is not None
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"gradient of {name}: {m}")


# --- what the caller does with saved tensors --------------------------------------------------------------------------------------


@pytest.mark.code_elsewhere
@pytest.mark.parametrize("kind", LAYERS)
def test_checkpoint_of_a_compiled_layer(kind: Callable[[], nn.Module]) -> None:
    """Its first forward counts the tensors that are saved, and the second one, which compiles nothing, has to save as many."""
    model, eager, x = pair(kind)
    compiled = torch.compile(model, backend="moefuse")
    for _ in range(2):
        got = checkpoint(compiled, x.requires_grad_(), use_reentrant=False)
        expected = eager(x)
        torch.testing.assert_close(got, expected)
        got.square().sum().backward()
        expected.square().sum().backward()
    same_gradients(model, eager)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1


@pytest.mark.usefixtures("no_code")
def test_gradient_checkpointing_of_transformers() -> None:
    """The layers' experts are compiled, what is checkpointed is the layer around them."""
    eager, model = (tiny.build("qwen3_moe", experts_implementation="eager") for _ in range(2))
    model.load_state_dict(eager.state_dict())
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    eager.train()
    for layer in model.model.layers:
        layer.mlp.compile(backend="moefuse")
    ids = tiny.tokens()
    for each in (model, eager):
        tiny.hidden(each, ids).square().mean().backward()
    same_gradients(model, eager)
    report = moefuse.last_report()
    assert report is not None
    assert report.fused


@pytest.mark.code_once
@pytest.mark.parametrize("kind", LAYERS)
def test_hooks_see_the_calls_tensors_only(kind: Callable[[], nn.Module]) -> None:
    """As many in the first call as in the second, none of them a fake; and a hook that refuses is not asked while compiling."""
    model, _, x = pair(kind)
    compiled = torch.compile(model, backend="moefuse")
    seen: list[list[type]] = []

    def pack(t: Tensor) -> Tensor:
        seen[-1].append(type(t))
        return t

    for _ in range(2):
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            compiled(x)
    assert seen[0] == seen[1]
    assert set(seen[0]) <= {Tensor, nn.Parameter}


def test_hooks_are_back_behind_a_rewrite() -> None:
    """Also behind one that fails. While it runs autocast keeps no casts: one made without gradients would serve the program's own uses."""
    calls: list[int] = []
    cached: list[bool] = []

    def broken(*_args: Any, **_options: Any) -> None:
        cached.append(torch.is_autocast_cache_enabled())
        raise ValueError("a bug")

    for failing in (False, True):
        with (
            pytest.MonkeyPatch.context() as patch,
            torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append(1), t)[1], lambda t: t),
        ):
            if failing:
                patch.setattr("moefuse.passes.driver.fuse", broken)
            before = torch.is_autocast_cache_enabled()
            rewrite.rewrite(torch.fx.symbolic_trace(nn.Linear(2, 2)), None, Options())
            assert torch.is_autocast_cache_enabled() == before
            assert not calls
            torch.ones(1, requires_grad=True).exp()
            assert calls.pop() == 1
    assert cached == [False]


# --- modes, defaults and settings ----------------------------------------------------------------------------------------------


class Counting(TorchFunctionMode):
    """A mode of the program's that looks at every call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def anomalies() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is slow
        with torch.autograd.detect_anomaly():
            yield


AROUND: dict[str, Callable[[], Any]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "function mode": Counting,
    "anomaly": anomalies,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    "deterministic": deterministic,
    "threads": one_thread,
    "warnings": warnings_are_errors,
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "save on cpu": torch.autograd.graph.save_on_cpu,
}


def surroundings() -> dict[str, Any]:
    return {
        "torch seed": torch.get_rng_state().tolist(),
        "python seed": random.getstate(),
        "numpy seed": np.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory),
        "threads": torch.get_num_threads(),
        "warnings": list(warnings.filters),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", LAYERS)
def test_first_call(kind: Callable[[], nn.Module], around: str) -> None:
    """Fused, proved, equal to eager, and nothing is left behind."""
    model, eager, x = pair(kind)
    seen = Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    with AROUND[around]():
        before = surroundings()
        got = compiled(x)
        assert surroundings() == before
        expected = eager(x)
    torch.testing.assert_close(got, expected)
    assert got.requires_grad == expected.requires_grad
    assert [fused.error is not None for fused in seen.report.fused] == [True], seen.report


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_of_inference_mode(kind: Callable[[], nn.Module]) -> None:
    """Such tensors cannot be saved for a backward pass: the proof reads them without gradients."""
    with torch.inference_mode():
        model, eager, x = pair(kind)
        seen = Seen()
        got = torch.compile(model, backend=capturing(seen))(x)
        torch.testing.assert_close(got, eager(x))
    assert [fused.error is not None for fused in seen.report.fused] == [True], seen.report


def test_a_called_backend_leaves_no_trace() -> None:
    """Without Dynamo around it, which holds off much of this by itself: the pass inside Inductor is called like this."""
    model, _, x = pair(Stacked)
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch.compile(model, backend=keep)(x)
    calls: list[int] = []
    before = surroundings()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (calls.append(1), t)[1], lambda t: t):
        report = rewrite.rewrite(graphs[0], None, Options())
    assert surroundings() == before
    assert not calls
    assert len(report.fused) == 1, report
