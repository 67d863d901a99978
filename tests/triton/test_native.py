"""The C++ that plays records: real kernels, compiled for a device that is not here, given to a launch function that only takes notes; who
owns what; and which calls are one kind."""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.ops import schema
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.composite import flatten
from tests.triton.player_case import NO_ROOM, World, the_world
from tests.triton.test_compiled import compile_launch

BF16 = torch.bfloat16
T, K, E, H, INNER = 3, 2, 4, 64, 32
COUNTS = [1, 0, 1, 0, 0, 0]
PACKED = "(Tensor[] tensors, int[] counts, int body, float arg0, float arg1, ScalarType out_dtype) -> Tensor"
MANY = (
    "(Tensor x, Tensor? y, Tensor[] many, Tensor[]? more, int i, float f, bool b, str s, ScalarType d, ScalarType? e, int[] n, bool[] o, "
    "str[]? p, float[] q) -> (Tensor, Tensor)"
)

keeps_text = pytest.mark.skipif(not all(_torch_private.libtorch_functions(_torch_private.MAY_LACK)), reason="this libtorch keeps no text")


class Notes:
    """Ops of our own, whose Python plans a call of experts for a Hopper GPU, and what the driver was given."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ops = torch.library.Library("moefuse", "FRAGMENT")
        for name, text, kernel in (("infer_test", PACKED, self.infer), ("many_test", MANY, self.many)):
            for op in (name, f"{name}_general"):
                self.ops.define(f"{op}{text}")
                self.ops.impl(op, kernel, "Meta")
            self.ops.impl(f"{name}_general", _torch_private.failures.told(schema._twin(kernel)), "CompositeExplicitAutograd")
        self.reset()

    def reset(self) -> None:
        self.config: Any = None
        self.steps: list[Any] = []
        self.launched: list[tuple[Any, ...]] = []
        self.python = 0
        self.raises: BaseException | None = None

    def infer(self, *packed: Any) -> Tensor:
        from moefuse.kernels.triton.host.layout import Device
        from moefuse.kernels.triton.host.plan import Plan

        self.python += 1
        if self.raises is not None:
            raise self.raises
        self.steps.clear()
        return Plan(ExpertsCall.unpack(*packed), self.config, Device("", 132, 227 << 10, True)).run(ExpertsCall.unpack(*packed))

    def many(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.python += 1
        self.run(Unlaid(), [])
        return torch.empty(2, 3), torch.empty_like(x)

    def run(self, it: Any, tensors: Any) -> None:
        """In the place of ``Launch.run``."""
        if not isinstance(it, Unlaid):
            compile_launch(it, dict(zip(it.names, tensors, strict=True)), 90)
        self.steps.append(it)

    def launch(self, config: int, function: int, params: Any) -> int:
        from moefuse.kernels.triton.launch import driver_launch

        known = driver_launch._Config.from_address(config)
        step = self.steps[len(self.launched) % len(self.steps)]
        self.launched.append(
            (function, known.stream, tuple(known.grid), self.read(step, params), (tuple(known.block), known.shared, known.num_attributes))
        )
        return self.world.errors.pop(0) if self.world.errors else 0

    def read(self, step: Any, params: Any) -> dict[str, Any]:
        """The addresses by the names of arrays; of all else, what is not as Python has it."""
        from moefuse.kernels.triton.launch import driver_launch

        kinds = driver_launch.parameters(list(step.compiled.src.signature.values()), [len(d.shape) for _, d in step.descs])
        found: dict[str, Any] = {"wrong": [], "maps": []}
        for i, (position, kind) in enumerate(kinds):
            value = functools.reduce(operator.getitem, position, step.args)
            at = params[i]
            if kind == "pointer":
                found[value] = ctypes.c_uint64.from_address(at).value
                continue
            if kind == "map":
                found["maps"].append(at)
                continue
            of, _, number = kind.partition(" ")
            wanted = value.shape[int(number)] if of == "shape" else value.strides[int(number)] if of == "stride" else value
            ctype = {"shape": ctypes.c_int32, "stride": ctypes.c_int64}.get(of) or driver_launch.NUMBERS[kind]
            if ctype.from_address(at).value != pytest.approx(wanted, rel=1e-6):
                found["wrong"].append((position, kind))
        found["scratch"] = [ctypes.c_uint64.from_address(params[len(kinds) + i]).value for i in range(2)]
        return found


class Unlaid:
    """No kernel at all."""


@functools.cache
def everything() -> Notes:
    return Notes(the_world())


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    from moefuse.kernels.triton.launch import player
    from moefuse.kernels.triton.launch.launch import Launch
    from moefuse.tuning.problem import Config, Vectors

    it = everything()
    it.reset()
    it.world.reset()
    it.world.play("infer_test", "many_test")
    it.world.native = it.launch
    it.config = Config(0, Vectors(4, 64), Vectors(4, 32), pdl=True)
    monkeypatch.setattr(Launch, "run", lambda self, tensors: it.run(self, tensors))
    monkeypatch.setattr(player, "_player", it.world.player)
    yield it
    it.world.native = None
    assert not it.world.wrong


def call(tensors: list[Tensor], counts: list[int] = COUNTS, body: int = 0, arg0: float = 0.5, out_dtype: torch.dtype = BF16) -> Tensor:
    out: Tensor = torch.ops.moefuse.infer_test(tensors, counts, body, arg0, -0.25, out_dtype)
    return out


def tensors(tokens: int = T, dtype: torch.dtype = BF16) -> list[Tensor]:
    x, weights = torch.zeros(tokens, H, dtype=dtype), torch.zeros(tokens, K, dtype=dtype)
    w_in, w_out = torch.zeros(E, 2 * INNER, H, dtype=dtype), torch.zeros(E, H, INNER, dtype=dtype)
    return [x, torch.zeros(tokens, K, dtype=torch.int64), weights, w_in, w_out]


def recorded(notes: Notes, args: list[Tensor]) -> None:
    for _ in range(2):
        call(args)
    assert (notes.python, notes.world.known) == (2, 1)


def test_a_known_call_is_launched(notes: Notes) -> None:
    """Every kernel with its grid, threads, shared memory and PDL attribute, on the current stream, with the addresses of this call and
    every other argument as it is; the output has the plan's shape and dtype."""
    recorded(notes, tensors())
    for _ in range(2):  # the second call has other addresses
        notes.launched.clear()
        args = tensors()
        out = call(args)
        assert (out.shape, out.dtype, out.stride()) == ((T, H), BF16, (H, 1))
        assert notes.python == 2
        assert [(f, s, g) for f, s, g, *_ in notes.launched] == [(77, 7, step.grid) for step in notes.steps]
        for step, (*_, at, config) in zip(notes.steps, notes.launched, strict=True):
            for name, tensor in (("x", args[0]), ("ids", args[1]), ("w_in", args[3]), ("w_out", args[4]), ("out", out)):
                assert at.get(name, tensor.data_ptr()) == tensor.data_ptr(), name
            assert (at["wrong"], at["scratch"]) == ([], [0, 0])
            metadata = step.compiled.metadata
            assert config == ((32 * metadata.num_warps, 1, 1), metadata.shared, 1)
        first, last = notes.launched[0][3], notes.launched[-1][3]
        assert first["h"] == last["h"] not in (0, out.data_ptr())


