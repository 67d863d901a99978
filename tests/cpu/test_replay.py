"""Routing that is captured and replayed: the experts of the fused op are those that were given, and everything else follows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse.errors import RoutingError
from moefuse.passes.match import whole_stacks
from moefuse.replay.words import count, ordinal
from tests.cpu.replay_case import E, H, K, Layer, Model, forced, light, some, two_steps

__all__ = ["light"]
pytestmark = pytest.mark.usefixtures("light")


def close(mine: Model, theirs: Model, of: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(of, wanted, rtol=2e-6, atol=2e-6)
    for (name, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        if b.grad is not None:
            assert a.grad is not None, name
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.every_value
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("score", ["softmax", "of the chosen", "chosen by other scores", "argmax"])
def test_replay(score: str, listed: bool) -> None:
    """Outputs and all gradients, the router's too, of a model that takes the given experts."""
    model = Model(score=score, listed=listed)
    ids = some(7, k=1 if score == "argmax" else K)
    other = forced(model, ids)
    run = torch.compile(model, backend="moefuse", options={"expect": 2})
    x = torch.randn(7, H)
    with moefuse.replay_routing(model, dict(zip(["layers.0", "layers.1"], ids, strict=True))):
        out = run(x)
    out.square().sum().backward()
    wanted = other(x)
    wanted.square().sum().backward()
    close(model, other, out, wanted)


def test_capture_is_what_the_router_chose() -> None:
    """... and outputs are the same bits in the block, before it and behind it."""
    model = Model().eval()
    run = torch.compile(model, backend="moefuse")
    x = torch.randn(9, H)
    with torch.no_grad():
        before = run(x)
        with moefuse.capture_routing(model) as routing:
            assert torch.equal(run(x), before)
        assert torch.equal(run(x), before)
        first = model.layers[0].choose(x)[1]
    assert list(routing) == ["layers.0", "layers.1"]
    assert torch.equal(routing["layers.0"][0], first)
    with torch.no_grad(), moefuse.replay_routing(model, routing):
        assert torch.equal(run(x), before)


def test_slots_that_are_left_to_the_router() -> None:
    """-1 in the tokens of the prompt, for which a rollout has no ids."""
    model = Model()
    x = torch.randn(6, H)
    ids = some(6)
    with torch.no_grad():
        own = model.layers[0].choose(x)[1]
    mixed = [torch.where(torch.arange(6)[:, None] < 3, -1, one) for one in ids]
    wanted = torch.where(torch.arange(6)[:, None] < 3, own, ids[0])
    run = torch.compile(model, backend="moefuse")
    with moefuse.replay_routing(model, {"layers.0": mixed[0].int()}), moefuse.capture_routing(model) as routing:
        run(x)
    assert torch.equal(routing["layers.0"][0], wanted)


def test_other_numbers_of_tokens_and_steps() -> None:
    """Dynamic shapes; a layer that runs several times takes its ids in order."""
    model = Model(layers=1).eval()
    run = torch.compile(model, backend="moefuse", dynamic=True)
    ids = [some(t, 1, seed=t)[0] for t in (5, 1, 8)]
    xs = [torch.randn(len(one), H) for one in ids]
    with torch.no_grad(), moefuse.replay_routing(model, {"layers.0": ids}):
        outs = [run(x) for x in xs]
    for x, one, out in zip(xs, ids, outs, strict=True):
        torch.testing.assert_close(out, forced(model, [one])(x))


def test_layers_in_order() -> None:
    """[T, layers, K], as rollout engines write it, for layers of one code that are compiled one by one."""
    model = Model(layers=3)
    ids = torch.stack(some(4, 3), dim=1)
    for layer in model.layers:
        layer.compile(backend="moefuse")
    x = torch.randn(4, H)
    with moefuse.replay_routing(model, ids.unbind(1)), moefuse.capture_routing(model) as routing:
        out = model(x)
    torch.testing.assert_close(out, forced(model, list(ids.unbind(1)))(x))
    assert list(routing) == ["layers.0", "layers.1", "layers.2"]
    assert all(torch.equal(routing[f"layers.{at}"][0], ids[:, at]) for at in range(3))


