"""Routing replay in models of transformers, and through Inductor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.integrations.moe")

import moefuse
from tests.cpu.replay_case import Model, forced, light, some
from tests.zoo import tiny

__all__ = ["light"]

LAYERS = [f"model.layers.{at}.mlp.experts" for at in range(2)]


def other(routing: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    return {layer: [(ids + 1) % tiny.EXPERTS for ids in calls] for layer, calls in routing.items()}


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.thorough)])
def test_chosen_in_every_way(name: str) -> None:
    """Softmax before and behind the choice, groups with a bias: own ids give the same bits, others are taken."""
    model = tiny.build(name)
    run = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        with moefuse.capture_routing(model) as routing:
            first = tiny.hidden(run, tiny.tokens())
        with moefuse.replay_routing(model, routing):
            assert torch.equal(tiny.hidden(run, tiny.tokens()), first)
        with moefuse.replay_routing(model, other(routing)), moefuse.capture_routing(model) as taken:
            assert not torch.equal(tiny.hidden(run, tiny.tokens()), first)
    assert list(routing) == LAYERS
    assert all(torch.equal(taken[layer][0], ids[0]) for layer, ids in other(routing).items())


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """As transformers enables it: the same gradients as without, of the experts that were given."""
    ids = {LAYERS[0]: some(16, 1)}
    found = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model = tiny.build("qwen3_moe", num_hidden_layers=1).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.compile(backend="moefuse")
        with moefuse.replay_routing(model, ids):
            loss = tiny.hidden(model, tiny.tokens()).square().mean()
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.usefixtures("light")
def test_a_rollout() -> None:
    """``generate`` runs the model once for the prompt and once for each token; what it chose gives the same tokens."""
    model = tiny.build("qwen3_moe", num_hidden_layers=1)
    model.compile(backend="moefuse")
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    prompt = tiny.tokens(1, 5)
    with moefuse.capture_routing(model) as routing:
        text = model.generate(prompt, **how)
    assert [len(ids) for ids in routing[LAYERS[0]]] == [5, 1, 1]
    with moefuse.replay_routing(model, routing):
        assert torch.equal(model.generate(prompt, **how), text)


def test_through_inductor(fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    model = Model(layers=1)
    ids = some(7, 1)
    other = forced(model, ids)
    model.compile(backend="moefuse", options={"expect": 1})
    x = torch.randn(7, 8)
    with moefuse.replay_routing(model, ids), moefuse.capture_routing(model) as routing:
        out = model(x)
    out.square().sum().backward()
    wanted = other(x)
    wanted.square().sum().backward()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.layers[0].router.weight.grad, other.layers[0].router.weight.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(routing["layers.0"][0], ids[0])
