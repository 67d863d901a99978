"""Ops whose calls of a known kind are neither checked nor worked out again: right numbers, the same errors, gradients as ever."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers torch.ops.moefuse)
from moefuse.ops.meaning.encoding import Encoding
from moefuse.runtime import providers
from tests.cpu.coded_case import coded, hold
from tests.cpu.ops_case import Case
from tests.triton import player_case, test_interpreted_record
from tests.triton.player_case import World, unplayed
from tests.triton.test_interpreted_coded import ENCODINGS

pytestmark = test_interpreted_record.pytestmark
world = player_case.world
SMALL = Case(tokens=3, hidden=32, inter=32, hidden_out=32, experts=3, top_k=2, dtype=torch.float32, bias=False)
BLOCKS = ENCODINGS["fp8 blocks"]


@pytest.fixture
def known(world: World) -> Iterator[World]:
    """The Triton providers as on CUDA, for CPU tensors."""
    from moefuse.kernels.triton.provide import extended, grouped_coded

    modules = {"experts_extended": extended, "grouped_linear_coded": grouped_coded}
    before = {name: list(providers.PROVIDERS[name]) for name in modules}
    for name, module in modules.items():
        providers.register(name, providers.Provider("triton", module.supports, getattr(module, name), "cpu"))
    world.play("experts_extended_infer")
    yield world
    for name, order in before.items():
        providers._replace(name, order)


def drawn(seed: int, encoding: Encoding = BLOCKS, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    args, _, options = coded(SMALL.with_(seed=seed, **changes), encoding, None, encoding)
    return args, options


def op(args: list[Any], options: dict[str, Any]) -> Tensor:
    found: Tensor = torch.ops.moefuse.experts_extended(*args, **options)
    return found


def in_order(tensors: list[Tensor], order: list[int]) -> list[Tensor]:
    """The same numbers in one piece of memory, in another order there."""
    memory = torch.empty(len(tensors), 4096, dtype=torch.uint8)
    places = [memory[i][: t.numel() * t.element_size()].view(t.dtype).view(t.shape) for i, t in zip(order, tensors, strict=True)]
    return [place.copy_(t) for place, t in zip(places, tensors, strict=True)]


@functools.cache
def weights_of(storage: str) -> tuple[list[Any], dict[str, Any]]:
    """A call whose weights stay where they are."""
    args, options = drawn(0, separate=storage != "stacked")
    if storage == "separate":
        args[3], args[5] = in_order(args[3], [2, 0, 1]), in_order(args[5], [1, 2, 0])
    if storage == "unequal strides":
        args[3][1] = args[3][1].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    return args, options


@pytest.mark.parametrize("storage", ["stacked", "separate", "unequal strides"])
def test_a_known_kind(storage: str, known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers at other addresses, of experts that lie in memory in any order; neither checked nor planned again. (Unequal strides:
    bytes are stacked by torch, so the record has to show float8 as bytes there.)"""
    from moefuse.ops import extended as ops

    held, options = weights_of(storage)
    for seed in range(4):
        args = [*drawn(seed)[0][:3], *held[3:]]
        wanted = unplayed(monkeypatch, lambda args=args: op(args, options))
        known.python.clear()
        with monkeypatch.context() as patch:
            if seed:
                patch.setattr(ops, "_infer", None)  # a call from a record does not come there
            assert torch.equal(op(args, options), wanted)
        assert bool(known.python) is (not seed)  # C++ met the kind where it was asked what is wanted
    assert not known.refusals


def test_what_is_made_at_once() -> None:
    """Arrays of one allocation begin at whole blocks and do not overlap; large ones, and one that is alone, have their own."""
    from moefuse.kernels.triton.launch.together import ALIGNED, MOST, SMALL, extent, together

    small, empty, large = ((3, 5), (8, 1), torch.int64), ((0, 5), (5, 1), torch.float32), ((SMALL + 1,), (1,), torch.uint8)
    assert (extent(*small), extent(*empty)) == (8 * 21, 0)
    assert together([(4, small), (5, large), (7, empty), (9, ((SMALL,), (1,), torch.uint8))]) == (
        [(4, 0), (7, ALIGNED), (9, ALIGNED)],
        ALIGNED + SMALL,
    )
    assert together([(4, small), (5, large)]) == ([], 0)
    places, size = together((i, ((SMALL,), (1,), torch.uint8)) for i in range(99))
    assert len(places) * SMALL == size == MOST


def scale_of_another_shape(args: list[Any], options: dict[str, Any]) -> None:
    args[15][1] = args[15][1][:, :-1]


def an_expert_of_another_shape(args: list[Any], options: dict[str, Any]) -> None:
    args[3][2] = args[3][2][:-1]


def an_expert_of_another_dtype(args: list[Any], options: dict[str, Any]) -> None:
    args[3][2] = args[3][2].view(torch.int8)


def scales_missing(args: list[Any], options: dict[str, Any]) -> None:
    args[15].pop()


def one_encoding_less(args: list[Any], options: dict[str, Any]) -> None:
    options["encodings"] = options["encodings"][:2]


def an_unknown_activation(args: list[Any], options: dict[str, Any]) -> None:
    options["activation"] = "none of these"