def test_the_attribute_of_dependent_launches() -> None:
    """As CUDA's headers lay it out."""
    from moefuse.kernels.triton.launch import driver_launch

    attribute = driver_launch._Attribute(driver_launch._SERIALIZE, 0, 1)
    assert (attribute.id, attribute.value, ctypes.sizeof(attribute), ctypes.sizeof(driver_launch._Config)) == (6, 1, 72, 56)


def test_tensor_maps(notes: Notes) -> None:
    """A map is made before the launches where its array begins elsewhere than in the last call: innermost dimension first, strides in bytes
    and without that of the innermost. What the driver refuses is an error, for kernels run already."""
    from moefuse.tuning.problem import Config, Tiles

    part = Tiles(64, 64, 8, 3, 4, desc=True, rows_desc=True)
    notes.config = Config(64, part, part)
    args, encoded = tensors(), notes.world.encoded
    recorded(notes, args)
    out = call(args)
    assert (out.shape, notes.python) == ((T, H), 2)
    shown = [d for step in notes.steps for _, d in step.descs]
    assert shown
    assert len(encoded) == len(shown)
    assert [at for *_, found, _ in notes.launched for at in found["maps"]] == [made[0] for made in encoded]
    begins = {"w_in": args[3].data_ptr(), "w_up": args[3].data_ptr(), "w_out": args[4].data_ptr(), "x": args[0].data_ptr()}
    for d, (at, kind, rank, begin, shape, strides, *rest) in zip(shown, encoded, strict=True):
        assert at % 64 == 0
        assert (kind, rank, begin) == (9, len(d.shape), begins.get(d.array, begin))
        assert (shape, strides[:-1]) == ([*reversed(d.shape)], [2 * s for s in reversed(d.strides[:-1])])
        assert (rest[0], *rest[2:]) == (0, 2, 0)
    encoded.clear()
    other = tensors()
    call([*args[:3], args[3], other[4]])
    assert other[4].data_ptr() in [made[3] for made in encoded]
    assert args[3].data_ptr() not in [made[3] for made in encoded]
    notes.world.refuses_maps = 716
    with pytest.raises(RuntimeError, match="CUDA error 716"):
        call(tensors())


