"""Ops whose calls of a known kind are neither checked nor worked out again: right numbers, the same errors, gradients as ever."""

from __future__ import annotations

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
from tests.triton import test_interpreted_record
from tests.triton.test_interpreted_coded import ENCODINGS
from tests.triton.test_interpreted_record import World

pytestmark = test_interpreted_record.pytestmark
world = test_interpreted_record.world
SMALL = Case(tokens=3, hidden=32, inter=32, hidden_out=32, experts=3, top_k=2, dtype=torch.float32, bias=False)
BLOCKS = ENCODINGS["fp8 blocks"]


@pytest.fixture
def known(world: World) -> Iterator[World]:
    """The Triton providers as on CUDA, for CPU tensors."""
    from moefuse.kernels.triton.provide import extended, grouped_coded

    modules = {"experts_extended": extended, "grouped_linear_coded": grouped_coded}
    before = {name: list(providers.PROVIDERS[name]) for name in modules}
    for name, module in modules.items():
        found = providers.Provider("triton", module.supports, getattr(module, name), "cpu", None, providers._by_kind)
        providers.register(name, found)
    yield world
    for name, order in before.items():
        providers._replace(name, order)


def python(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Tensor]) -> Tensor:
    """What it gives without any record."""
    from moefuse.kernels.triton.launch import record

    with monkeypatch.context() as patch:
        patch.setattr(record, "INTERPRETED", True)
        return call()


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


@pytest.mark.parametrize("storage", ["stacked", "separate", "unequal strides"])
def test_a_known_kind(storage: str, known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers at other addresses, of experts that lie in memory in another order. (Unequal strides: bytes are stacked by torch, so
    the record has to show float8 as bytes there.)"""
    from moefuse.ops import extended as ops

    for seed, order in ((0, [0, 1, 2]), (1, [2, 0, 1]), (2, [1, 2, 0])):
        args, options = drawn(seed, separate=storage != "stacked")
        if storage == "separate":
            args[3], args[5] = in_order(args[3], order), in_order(args[5], order[::-1])
        if storage == "unequal strides":
            args[3][1] = args[3][1].view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
        wanted = python(monkeypatch, lambda args=args, options=options: op(args, options))
        known.first.clear()
        with monkeypatch.context() as patch:
            if seed:
                patch.setattr(ops, "check_call", None)  # a call from a record does not come there
            assert torch.equal(op(args, options), wanted)
        assert not seed or set(known.first) <= {"write_addresses"}


def test_bytes_are_no_step(known: World) -> None:
    """float8 begins where its bytes do; memory for nobody is not made."""
    from moefuse.kernels.triton.launch import record
    from moefuse.kernels.triton.launch.launch import Launch

    op(*drawn(0))
    [made] = record.RECORDS.values()
    assert made is not None
    assert {type(do) is Launch or do is record.empty_cuda for do, *_ in made.steps} == {True}
    read = {slot for _, args, *_ in made.steps for slot in record.slots_of(args)} | {*record.slots_of(made.result)}
    assert all(slot in read for do, _, slots, _ in made.steps if do is record.empty_cuda for slot in slots)
    # Small ones are parts of one allocation, none of which is within another one; what is returned has memory of its own.
    assert len(made.places) > 1
    assert made.result not in dict(made.places)
    assert {*dict(made.places)} <= read
    starts = [at for _, at in made.places]
    assert starts == sorted({*starts})
    assert 0 == starts[0] <= starts[-1] < made.bytes


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


def test_what_an_operation_reads_is_a_tensor(world: World) -> None:
    """Small results of a launch that torch adds up, in a record: not parts of the one allocation."""
    from moefuse.kernels.triton.launch import record

    def added(x: Tensor) -> Tensor:
        values, ids = test_interpreted_record.choose(x)
        return values + ids

    call = record.recorded(added)
    for seed in range(2):
        x = torch.rand(6, 5, generator=torch.Generator().manual_seed(seed))
        values, ids = x.topk(2)
        torch.testing.assert_close(call(x), values + ids)
    [made] = record.RECORDS.values()
    assert made is not None
    assert not made.places


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
        python(monkeypatch, lambda: op(args, options))
    for _ in range(2):
        with pytest.raises(type(without.value)) as error:
            op(args, options)
        assert str(error.value) == str(without.value)


def test_encodings_are_part_of_the_kind(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, as two kinds of numbers."""
    args, options = drawn(0)
    args[3], args[5] = ([w[0].view(torch.uint8)] for w in (args[3], args[5]))
    found = []
    for element in ("e4m3", "s8", "e4m3", "s8"):
        options["encodings"] = [str(Encoding(element, BLOCKS.block)), "", str(Encoding(element, BLOCKS.block))]
        found.append(op(args, options))
        assert torch.equal(found[-1], python(monkeypatch, lambda: op(args, options)))
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
    op(args, options)
    known.again.clear()
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in a] if isinstance(a, list) else mode.from_tensor(a) for a in args]
        out = op(fakes, options)
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert not known.again


def test_a_provider_in_front(known: World) -> None:
    """It is asked, whatever has a record."""
    args, options = drawn(0)
    op(args, options)
    providers.register("experts_extended", providers.Provider("own", lambda call: None, lambda call: call.x.new_zeros(3, 32)))
    assert not op(args, options).any()
    providers.unregister("experts_extended", "own")
    assert op(args, options).any()


def test_grouped_products(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of a known kind, and then an encoding that does not fit."""
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        held = hold(BLOCKS, 3, 32, 32, g)
        storage, codes = held.lists(separate=True)
        xs, offsets = torch.randn(9, 32, generator=g), torch.tensor([0, 4, 4, 7 + seed])
        call = (xs, offsets, storage, codes, [], str(BLOCKS))
        wanted = python(monkeypatch, lambda call=call: torch.ops.moefuse.grouped_linear_coded(*call))
        known.first.clear()
        assert torch.equal(torch.ops.moefuse.grouped_linear_coded(*call), wanted)
        assert not seed or set(known.first) <= {"write_addresses"}
    for _ in range(2):
        with pytest.raises(ValueError, match="codes"):
            torch.ops.moefuse.grouped_linear_coded(xs, offsets, storage, codes[:-1], [], str(BLOCKS))


def test_kinds_that_are_two() -> None:
    """Each property of each tensor counts where nothing has been checked."""
    from moefuse.kernels.triton.launch.kinds import exact_kinds

    def key(*data: Any) -> Any:
        tensors = [t for part in data for t in ([part] if isinstance(part, Tensor) else part)]
        found = tuple(exact_kinds(data, tensors, [t.data_ptr() for t in tensors]))
        assert hash(found) == hash(tuple(exact_kinds(data, tensors, [t.data_ptr() for t in tensors])))
        return found

    a, b, c = torch.empty(4, 8), torch.empty(8, 4), torch.empty(4, 8)
    odd = torch.empty(36)[1:33].view(4, 8)
    kinds = [
        key([a, b, c]), key([b, a, c]), key([a, c, b]), key([a, c]), key([a, c, a]), key([a], [b, c]), key([a, b], [c]), key([a], [b], [c]),
        key(a, b, c), key([], [a, b, c]), key([a, b.t(), c]), key([a, a, b.t()]), key([a, odd, c]), key([odd, a, c]), key([a, c.half(), c]),
        key([a, c, c.half()]), key([a, torch.empty(4, 8, device="meta"), c]), key([a, a, c.view(4, 8, 1)]), key([a, a, c[:0]]),
        key([torch.empty(()), torch.empty(())]),
    ]  # fmt: skip
    assert len({*kinds}) == len(kinds)
    assert key([a, a, b]) == key([a, c, b])
