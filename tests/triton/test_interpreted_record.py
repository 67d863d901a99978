"""Calls that are launched from a record: the same numbers as from Python, for every op, and a record for every kind of call.

The interpreter stands for compiled kernels: a launch that was made once is made again from addresses alone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import Body, ExpertsCall
from moefuse.ops.meaning.grad_calls import InCall, Needs, OutCall, RowsCall
from moefuse.ops.meaning.recipe import Recipe
from tests.triton.interpreted_case import poisoned

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning", "ignore::RuntimeWarning")
T, K, E, H, INNER = 6, 2, 5, 24, 20
Call = Callable[[], Any]


def tensor_at(address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))) * dtype.itemsize
    return torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=dtype).as_strided(shape, strides)


class World:
    """What was launched: for the first time, and again on which stream."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.again: list[int] = []
        self.stream = 7


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    from moefuse.kernels.triton.launch import record
    from moefuse.kernels.triton.launch.launch import Launch

    it, compile_and_launch = World(), Launch.first

    def first(self: Launch, tensors: Any) -> None:
        it.first.append(self.kernel.__name__)
        compile_and_launch(self, tensors)
        self.compiled = [(t.dtype, t.shape, t.stride()) if isinstance(t, Tensor) else None for t in tensors]

    def again(self: Launch, stream: int, addresses: Any) -> None:
        it.again.append(stream)
        made = [a if kind is None else tensor_at(a, *kind) for a, kind in zip(addresses, self.compiled, strict=True)]
        compile_and_launch(self, made)

    monkeypatch.setattr(Launch, "first", first)
    monkeypatch.setattr(Launch, "again", again)
    monkeypatch.setattr(record, "INTERPRETED", False)
    monkeypatch.setattr(record, "RECORDS", {})
    monkeypatch.setattr(record, "_first_time", lambda key: False)
    monkeypatch.setattr(record, "raw_stream", lambda device: it.stream)
    monkeypatch.setattr(record, "empty_cuda", lambda size, strides, dtype: poisoned(torch.empty_strided(size, strides, dtype=dtype)))
    monkeypatch.setattr("moefuse.kernels.triton.launch.calls.stream_of", lambda device: it.stream)
    return it


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(seed: int, experts: int = E) -> Tensor:
    return torch.rand((T, experts), generator=torch.Generator().manual_seed(seed)).topk(K).indices


def weight(seed: int, storage: str, out: int, inp: int) -> list[Tensor]:
    w = draw(seed, E, out, inp)
    if storage == "separate":  # in another order in memory with every seed
        memory, places = torch.empty_like(w), torch.randperm(E, generator=torch.Generator().manual_seed(seed)).tolist()
        return [memory[place].copy_(e) for place, e in zip(places, w, strict=True)]
    if storage == "unequal strides":
        return [e.clone() if i % 2 else e.t().contiguous().t() for i, e in enumerate(w)]
    return [w.transpose(1, 2).contiguous().transpose(1, 2)] if storage == "in-out" else [w]


def tier(storage: str) -> Callable[[int], Any]:
    def call(seed: int) -> Any:
        from moefuse.kernels.triton.provide import grouped

        x, w, b = (
            draw(seed, T, H),
            weight(seed + 1, storage, INNER, H),
            weight(seed + 2, "separate" if storage == "separate" else "", INNER, 1),
        )
        b = [t.squeeze(-1) for t in b]
        rows, order, offsets = grouped.permute(x, ids(seed), E)
        h = grouped.grouped_linear(rows, offsets, w, b)
        grads = grouped.grouped_linear_backward(h, rows, offsets, w, b, [True, True, True])
        v = grouped.expert_rows(b, offsets, T * K)
        grads += grouped.expert_rows_backward(v, b, offsets)
        weights = draw(seed + 3, T, K)
        out = grouped.combine(h, weights, order, offsets, K, torch.float64)
        grads += grouped.combine_backward(out.float(), h, weights, order, offsets, K, [True, True])
        return rows, order, offsets, h, v, out, grads

    return call