@pytest.mark.every_value(2)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints(reentrant: bool, whole: bool, inside: bool) -> None:
    """A layer that is computed again takes the same experts, in the graph or around compiled layers, behind the block as well."""
    model = Model(checkpointed=reentrant)
    ids = some(7)
    other = forced(model, ids)
    if whole:
        model.compile(backend="moefuse")
    else:
        for layer in model.layers:
            layer.compile(backend="moefuse")
    x = torch.randn(7, H)
    out = two_steps(model, ids, lambda: x.clone().requires_grad_(), inside=inside)
    wanted = other(x.clone().requires_grad_())
    wanted.square().sum().backward()
    close(model, other, out, wanted)


def test_a_checkpoint_of_a_call_without_replay() -> None:
    """The same tensor, first with given experts and then without: what is computed again is the call that it belongs to."""
    model = Model(layers=1, checkpointed=False)
    plain = copy.deepcopy(model)
    model.layers[0].compile(backend="moefuse")
    x = torch.randn(5, H, requires_grad=True)
    with moefuse.replay_routing(model, some(5, 1)):
        model(x).sum().backward()
        model.zero_grad()
        out = None
    out = model(x)
    out.square().sum().backward()
    wanted = plain(x)
    wanted.square().sum().backward()
    close(model, plain, out, wanted)


def test_calls_that_cannot_be_told_apart() -> None:
    """Two calls of one layer with one tensor and other experts, both before backward: nobody knows which is computed again first."""
    model = Model(layers=1, checkpointed=False)
    model.layers[0].compile(backend="moefuse")
    x = torch.randn(5, H, requires_grad=True)
    with moefuse.replay_routing(model, {"layers.0": [some(5, 1)[0], some(5, 1, seed=2)[0]]}):
        loss = model(x).sum() + model(x).sum()
    with pytest.raises(RoutingError, match=r"layers\.0.* is computed again in backward, and which call of it that is cannot be told"):
        loss.backward()


def test_what_is_compiled(light: list[int]) -> None:
    """Blocks have graphs of their own, which are kept; frames from before the first block, without a guard, are compiled again once."""
    model = Model().eval()
    run = torch.compile(model, backend="moefuse")
    x = torch.randn(3, H)
    with torch.no_grad():
        run(x)
        (inputs,) = light
        for _ in range(3):
            with moefuse.capture_routing(model):
                run(x)
            run(x)
    assert light == [inputs, inputs + 2, inputs]


def test_ids_are_copied_when_the_block_begins() -> None:
    """What is written to them in the block counts for nothing: it was never checked."""
    model, x = Model(), torch.randn(4, H)
    model.compile(backend="moefuse")
    ids = some(4)
    with moefuse.replay_routing(model, ids):
        expected = model(x)
    with moefuse.replay_routing(model, ids):
        for given in ids:
            given.fill_(E + 94)
        found = model(x)
    assert torch.equal(found, expected)


def refusals() -> Iterator[Any]:
    ids = some(4)
    yield pytest.param([torch.zeros(4, K)], "takes ids .T, K. of integers", id="no integers")
    yield pytest.param([None, ids[1]], "takes ids .T, K. of integers", id="nothing")
    yield pytest.param([ids[0], ids[1] - 9], "an id is below -1", id="below")
    yield pytest.param([ids[0], torch.tensor([[1, 2], [0, -1], [-1, -1], [3, 3]])], "a token has an expert twice", id="twice")
    yield pytest.param(
        [ids[0][:3], ids[1]], r"layers\.0 has 4 tokens and takes 2 experts for each: its ids are not \[3, 2\]", id="too few tokens"
    )
    yield pytest.param([torch.tensor([[E, 0]] * 4), ids[1]], r"layers\.0 has 5 experts, and is to take number 5", id="no such expert")
    yield pytest.param([ids[0]], r"layers\.1 is the 2nd layer that runs, and replay_routing has ids of 1 layer$", id="too few layers")
    yield pytest.param([*ids, ids[0]], "replay_routing has ids of 3 layers, and 2 have run", id="too many layers")
    yield pytest.param({"layers.0": [ids[0], ids[0]]}, r"has ids for 2 calls of layers\.0, of which 1 was made", id="too few calls")
    yield pytest.param({"layers.7": ids[0]}, r"has ids for 1 call of layers\.7, of which 0 were made", id="no such layer")