def test_many_kinds_side_by_side(notes: Notes) -> None:
    """One for each number of tokens, as a server has them."""
    for tokens in range(1, 20):
        for _ in range(2):
            call(tensors(tokens))
    assert notes.world.known == 19
    before = notes.python
    for tokens in range(1, 20):
        call(tensors(tokens))
    assert notes.python == before


def test_a_launch_that_fails(notes: Notes) -> None:
    """Declined before anything ran (a thread without a context is): the Python op takes over. Later: an error that names the code."""
    recorded(notes, tensors())
    notes.world.errors[:] = [2]
    call(tensors())
    assert notes.python == 3
    notes.launched.clear()
    notes.world.errors[:] = [0, 719]
    with pytest.raises(RuntimeError, match="CUDA error 719 at a launch"):
        call(tensors())
    assert notes.python == 3


def test_nothing_leaks(notes: Notes) -> None:
    """Arguments and results are released: a tensor that only the op saw is gone after it."""
    recorded(notes, tensors())
    args = tensors()
    alive = weakref.ref(args[0].untyped_storage())
    out = call(args)
    result = weakref.ref(out)
    del args, out
    gc.collect()
    assert result() is None
    assert alive() is None


def counts_of(args: list[Tensor]) -> list[int]:
    return [t._use_count() for t in args]  # type: ignore[attr-defined]


@keeps_text
@pytest.mark.parametrize("room", [0, 1], ids=["output", "workspace"])
def test_an_allocation_that_fails(notes: Notes, room: int) -> None:
    """Out of memory has its type and text, by which programs try a smaller batch, and holds on to nothing: what was already allocated and
    the arguments would be missing in that next try. Both were lost, and the text was one of moefuse's."""
    args = tensors()
    recorded(notes, args)
    before = counts_of(args)
    for _ in range(3):
        notes.world.memory.room = room
        with pytest.raises(torch.OutOfMemoryError, match=NO_ROOM):
            call(args)
    assert notes.python == 2
    assert not notes.world.memory.alive
    assert counts_of(args) == before
    notes.world.memory.room = 2
    assert call(args).shape == (T, H)


def test_a_launch_that_fails_keeps_nothing(notes: Notes) -> None:
    """Neither the arguments, which were never released, nor the output."""
    args = tensors()
    recorded(notes, args)
    before = counts_of(args)
    for errors in ([0, 719], [2]):
        notes.launched.clear()
        notes.world.errors[:] = errors
        if len(errors) == 2:
            with pytest.raises(RuntimeError, match="CUDA error 719"):
                call(args)
        else:
            call(args)
    assert notes.python == 3
    assert not notes.world.memory.alive
    assert counts_of(args) == before


