"""Blocks of routing replay belong to threads: what one of them asks for is nothing to the others."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import moefuse
from moefuse import _torch_private
from moefuse.replay import blocks
from tests.cpu.replay_case import H, Model, forced, light, some

__all__ = ["light"]
pytestmark = pytest.mark.usefixtures("light")
CARRIES = pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="torch carries no variables of the caller of backward")


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_thread_without_a_block_routes_by_itself(light: list[int]) -> None:
    """... and runs what it ran before, while another one is in a block; what it chooses is not noted there."""
    model = Model().eval()
    run = torch.compile(model, backend="moefuse")
    x, ids = torch.randn(5, H), some(5)

    @torch.no_grad()
    def call() -> Tensor:
        return run(x)  # type: ignore[no-any-return]

    with moefuse.capture_routing(model):
        expected = call()
    assert torch.equal(call(), expected)
    compiled = len(light)
    with moefuse.replay_routing(model, ids), moefuse.capture_routing(model) as routing:
        assert torch.equal(elsewhere(call), expected)
        torch.testing.assert_close(call(), forced(model, ids)(x))
    assert [len(calls) for calls in routing.values()] == [1, 1]
    assert len(light) == compiled


def test_each_thread_has_blocks_of_its_own() -> None:
    """Two at once on one model, with other ids and the same layers."""
    model = Model().eval()
    run = torch.compile(model, backend="moefuse")
    x, both = torch.randn(5, H), threading.Barrier(2, timeout=60)

    @torch.no_grad()
    def call(seed: int) -> tuple[Tensor, Tensor]:
        ids = some(5, seed=seed)
        with moefuse.replay_routing(model, ids), moefuse.capture_routing(model) as routing:
            both.wait()
            out = run(x)
            both.wait()
        assert all(torch.equal(found[0], one) for found, one in zip(routing.values(), ids, strict=True))
        return out, forced(model, ids)(x)

    with ThreadPoolExecutor(2) as pool:
        for found, wanted in pool.map(call, (1, 2)):
            torch.testing.assert_close(found, wanted)


@pytest.mark.every_value
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_in_another_thread(reentrant: bool, inside: bool) -> None:
    """What a checkpoint computes again is of the block that forward was in, wherever backward is called."""
    model = Model(checkpointed=reentrant)
    ids = some(7)
    other = forced(model, ids)
    for layer in model.layers:
        layer.compile(backend="moefuse")
    x = torch.randn(7, H, requires_grad=True)
    with moefuse.replay_routing(model, ids):
        loss = model(x).square().sum()
        if inside:
            elsewhere(loss.backward)
    if not inside:
        elsewhere(loss.backward)
    other(x.detach().clone().requires_grad_()).square().sum().backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=2e-6, msg=name)


def test_two_threads_with_one_tensor() -> None:
    """The same layer and the same input, checkpointed, in a block here and without one there: each takes again what it took."""
    model = Model(layers=1, checkpointed=False)
    ids = some(5, 1)
    others = [forced(copy.deepcopy(model), ids), copy.deepcopy(model)]
    model.layers[0].compile(backend="moefuse")
    x = torch.randn(5, H)
    with moefuse.replay_routing(model, ids):
        mine = model(x)
    theirs = elsewhere(lambda: _with_blocks_like_this(model, x))
    grads = [torch.autograd.grad(mine.square().sum(), model.layers[0].router.weight), theirs]
    for found, other in zip(grads, others, strict=True):
        wanted = torch.autograd.grad(other(x).square().sum(), other.layers[0].router.weight)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def _with_blocks_like_this(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    """A block that gives nothing: the graph is the one of blocks, and what it took is remembered."""
    with moefuse.replay_routing(model, {}):
        out = model(x)
    return torch.autograd.grad(out.square().sum(), model.layers[0].router.weight)


def test_blocks_go_with_context_variables() -> None:
    """Where somebody hands these on, as ``asyncio.to_thread`` does, a thread is in the blocks that it was started in."""
    model = Model().eval()
    run = torch.compile(model, backend="moefuse")
    x, ids = torch.randn(5, H), some(5)
    with torch.no_grad(), moefuse.replay_routing(model, ids):
        carried = contextvars.copy_context()
        found = elsewhere(lambda: carried.run(torch.no_grad()(run), x))
    torch.testing.assert_close(found, forced(model, ids)(x))
    assert carried.run(blocks.here) == []  # and it is over there, too


@pytest.mark.parametrize("carries", [pytest.param(True, marks=CARRIES), False])
def test_in_a_thread_of_autograds(carries: bool) -> None:
    """For devices there are such threads: the blocks of who called backward count, or all where torch does not say who that is."""
    found: list[int] = []
    x = torch.ones(2, requires_grad=True)

    def look(carried: contextvars.Context | None) -> None:
        found.append(len(blocks.here()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "_is_autograds", lambda: True)
            patch.setattr(_torch_private, "variables_of_backward", lambda: carried)
            found.append(len(blocks.here()))

    def hook(_: Tensor) -> None:
        carried = _torch_private.variables_of_backward() if carries else None
        elsewhere(lambda: look(carried))

    x.register_hook(hook)
    with moefuse.replay_routing(Model(), {}):
        x.sum().backward()
    assert found == [0, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_left_of_a_block(whole: bool) -> None:
    """One that ends by an error, too."""
    model = Model()
    model.compile(backend="moefuse")
    with pytest.raises(moefuse.RoutingError), moefuse.replay_routing(model, some(4)[:1] if whole else some(3)):
        model(torch.randn(4, H))
    assert blocks.here() == []
    assert not blocks._every