@pytest.mark.parametrize(
    "spoil",
    [
        scale_of_another_shape, an_expert_of_another_shape, an_expert_of_another_dtype, scales_missing, one_encoding_less,
        an_unknown_activation,
    ],
)  # fmt: skip
def test_a_wrong_kind_after_a_right_one(spoil: Callable[..., None], known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what it did, each time."""
    for _ in range(2):
        op(*drawn(0, separate=True))
    args, options = drawn(1, separate=True)
    spoil(args, options)
    with pytest.raises((ValueError, TypeError)) as without:
        unplayed(monkeypatch, lambda: op(args, options))
    for _ in range(2):
        with pytest.raises(type(without.value)) as error:
            op(args, options)
        first, wanted = (str(e.value).split("\n")[0] for e in (error, without))
        assert first == wanted  # behind it libtorch says where it was raised


def test_encodings_are_part_of_the_kind(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, as two kinds of numbers."""
    args, options = drawn(0)
    args[3], args[5] = ([w[0].view(torch.uint8)] for w in (args[3], args[5]))
    found = []
    for element in ("e4m3", "s8", "e4m3", "s8"):
        options["encodings"] = [str(Encoding(element, BLOCKS.block)), "", str(Encoding(element, BLOCKS.block))]
        found.append(op(args, options))
        assert torch.equal(found[-1], unplayed(monkeypatch, lambda: op(args, options)))
    assert not torch.equal(found[0], found[1])


def test_gradients_after_a_call_without(known: World) -> None:
    """Autograd stands above records; without gradients, with ``inference_mode`` and below tracing it is one kind."""
    args, options = drawn(0)
    with torch.inference_mode():
        plain = op(args, options)
    with torch.no_grad():
        assert torch.equal(op(args, options), plain)
    args[0].requires_grad_()
    out = op(args, options)
    [grad] = torch.autograd.grad(out.sum(), args[:1])
    torch.testing.assert_close(out.detach(), plain, rtol=1e-4, atol=1e-4)
    assert grad.abs().sum() > 0
    with torch.no_grad():
        assert not op(args, options).requires_grad


def test_tracing_sees_no_record(known: World) -> None:
    """The same tensors as fakes of a known kind: shapes alone, and nothing is launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    args, options = drawn(0)
    for _ in range(3):
        op(args, options)
    known.launched.clear()
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in a] if isinstance(a, list) else mode.from_tensor(a) for a in args]
        out = op(fakes, options)
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert not known.launched


def test_a_provider_in_front(known: World) -> None:
    """It is asked in every call, whatever has a record; what a provider of somebody else does is never recorded."""
    args, options = drawn(0)
    for _ in range(3):
        op(args, options)
    assert known.launched
    calls: list[int] = []

    def own(call: Any) -> Tensor:
        calls.append(1)
        return call.x.new_zeros(3, 32)

    providers.register("experts_extended", providers.Provider("own", lambda call: None, own))
    for n in range(4):
        assert not op(args, options).any()
        assert len(calls) == n + 1
    providers.unregister("experts_extended", "own")
    assert op(args, options).any()


def test_grouped_products(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of a known kind (offsets are read on a CPU, so the function is played), then an encoding that does not fit."""
    held = hold(BLOCKS, 3, 32, 32, torch.Generator().manual_seed(0))
    storage, codes = held.lists(separate=True)
    for seed in range(4):
        xs, offsets = torch.randn(9, 32, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, 4, 4, 7 + seed % 2])
        call = (xs, offsets, storage, codes, [], str(BLOCKS))
        wanted = unplayed(monkeypatch, lambda call=call: torch.ops.moefuse.grouped_linear_coded(*call))
        known.python.clear()
        assert torch.equal(torch.ops.moefuse.grouped_linear_coded(*call), wanted)
        assert bool(known.python) is (seed < 2)
    for _ in range(4):
        with pytest.raises(ValueError, match="codes"):
            torch.ops.moefuse.grouped_linear_coded(xs, offsets, storage, codes[:-1], [], str(BLOCKS))


KINDS = [
    "[a, b, c]", "[b, a, c]", "[a, c, b]", "[a, c]", "[a, c, a]", "[a], [b, c]", "[a, b], [c]", "[a], [b], [c]", "[], [a, b, c]",
    "[a, b.t(), c]", "[a, a, b.t()]", "[a, odd, c]", "[odd, a, c]", "[a, c.half(), c]", "[a, c, c.half()]", "[a, a, c.view(4, 8, 1)]",
    "[a, a, c[:0]]", "[scalar, scalar]",
]  # fmt: skip


def test_kinds_that_are_two(known: World) -> None:
    """Each property of each tensor counts where nothing has been checked, and where each list ends."""
    from moefuse.kernels.triton.launch.recorded import recorded

    a, b, c = torch.empty(4, 8), torch.empty(8, 4), torch.empty(4, 8)
    odd = torch.empty(36)[1:33].view(4, 8)
    names = {"a": a, "b": b, "c": c, "odd": odd, "scalar": torch.empty(())}
    met: list[str] = []

    @recorded
    def call(*lists: Any) -> list[Tensor]:
        met.append("")
        return [torch.empty(1)]

    for kind in KINDS:
        for _ in range(2):
            call(*eval(f"({kind},)", names))
    assert len(met) == 2 * len(KINDS)
    before = known.refusals.count("nothing is launched")
    assert before == len(KINDS)
    for kind in KINDS:  # known, each by itself
        call(*eval(f"({kind},)", names))
    assert known.refusals.count("nothing is launched") == before