@keeps_text
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.OutOfMemoryError(NO_ROOM), torch.OutOfMemoryError, f"^{NO_ROOM}"),
        (RuntimeError("no kernel"), RuntimeError, "^no kernel"),
        (ValueError("of 3 experts"), ValueError, "^of 3 experts"),
        (NotImplementedError("on this device"), NotImplementedError, "^on this device"),
        (LookupError("of its own"), RuntimeError, "^LookupError: of its own"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exceptions_of_the_python_op(notes: Notes, error: Exception, kind: type[Exception], text: str) -> None:
    """They pass through libtorch's C interface, which keeps their text. Each was a RuntimeError that said "a call into libtorch failed"."""
    args = tensors()
    before = counts_of(args)
    notes.raises = error
    for n in range(2):  # the second one while it is recorded
        with pytest.raises(kind, match=text) as raised:
            call(args)
        assert type(raised.value) is kind
        assert "): infer\n" in str(raised.value)  # where it was raised
        assert notes.python == n + 1
        del raised
    notes.raises = error.__traceback__ = None
    gc.collect()
    assert counts_of(args) == before
    recorded_again = [call(args) for _ in range(2)]
    assert (len(recorded_again), notes.world.known) == (2, 1)


def test_a_libtorch_that_keeps_no_text(notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11: the Python op keeps the text of its exception, and what cannot be allocated is out of memory. An interrupt says that it
    was one."""
    from moefuse.kernels.triton.launch import player

    # Another file is another library, with a table of its own.
    copy = Path(shutil.copy(notes.world.player.library._name, tmp_path))
    monkeypatch.setattr(_torch_private, "build_cpp", lambda source, folder: copy)
    for op in ("older_test", "older_test_general"):
        notes.ops.define(f"{op}{PACKED}")
    notes.ops.impl("older_test_general", _torch_private.failures.told(schema._twin(notes.infer)), "CompositeExplicitAutograd")
    older = player.Player([_torch_private.failures.what(), *notes.world.functions[1:]], "moefuse", "CPU", 0)
    older.play("older_test")
    monkeypatch.setattr(player, "_player", older)

    def run() -> Tensor:
        return torch.ops.moefuse.older_test(tensors(), COUNTS, 0, 0.5, -0.25, BF16)  # type: ignore[no-any-return]

    kinds: list[tuple[BaseException, type[Exception], str]] = [
        (torch.OutOfMemoryError(NO_ROOM), torch.OutOfMemoryError, f"^{NO_ROOM}$"),
        (ValueError("of 3 experts"), ValueError, "^of 3 experts$"),
        (KeyboardInterrupt(), RuntimeError, "^KeyboardInterrupt: $"),
    ]
    for error, kind, text in kinds:
        notes.raises = error
        with pytest.raises(kind, match=text):
            run()
    assert notes.python == len(kinds)
    notes.raises = None
    run()
    notes.world.memory.room = 0
    with pytest.raises(torch.OutOfMemoryError, match="moefuse::experts: out of memory"):
        run()


def test_a_function_that_this_libtorch_lacks() -> None:
    """Without the text of failures everything works; any other function is needed."""
    assert all(_torch_private.libtorch_interface(())[1:])
    with pytest.raises(AttributeError):
        _torch_private.libtorch_functions(["torch_no_such_function"])


def given(**changes: Any) -> list[Any]:
    """Arguments of every kind that a schema has."""
    x = torch.zeros(2, 3)
    named = {
        "x": x, "y": x, "many": [x, x], "more": [x], "i": 3, "f": 0.5, "b": True, "s": "a text of some length", "d": BF16,
        "e": torch.float32, "n": [1, 2], "o": [True, False], "p": ["one", "two"], "q": [0.25],
    }  # fmt: skip
    return [*(named | changes).values()]


OTHERS: dict[str, Any] = {
    "y": None, "many": [torch.zeros(2, 3)], "more": None, "i": 1 << 40, "f": 0.25, "b": False, "s": "a text of some lengtH",
    "d": torch.half, "e": None, "n": [1], "o": [True, True], "p": ["onet", "wo"], "q": [], "x": torch.zeros(3, 2).t(),
}  # fmt: skip


@pytest.fixture
def every(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> Notes:
    """Its op launches something, which is not laid out here."""
    from moefuse.kernels.triton.launch import driver_launch, record, steps

    nothing = driver_launch._Config((1, 1, 1), (32, 1, 1), 0, None, None, 0)
    monkeypatch.setattr(steps, "laid_out", lambda it, slots: driver_launch.Laid([ctypes.addressof(nothing), 5, 0, 0], [nothing]))
    monkeypatch.setattr(notes, "run", lambda it, tensors: record.active() and record.active().steps.append(steps.Step(steps.LAUNCH, it)))
    monkeypatch.setattr(notes.world, "native", lambda *args: 0)
    return notes


def test_every_kind_of_argument(every: Notes) -> None:
    """Each is part of the kind of a call, at whatever place, and each is released: what is given lives no longer than before."""
    op = torch.ops.moefuse.many_test
    for n, change in enumerate([{}, *({name: value} for name, value in OTHERS.items())], 1):
        every.world.memory.reset()
        args = given(**change)
        flat = flatten(args)
        before = counts_of(flat)
        for _ in range(4):
            first, second = op(*args)
            assert (first.shape, second.stride()) == ((2, 3), args[0].stride())
        assert (every.python, every.world.known) == (2 * n, n), change
        assert counts_of(flat) == before
        assert len(every.world.memory.alive) <= 4  # results


def test_one_that_is_turned_off(every: Notes) -> None:
    """It is the Python op's always."""
    op = torch.ops.moefuse.many_test
    for _ in range(3):
        op(*given())
    every.world.player.enable("many_test", False)
    for n in range(3, 6):
        op(*given())
        assert every.python == n


def test_so_many_kinds(every: Notes) -> None:
    """Beyond, all are forgotten: the numbers of a server that never sees the same twice."""
    op = torch.ops.moefuse.many_test
    for _ in range(2):
        op(*given(i=-1))
    assert every.world.known == 1
    for i in range(1 << 14):
        op(*given(i=i))
    assert every.world.known == 0


def test_a_tensor_of_another_device(every: Notes) -> None:
    """It is the Python op's, which says what it thinks of it."""
    for n in range(1, 4):
        torch.ops.moefuse.many_test(*given(y=torch.zeros(2, 3, device="meta")))
        assert every.python == n


def test_another_thread(notes: Notes) -> None:
    """Records are of the process; what is asked is of the thread."""
    recorded(notes, tensors())
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(call(tensors())))
    thread.start()
    thread.join()
    assert notes.python == 2
    assert len(found) == 1