def test_choices_that_cannot_be_opened() -> None:
    """Weights that are not those of the ids would be those of other experts."""
    model = Model(layers=1, score="weights beside ids")
    model.compile(backend="moefuse", options={"expect": 1})
    text = r"of which 0 were made: its routing weights are computed beside its choice of experts, and would be those of others"
    with pytest.raises(RoutingError, match=text), moefuse.replay_routing(model, {"layers.0": some(4)[0]}):
        model(torch.randn(4, H))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ids", "text"), list(refusals()))
def test_what_does_not_fit(ids: Any, text: str) -> None:
    model = Model()
    model.compile(backend="moefuse")
    with pytest.raises(RoutingError, match=text), moefuse.replay_routing(model, ids):
        model(torch.randn(4, H))


def test_layers_that_are_not_fused() -> None:
    """In eager, or refused: nothing is replayed, and that is said with the reason."""
    model = Model()
    with pytest.raises(RoutingError, match="no layer has run that moefuse fused"), moefuse.capture_routing(model):
        model(torch.randn(4, H))
    model.compile(backend="moefuse", options={"exclude": r"layers\.1"})
    with (
        pytest.raises(RoutingError, match=r"1 call of layers\.1, of which 0 were made: layers\.1 was left, excluded"),
        moefuse.replay_routing(model, {"layers.1": some(4)[1]}),
    ):
        model(torch.randn(4, H))


def test_a_layer_that_is_the_model_itself() -> None:
    """It has no name: sentences call it the model."""
    layer, x = Model(layers=1).layers[0], torch.randn(4, H)
    (ids,) = some(4, 1)
    layer.compile(backend="moefuse")
    for given, text in (
        ({"": [ids, ids]}, "has ids for 2 calls of the model, of which 1 was made"),
        ([ids[:3]], r"the model has 4 tokens and takes 2 experts for each: its ids are not \[3, 2\]"),
    ):
        with pytest.raises(RoutingError, match=text), moefuse.replay_routing(layer, given):
            layer(x)
    text = "the model runs for the 2nd time, and replay_routing has ids for 1 call of it"
    with pytest.raises(RoutingError, match=text), moefuse.replay_routing(layer, [ids]):
        layer(x), layer(x)


def test_numbers_in_sentences() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th".split()
    assert [count(n, "call") for n in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]


def test_experts_in_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose as others do, also beside others in one graph."""
    monkeypatch.setattr(whole_stacks, "READ", {"cpu": float("inf")})

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()
            for name in ("up", "down"):
                weight = getattr(self.layer, name).detach()
                scale = weight.abs().amax((1, 2)) / 127
                self.register_buffer(f"{name}_codes", (weight / scale[:, None, None]).round().to(torch.int8))
                self.register_buffer(f"{name}_scale", scale)

        def weight(self, name: str, e: int) -> Tensor:
            codes, scale = (getattr(self, f"{name}_{part}")[e] for part in ("codes", "scale"))
            return codes.float() * scale

        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.layer.choose(x)
            out = torch.zeros_like(x)
            for e in range(E):
                y = F.linear(F.silu(F.linear(x, self.weight("up", e))), self.weight("down", e))
                out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
            return out

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.packed = Layer(), Packed()

        def forward(self, x: Tensor) -> Tensor:
            return self.packed(x + self.plain(x))

    torch.manual_seed(0)
    model, x = Two(), torch.randn(7, H)
    compiled = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        compiled(x)
        with moefuse.capture_routing(model) as routing:
            compiled(x)
        held = {f.module: f.spec.encoding for f in moefuse.last_report().fused}
        assert held == {"plain": "", "packed": "s8, one scale"}
        assert set(routing) == set(held)
        ids = torch.tensor([[0, 3]] * 7)
        with moefuse.replay_routing(model, {name: [ids] for name in routing}):
            found = compiled(x)
        model.plain.forced = model.packed.layer.forced = ids
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
