"""Spread experts as one record: the op of inference, played by C++ over memory that two ranks share. The other rank is far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse._torch_private import failures
from moefuse.errors import PeerError
from moefuse.ops import rounds
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.schema import TRAVELS
from moefuse.runtime import groups, overflow, providers
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.transports import beside, symm
from tests.triton import interpreted_case, player_case
from tests.triton.player_case import World

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning", "ignore::RuntimeWarning")
T, K, E, H, I = 6, 2, 4, 16, 12  # noqa: E741
world, plans_in_parts = player_case.world, interpreted_case.plans_in_parts
OP = "ep_experts_infer"
KERNELS = ["push_tokens", "take_tokens", "push_back", "take_sums"]
IN_FRONT = ["push_tokens", "barrier", "take_tokens", "push_back", "barrier", "take_sums"]


def drawn_tokens(seed: int, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x, w = torch.randn(tokens, H, generator=source), torch.rand(tokens, K, generator=source)
    return x, torch.rand(tokens, E, generator=source).topk(K).indices, w


@pytest.fixture
def mesh(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Rank 0 of two. Memory of both is full of ones."""
    group = groups.register("record", (0, 1), 0, object(), None)
    made: list[Tensor] = []

    def memory(size: int, device: torch.device) -> Tensor:
        made.extend(torch.ones(size // 4).view(torch.uint8) for _ in range(2))
        return made[-2]

    def far_ahead(*args: Any) -> symm.Buffers:
        known = len(made)
        held = buffers(*args)
        if len(made) > known:
            held.flags.fill_(1 << 20)
        return held

    buffers = symm.buffers
    monkeypatch.setattr(symm, "buffers", far_ahead)
    monkeypatch.setattr(symm, "exchanged", lambda group, size, number: [number] * size)
    monkeypatch.setattr(_torch_private, "symmetric_memory", memory)
    monkeypatch.setattr(_torch_private, "symmetric_peers", lambda *_: [t.data_ptr() for t in made[-2:]])
    monkeypatch.setattr(_torch_private, "symmetric_views", lambda *_: made[-2:])
    monkeypatch.setattr(_torch_private, "timeout_of", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield group
    del groups._groups[group.name]
    symm._buffers.clear()


def several_tokens(mesh: Group, world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of the op whose transfers are beside its kernels, with tokens drawn from a seed."""
    from moefuse.kernels.triton.provide import experts

    monkeypatch.setattr(rounds, "infer", experts.experts)
    monkeypatch.setattr(beside, "LEAST", T)
    world.play(OP)
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=drawn).half() / 4 for shape in ((E // 2, 2 * I, H), (E // 2, H, I))]
    place = torch.arange(E, dtype=torch.int32)
    terms = Terms(mesh.name, transport="symm", most=T).text

    def call(seed: int) -> Tensor:
        x, ids, w = drawn_tokens(seed)
        for held in symm._buffers.values():
            held.flags[3] = 1  # the other rank's rows are there
        packed = ExpertsCall.of(x.half(), ids, w.half(), weights[:1], [], weights[1:], [], [], []).pack()
        out: Tensor = rounds._as_raised(*packed, place, E // 2, terms, "layer", None)
        return out

    return call


@pytest.mark.parametrize(("parts", "copied"), [(True, 0.0), (True, 2.0), (False, 0.0)])
def test_transfers_beside_kernels(
    parts: bool, copied: float, mesh: Group, world: World, plans_in_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record, with turns of two streams and copies, whether rows are sorted as they come or all at once."""
    from moefuse.kernels.triton.host import arriving
    from moefuse.kernels.triton.provide import spread

    takes = arriving.takes
    monkeypatch.setattr(spread, "COPIED", copied)
    monkeypatch.setattr(arriving, "takes", lambda plan: parts and takes(plan))
    call = several_tokens(mesh, world, monkeypatch)
    for _ in range(3):
        call(0)
    assert world.refusals == []
    for seed in (1, 2):
        world.python.clear()
        world.turned.clear()
        world.copied.clear()
        found = call(seed)
        assert world.python == []
        assert len(world.copied) == (0 if copied else 2) + (0 if parts else 3)
        # A fork and an event behind the rows, another fork where ids come first, and the same for the sums.
        assert [what for what, *_ in world.turned].count(1) == 2 + (2 if parts else 0) + (1 if copied else 0)
        assert ("send_sums" in _played(world)) == parts
        for op in (OP, "recorded"):
            world.player.enable(op, False)
        torch.testing.assert_close(found, call(seed), rtol=1e-3, atol=1e-3)
        for op in (OP, "recorded"):
            world.player.enable(op, True)
        assert "push_tokens" in world.python, "it was compared with itself"
        world.launched.clear()


@pytest.fixture
def spread(mesh: Group, world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of the op, with tokens drawn from a seed."""
    from moefuse.kernels.triton.provide import experts

    monkeypatch.setattr(rounds, "infer", experts.experts)
    world.play(OP)
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=drawn) for shape in ((E // 2, 2 * I, H), (E // 2, H, I))]
    place = torch.arange(E, dtype=torch.int32)

    def call(seed: int, tokens: int = T, most: int = T) -> Tensor:
        terms = Terms(mesh.name, transport="symm", most=most).text
        x, ids, w = drawn_tokens(seed, tokens)
        packed = ExpertsCall.of(x, ids, w, weights[:1], [], weights[1:], [], [], []).pack()
        out: Tensor = rounds._as_raised(*packed, place, E // 2, terms, "layer", None)
        return out

    return call


@pytest.mark.parametrize("few", [1024, 0])
def test_one_record(spread: Any, world: World, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third call of a kind has no Python; other tokens, and in both sets of buffers, are those of a call without records."""
    from moefuse.kernels.triton.provide import symm as kernels

    monkeypatch.setattr(kernels, "_FEW", few)
    wanted = KERNELS if few else IN_FRONT
    for _ in range(3):
        spread(0)
    assert world.refusals == []
    world.python.clear()
    for seed in (1, 2, 3):
        found = spread(seed)
        assert [name for name in _played(world) if name in IN_FRONT] == wanted
        assert world.python == []
        for enabled in (False, True):
            torch.testing.assert_close(found, spread(seed), rtol=1e-6, atol=1e-6)
            for op in (OP, "recorded"):
                world.player.enable(op, enabled)
        assert {"push_tokens", "take_sums"} <= set(world.python), "it was compared with itself"
        world.python.clear()
        world.launched.clear()


def _played(world: World) -> list[str]:
    return [world.kernels[function - 1][0].kernel.__name__ for function, *_ in world.launched]


def test_training(mesh: Group, world: World) -> None:
    """The four ops of a step, with the scale of gradients of tokens that are distinct: no Python from the third step on."""
    names = [f"{name}_compiled" for name in TRAVELS]
    dispatch, combine, send, give_back = (getattr(torch.ops.moefuse, name).default for name in names)
    terms, place = Terms(mesh.name, transport="symm", most=T).text, torch.arange(E, dtype=torch.int32)
    world.play(*names)

    def step(seed: int) -> list[Tensor]:
        x, ids, w = drawn_tokens(seed)
        rows, scores, local, *handle = dispatch([x, w], ids, place, E // 2, terms, "layer", None)
        y = rows * scores.sum(1, keepdim=True)
        out = combine(y, handle, T, terms, "layer")
        (back,) = send([out], handle, len(y), 0.5, terms, "layer")
        return [rows, scores, local, *handle, out, back, *give_back([back, scores], handle, T, 2.0, terms, "layer")]

    for _ in range(3):
        step(0)
    assert world.refusals == []
    world.python.clear()
    world.launched.clear()
    for seed in (1, 2):
        found = step(seed)
        assert world.python == []
        assert len(_played(world)) == 10
        for enabled in (False, True):
            for a, b in zip(found, step(seed), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            for op in (*names, "recorded"):
                world.player.enable(op, enabled)
        assert "push_back" in world.python, "it was compared with itself"
        world.python.clear()
        world.launched.clear()


def test_bounds_are_looked_at(mesh: Group, world: World) -> None:
    """Where training keeps fewer rows than may come, whoever dispatches next says that more came: in Python."""
    terms, place = Terms(mesh.name, transport="symm", most=T, bound=1.5).text, torch.arange(E, dtype=torch.int32)
    world.play("ep_dispatch_compiled")
    x, ids, w = drawn_tokens(0)
    for _ in range(4):
        torch.ops.moefuse.ep_dispatch_compiled.default([x, w], ids, place, E // 2, terms, "layer", None)
    mesh.standing.pending.append(overflow.Pending("first", torch.tensor(9), 8, 1.5))
    with pytest.raises(RuntimeError, match="9 rows came to the experts of first"):
        torch.ops.moefuse.ep_dispatch_compiled.default([x, w], ids, place, E // 2, terms, "layer", None)


def test_fewer_tokens_are_a_kind(spread: Any, world: World) -> None:
    """No rank says how many it has: each has records of its own."""
    for tokens in (T, 3, 0):
        for _ in range(3):
            spread(1, tokens)
    world.python.clear()
    for tokens in (T, 3, 0):
        assert spread(1, tokens).shape == (tokens, H)
    assert world.refusals == world.python == []


def test_not_played_out_of_step(spread: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        spread(0)
    groups.group("record").standing.leave("an error")
    world.launched.clear()
    with pytest.raises(PeerError, match="not in step any more since an earlier error"):
        spread(0)
    assert not world.launched
    monkeypatch.setattr(rounds, "_as_raised", torch.ops.moefuse.ep_experts_infer.default)
    with pytest.raises(RuntimeError, match="not in step any more since an earlier error"):
        spread(0)
    left = failures._last.error
    assert isinstance(left, PeerError)
    assert left.__traceback__ is None, "the tensors of a call that has failed are kept"


def test_a_failure_in_the_middle(spread: Any, world: World) -> None:
    """What C++ could not finish has left the order: other ranks may have seen it begin."""
    for _ in range(3):
        spread(0)
    world.memory.room = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        spread(0)
    world.memory.reset()
    world.launched.clear()
    for _ in range(2):
        with pytest.raises(PeerError, match=r"since an earlier error .in a call from its record"):
            spread(0)
    assert not world.launched


def test_buffers_that_grow(spread: Any, world: World) -> None:
    """Records know the memory that ranks share. Which of them a rank has others do not know, so with larger memory all are forgotten."""
    for _ in range(4):
        spread(0)
    spread(0, most=64)
    assert len(world.launched) == len(_played(world)) > 0
    assert world.known == 0
    world.launched.clear()
    for _ in range(3):
        spread(0)
    assert [name for name in _played(world) if name in KERNELS] == KERNELS
    (held,) = symm._buffers.values()
    addresses = {at for _, _, given in world.launched for at in given}
    assert held.bases.data_ptr() in addresses
    assert held.older is not None
    assert held.older.bases.data_ptr() not in addresses


def test_a_mesh_of_the_same_name(spread: Any, world: World) -> None:
    """Its standing is another one, which no record looks at."""
    for _ in range(3):
        spread(0)
    assert world.known
    groups.register("record", (0, 1), 0, object(), None)
    assert not world.known


def test_another_provider() -> None:
    """Somebody's own experts are asked in every call, which no record does."""
    providers.register("experts", providers.Provider("another", lambda call: "not today", lambda call: call.x))
    try:
        assert not providers.is_ours(OP)
        assert providers.is_ours("ep_dispatch_compiled")
    finally:
        providers.unregister("experts", "another")
    assert providers.is_ours(OP)
