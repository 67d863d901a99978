"""Routing that is captured and replayed on the device: in autograd's threads, in CUDA graphs, and through Inductor."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.integrations.moe")

import moefuse
from moefuse.replay import blocks
from tests.cpu.replay_case import H, Model, forced, some, two_steps
from tests.zoo import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]

TOKENS = 9


def on_gpu(**how: Any) -> Model:
    torch.manual_seed(0)
    return Model(**how).cuda()


def x(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(seed)).cuda()


def close(mine: Model, theirs: Model, out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for (name, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5 * float(b.grad.abs().max() + 1), msg=name)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("score", ["softmax", "chosen by other scores", "argmax"])
def test_a_step(score: str, where: str) -> None:
    """Outputs and all gradients of a model that takes the given experts; ids may be on the host."""
    model = on_gpu(score=score)
    ids = [one.to(where) for one in some(TOKENS, k=1 if score == "argmax" else 2)]
    other = forced(model, [one.cuda() for one in ids])
    run = torch.compile(model, backend="moefuse", options={"expect": 2})
    with moefuse.replay_routing(model, ids), moefuse.capture_routing(model) as routing:
        out = run(x())
    out.square().sum().backward()
    wanted = other(x())
    wanted.square().sum().backward()
    close(model, other, out, wanted)
    assert all(taken.is_cuda and torch.equal(taken.cpu(), given.cpu()) for (taken,), given in zip(routing.values(), ids, strict=True))


def test_own_ids_give_the_same_bits() -> None:
    """What was captured is the same when it is replayed. Outside of blocks Inductor fuses other things: the last bit differs."""
    model = on_gpu().eval()
    run = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        outside = run(x())
        with moefuse.capture_routing(model) as routing:
            captured = run(x())
        with moefuse.replay_routing(model, routing):
            assert torch.equal(run(x()), captured)
    torch.testing.assert_close(captured, outside, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints(whole: bool, reentrant: bool, inside: bool) -> None:
    """Backward runs in a thread that autograd has for the device, and takes what forward took."""
    model = on_gpu(checkpointed=reentrant)
    ids = some(TOKENS)
    other = forced(model, [one.cuda() for one in ids])
    for compiled in [model] if whole else list(model.layers):
        compiled.compile(backend="moefuse")
    threads: set[int] = set()

    def inputs() -> Tensor:
        made = x().requires_grad_()
        made.register_hook(lambda _: threads.add(threading.get_ident()))
        return made

    out = two_steps(model, ids, inputs, inside=inside)
    wanted = other(x().requires_grad_())
    wanted.square().sum().backward()
    close(model, other, out, wanted)
    assert threading.get_ident() not in threads  # else this would be a test of the CPU's way


@pytest.mark.parametrize("open_elsewhere", [False, True])
def test_blocks_in_a_thread_of_autograds(open_elsewhere: bool) -> None:
    """Those of the thread that called backward count there, and no others."""
    found: list[list[Any]] = []
    values = torch.ones(2, device="cuda", requires_grad=True)
    values.register_hook(lambda _: found.append(blocks.here()))
    model = on_gpu()

    def backward() -> None:
        values.square().sum().backward()

    with moefuse.replay_routing(model, {}):
        if open_elsewhere:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        else:
            backward()
    carried = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
    assert [len(one) for one in found] == [0 if open_elsewhere and carried else 1]


def test_inputs_that_a_checkpoint_keeps_elsewhere() -> None:
    """On the host: they come back in other memory, and what is computed again is known by its block."""
    model = on_gpu(layers=2, checkpointed=False)
    ids = some(TOKENS)
    other = forced(model, [one.cuda() for one in ids])
    for layer in model.layers:
        layer.compile(backend="moefuse")
    with moefuse.replay_routing(model, ids):
        with torch.autograd.graph.save_on_cpu():
            out = model(x().requires_grad_())
        out.square().sum().backward()
    wanted = other(x().requires_grad_())
    wanted.square().sum().backward()
    close(model, other, out, wanted)


def test_threads() -> None:
    """Another thread routes by itself, with kernels of its own stream."""
    model = on_gpu().eval()
    run = torch.compile(model, backend="moefuse")
    found: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.append(run(x()))
        torch.cuda.synchronize()

    call()
    with moefuse.replay_routing(model, some(TOKENS)):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        call()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)  # inside of blocks Inductor may fuse other things
    assert not torch.allclose(found[2], found[0], rtol=1e-2, atol=1e-2)


def test_cuda_graphs() -> None:
    """``reduce-overhead``: ids are inputs of the graph, so other ids need no other one; outside of blocks all is as before."""
    model = on_gpu().eval()
    run = torch.compile(model, backend="moefuse", mode="reduce-overhead")
    with torch.no_grad():
        expected = [run(x()).clone() for _ in range(4)][-1]
        for seed in range(1, 6):  # warm-up, recording, and calls of what was recorded
            ids = some(TOKENS, seed=seed)
            with moefuse.replay_routing(model, ids), moefuse.capture_routing(model) as routing:
                out = run(x(seed)).clone()
            torch.testing.assert_close(out, forced(model, [one.cuda() for one in ids])(x(seed)), rtol=1e-4, atol=1e-5)
            assert all(torch.equal(taken.cpu(), given) for (taken,), given in zip(routing.values(), ids, strict=True))
        assert torch.equal(run(x()).clone(), expected)


def test_training_in_cuda_graphs() -> None:
    """Forward and backward are graphs each; gradients are those of the given experts in every step."""
    model = on_gpu()
    run = torch.compile(model, backend="moefuse", mode="reduce-overhead")
    for seed in range(1, 5):
        model.zero_grad(set_to_none=True)
        ids = some(TOKENS, seed=seed)
        other = forced(model, [one.cuda() for one in ids])
        torch.compiler.cudagraph_mark_step_begin()
        with moefuse.replay_routing(model, ids):
            out = run(x(seed))
        out.square().sum().backward()
        wanted = other(x(seed))
        wanted.square().sum().backward()
        close(model, other, out.clone(), wanted)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_transformers(mode: str | None) -> None:
    """Own ids give the same bits, others are taken."""
    model = tiny.build("qwen3_moe").cuda()
    ids = tiny.tokens().cuda()
    run = torch.compile(model, backend="moefuse", mode=mode)
    with torch.no_grad():
        for _ in range(3):
            with moefuse.capture_routing(model) as routing:
                first = tiny.hidden(run, ids).clone()
        with moefuse.replay_routing(model, routing):
            assert torch.equal(tiny.hidden(run, ids).clone(), first)
        others = {layer: [(one + 1) % tiny.EXPERTS for one in calls] for layer, calls in routing.items()}
        with moefuse.replay_routing(model, others), moefuse.capture_routing(model) as taken:
            assert not torch.equal(tiny.hidden(run, ids).clone(), first)
    assert list(routing) == [f"model.layers.{at}.mlp.experts" for at in range(2)]
    assert all(torch.equal(taken[layer][0], one[0]) for layer, one in others.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_with_checkpoints(reentrant: bool) -> None:
    """As transformers enables them: the same gradients as without, of the experts that were given."""
    ids = {f"model.layers.{at}.mlp.experts": [one] for at, one in enumerate(some(16))}
    found = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model = tiny.build("qwen3_moe").train().cuda()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.compile(backend="moefuse")
        with moefuse.replay_routing(model, ids):
            loss = tiny.hidden(model, tiny.tokens().cuda()).square().mean()
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-3, atol=1e-5, msg=name)