def train(storage: str, gating: str = "merged", on_input: bool = False) -> Callable[[int], Any]:
    def call(seed: int) -> Any:
        from moefuse.kernels.triton.provide import training

        x, w, split = draw(seed, T, H), draw(seed + 1, T, K), gating == "separate"
        w_in = weight(seed + 2, storage, INNER if split else 2 * INNER, H)
        w_up, w_out = weight(seed + 3, storage, INNER, H) if split else [], weight(seed + 4, storage, H, INNER)
        call = ExpertsCall.of(x, ids(seed), w, w_in, w_up, w_out, [], [], [], gating=gating, weight_on_input=on_input)
        need = Needs.of([True, True, True, split, True, False, False, False], on_input)
        out, h, order, offsets = training.experts_forward(call)
        grad = draw(seed + 5, T, H)
        d_h, a, *rest = training.experts_backward_rows(RowsCall(grad, w, h, order, offsets, call.w_out, need, call.body))
        d_in = training.experts_backward_in(InCall(x, w, d_h, order, offsets, call.w_in, call.w_up, need, call.body))
        return out, h, d_h, a, rest, d_in, training.experts_backward_out(OutCall(grad, w, order, offsets, a, call.w_out, need, call.body))

    return call


def routers(seed: int) -> Any:
    from moefuse.kernels.triton.provide import logits, router

    x, w, bias = draw(seed, T, H), draw(seed + 1, E, H), draw(seed + 2, E)
    found = logits.router_logits(x[:1], w, bias, torch.float32)
    return found, router.topk(draw(seed, T, E), K), router.route(draw(seed, T, E), bias, Recipe(K, "sigmoid"), torch.float32)


def activation(seed: int) -> Any:
    from moefuse.kernels.triton.provide.activate import activate

    return activate(*draw(seed, T, 2 * INNER).chunk(2, -1), Body())


def ranks(seed: int) -> Any:
    """Rows of the first of two ranks; the other one has pushed rows full of ones, and is far ahead."""
    from moefuse.kernels.triton.provide import ranks, symm

    size, at_flags = 4096, 2 * 4096
    memory = [torch.ones(2 * size // 4 + 4) for _ in range(2)]
    flags = memory[0][-4:].view(torch.int32)[:2].fill_(1 << 20)
    at = symm.Shared(torch.tensor([m.data_ptr() for m in memory]), torch.zeros(2, dtype=torch.int32), flags)
    how = symm.Transfer.of(2, 0, size, at_flags, T, (0, 2048, 3072), 0)
    place = torch.arange(E, dtype=torch.int32)
    rows = (draw(seed, T, H), draw(seed + 1, T, K))
    every, local, took, to = symm.dispatch(rows, ids(seed), place, 3, at, how)
    back = symm.give_back(every, took, to, at, how)
    return (
        every,
        local,
        took,
        to,
        back,
        symm.send(rows, took, to, at, how),
        ranks.local_ids(ids(seed), place, 3, 2),
        ranks.sum_ranks(rows[0], 2, 2),
    )


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in flat(v)]


OPS: dict[str, Callable[[int], Any]] = {
    **{f"grouped, {storage}": tier(storage) for storage in ("stacked", "in-out", "separate", "unequal strides")},
    **{f"training, {storage}": train(storage) for storage in ("stacked", "in-out", "separate", "unequal strides")},
    "training, gate and up": train("separate", "separate"),
    "training, weights on the input": train("stacked", on_input=True),
    "router": routers,
    "activation": activation,
    "rows of ranks": ranks,
}


@pytest.mark.parametrize("name", OPS)
def test_the_same_from_a_record(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other values at other addresses: the numbers, shapes and strides that Python's launches give, without any Python of the op."""
    from moefuse.kernels.triton.launch import record

    OPS[name](0)
    assert record.RECORDS
    assert all(record.RECORDS.values())
    world.first.clear()
    world.again.clear()
    played = flat(OPS[name](1))
    assert set(world.first) <= {"write_addresses"}  # whose numbers are addresses
    assert len(world.again) >= len(record.RECORDS)
    monkeypatch.setattr(record, "INTERPRETED", True)
    for found, wanted in zip(played, flat(OPS[name](1)), strict=True):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert torch.equal(found, wanted)


def choose(scores: Tensor, k: int = K) -> Any:
    from moefuse.kernels.triton.provide import router

    return router.topk(scores, k)


def shifted(t: Tensor) -> Tensor:
    """The same at an address that is no multiple of 16 bytes."""
    out = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
    assert out.data_ptr() % 16
    return out


OTHERS: dict[str, Call] = {
    "shape": lambda: choose(draw(0, T + 1, E)),
    "strides": lambda: choose(draw(0, E, T).t()),
    "dtype": lambda: choose(draw(0, T, E, dtype=torch.float16)),
    "alignment": lambda: choose(shifted(draw(0, T, E))),
    "option": lambda: choose(draw(0, T, E), K + 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_is_another_record(name: str, world: World) -> None:
    choose(draw(0, T, E))
    choose(draw(1, T, E))
    assert len(world.first) == 1
    OTHERS[name]()
    assert len(world.first) == 2


@pytest.mark.parametrize("setting", ["allow_tf32", "fp32_precision", "PRODUCTS"])
def test_settings_are_part_of_the_kind(setting: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names of leave to round float32: reading the older one raises where the newer one was set."""
    from moefuse.kernels.triton import config

    choose(draw(0, T, E))
    if setting == "PRODUCTS":
        monkeypatch.setattr(config, setting, "own")
    else:
        setattr(torch.backends.cuda.matmul, setting, True if setting == "allow_tf32" else "tf32")
    try:
        choose(draw(0, T, E))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert len(world.first) == 2


def test_the_device_is_part_of_the_kind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has a record, played on its current stream while it is the current device."""
    from moefuse.kernels.triton.launch import record

    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *error: object) -> None:
            pass

    streams: list[int] = []
    monkeypatch.setattr(record, "current_device", lambda: 0)
    monkeypatch.setattr(record, "raw_stream", lambda device: streams.append(device) or 40 + device)  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "device", Device)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(Tensor, "get_device", lambda t, device=device: device)
        choose(draw(0, T, E))
    assert len(world.first) == 2
    assert entered == [1, 1]
    assert streams == [0, 1]
    assert world.again == [40, 41]


def test_the_stream_is_the_one_of_the_call(world: World) -> None:
    for world.stream in (7, 8, 9):
        choose(draw(0, T, E))
    assert world.again == [8, 9]


def test_one_tensor_in_two_places(world: World) -> None:
    """In the recorded call the gradient and the rows are one tensor; in the next, of the same kind, they are two."""
    from moefuse.kernels.triton.provide import grouped

    chosen = ids(0)[:, :1]
    ys, order, offsets = grouped.permute(draw(0, T, H), chosen, E)
    weights = torch.ones(T, 1)
    grouped.combine_backward(ys, ys, weights, order, offsets, 1, [True, True])
    world.first.clear()
    grad = draw(1, T, H)
    _, d_weights = grouped.combine_backward(grad, ys, weights, order, offsets, 1, [True, True])
    assert not world.first
    torch.testing.assert_close(d_weights[order, 0], (grad[order] * ys).sum(1))


def test_the_first_in_memory_of_some_tensors(world: World) -> None:
    """A step may return one of its arguments, and in a later call another one; lists that it was taken from stay what they are."""
    from moefuse.kernels.triton.host.operands import steps_table
    from moefuse.kernels.triton.host.sorted_rows import Sorted, gather
    from moefuse.kernels.triton.launch.record import as_step, recorded

    @recorded
    def call(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        _, steps = as_step(steps_table, tensors)
        again, same = as_step(steps_table, tensors)
        out = torch.empty(1, 4, dtype=torch.float32)
        order = torch.zeros(1, dtype=torch.int64)
        gather(out, again[None], Sorted(order, order, 1, 1, 1))
        return out[0], steps, same

    memory = torch.arange(64, dtype=torch.float32)
    up, down = [memory[16 * i : 16 * i + 4] for i in (2, 0, 1)], [memory[16 * i : 16 * i + 4] for i in (0, 1, 3)]
    for tensors in (up, down, up):
        out, steps, same = call(tensors)
        assert torch.equal(out, min(tensors, key=Tensor.data_ptr))
        assert torch.equal(steps, same)
        assert steps.tolist() == [(t.data_ptr() - min(map(Tensor.data_ptr, tensors))) // 16 for t in tensors]
    assert world.again


def test_forgotten_with_the_plans(world: World) -> None:
    from moefuse.kernels.triton.provide import experts

    choose(draw(0, T, E))
    experts.forget_plans()
    choose(draw(0, T, E))
    assert len(world.first) == 2


def test_a_kind_is_recorded_when_it_comes_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of tokens that is new in every call costs no recording; what was met is let go of like the records."""
    from moefuse.kernels.triton.launch import record

    monkeypatch.undo()
    met: set[object] = set()
    monkeypatch.setattr(record, "_MET", met)
    monkeypatch.setattr(record, "_MAX_RECORDS", 3)
    assert [record._first_time(key) for key in ("a", "b", "a", "c", "b")] == [True, True, False, True, False]
    for key in range(9):
        record._first_time(key)
        assert len(met) <= 3


def test_so_many_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.launch import record

    monkeypatch.setattr(record, "_MAX_RECORDS", 3)
    for tokens in range(1, 9):
        choose(draw(0, tokens, E))
        assert len(record.RECORDS) <= 3


def test_what_cannot_be_recorded_runs_in_python(world: World) -> None:
    """An operation that reads values, sizes that follow from values, a tensor from elsewhere, and a call without launches."""
    from moefuse.kernels.triton.launch import record

    kept = torch.ones(T, K)

    def reads(x: Tensor) -> Tensor:
        return choose(x)[0] * float(x.sum())

    def counted(x: Tensor) -> Tensor:
        return choose(x)[0][x[:, 0].nonzero()]

    def foreign(x: Tensor) -> Tensor:
        return choose(x)[0] + kept

    def found(x: Tensor) -> Any:
        return choose(x), kept

    def torch_alone(x: Tensor) -> Tensor:
        return x + 1

    for function in (reads, counted, foreign, found, torch_alone):
        record.RECORDS.clear()
        call = record.recorded(function)
        for seed in range(2):
            x = draw(seed, T, E).round()
            for got, wanted in zip(flat(call(x)), flat(function(x)), strict=True):
                assert torch.equal(got, wanted)
        assert record.RECORDS.pop(next(key for key in record.RECORDS if key[0] is function)) is None


def test_a_launch_that_is_bound_each_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.launch import record
    from moefuse.kernels.triton.launch.launch import Launch

    first = Launch.first

    def bound(self: Launch, tensors: Any) -> None:
        first(self, tensors)
        self.compiled = None

    monkeypatch.setattr(Launch, "first", bound)
    for _ in range(3):
        choose(draw(0, T, E))
    assert len(world.first) == 3
    assert list(record.RECORDS.values()) == [None]


def test_memory_is_let_go(world: World) -> None:
    """A record holds no tensor of its call, and a call from a record lets each go after the last step that reads it."""
    from moefuse.kernels.triton.launch import record

    alive: list[weakref.ref[Tensor]] = []

    def noted(t: Tensor) -> Tensor:
        record.as_step(lambda part: alive.append(weakref.ref(part)), t[:0])
        return t

    def chain(x: Tensor) -> Any:
        return choose(noted(noted(x * 2) + 1))

    call, x = record.recorded(chain), draw(0, T, E)
    call(x)
    assert [ref() for ref in alive] == [None, None]
    torch.testing.assert_close(call(x + 1)[0], (2 * x + 3).topk(K).values)
    [made] = record.RECORDS.values()
    assert made is not None
    # x * 2, its part (kept: as_step saw it), the note, + 1, its part, the note, values, ids, the launch
    assert [list(over) for *_, over in made.steps] == [[], [], [], [1], [], [], [], [], [3]]
