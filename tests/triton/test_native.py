"""The C++ that launches without Python: built here for an op of its own on CPU tensors, with a launch function that only takes notes."""

from __future__ import annotations

import ctypes
import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse import _torch_private
from tests.triton.test_compiled import Driver, compile_launch, make_plan

NAME = "moefuse_direct_test"
COUNTS = [1, 0, 1, 0, 0, 0]
BF16 = torch.bfloat16
T, K, E, H, INNER = 3, 2, 4, 64, 32
NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB."

keeps_text = pytest.mark.skipif(not all(_torch_private.libtorch_functions(_torch_private.MAY_LACK)), reason="this libtorch keeps no text")


class Memory:
    """libtorch's functions that make and release tensors: which of them the op holds, and how many more there is room for. Results are
    libtorch's in the end, and stay listed."""

    def __init__(self, functions: list[int]) -> None:
        where = {name: i for i, name in enumerate(_torch_private.INTERFACE)}
        what, empty, release = (where[f] for f in (*_torch_private.MAY_LACK, "aoti_torch_empty_strided", "aoti_torch_delete_tensor_object"))
        number, address, code = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
        kinds: dict[int, Any] = {
            what: ctypes.CFUNCTYPE(address),
            empty: ctypes.CFUNCTYPE(code, number, address, address, code, code, code, ctypes.POINTER(address)),
            release: ctypes.CFUNCTYPE(code, address),
        }
        ours = {what: self.what, empty: self.empty, release: self.release}
        taken = [i for i in kinds if functions[i]]
        self.real: list[Any] = [kinds[i](functions[i]) if functions[i] else None for i in (what, empty, release)]
        self.callbacks = {i: kinds[i](ours[i]) for i in taken}
        for i in taken:
            functions[i] = ctypes.cast(self.callbacks[i], address).value or 0
        self.text = ctypes.create_string_buffer(NO_ROOM.encode())
        self.alive: set[int] = set()
        self.room = 1 << 30
        self.full = False

    def what(self) -> int:
        return ctypes.addressof(self.text) if self.full else int(self.real[0]())

    def empty(self, *args: Any) -> int:
        self.full = not self.room
        if self.full:
            return 1
        self.room -= 1
        error = int(self.real[1](*args))
        if not error:
            self.alive.add(args[-1][0])
        return error

    def release(self, handle: int) -> int:
        self.alive.discard(handle)
        return int(self.real[2](handle))


class World:
    """A library over fake CUDA functions, a plan for few slots, and what has been launched."""

    def __init__(self) -> None:
        from moefuse.kernels.triton.launch import dispatcher, driver_launch
        from moefuse.tuning.problem import Config, Problem, Tiles, Vectors

        self.native, self.direct = dispatcher, driver_launch
        self.launched: list[tuple[Any, ...]] = []
        self.errors: list[int] = []
        self.fallbacks = 0
        self.raises: BaseException | None = None
        self.ops = torch.library.Library(NAME, "DEF")
        for op in ("infer", "general"):
            self.define(op)
        self.ops.impl("general", self.general, "CPU")
        address = ctypes.c_void_p
        launch = ctypes.CFUNCTYPE(ctypes.c_int32, address, address, ctypes.POINTER(address), address)
        stream = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(address))
        encode = ctypes.CFUNCTYPE(ctypes.c_int32, address, ctypes.c_int32, ctypes.c_uint32, *[address] * 5, *[ctypes.c_int32] * 4)
        self.callbacks = (stream(self.stream), launch(self.launch), encode(self.encode))
        functions = _torch_private.libtorch_interface(dispatcher.FUNCTIONS)
        self.memory = Memory(functions)
        functions += [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.callbacks]
        self.functions = functions
        self.library = dispatcher.load(functions, NAME, "CPU", "infer", "general", 0)
        tiles = Tiles(64, 64, 8, 3, 4, desc=True, rows_desc=True)
        problem = Problem(T, K, E, H, INNER, H, "merged", "bfloat16")
        self.vectors = self.compiled(problem, Config(0, Vectors(4, 64), Vectors(4, 32), pdl=True))
        self.tiles = self.compiled(problem, Config(64, tiles, tiles))
        self.plan = self.vectors
        self.encoded: list[tuple[Any, ...]] = []
        self.refuses_maps = 0

    def compiled(self, problem: Any, config: Any) -> Any:
        plan, tensors = make_plan(problem, config)
        for step in plan.steps:
            compile_launch(step, tensors, 90)
        return plan

    def define(self, op: str) -> None:
        self.ops.define(f"{op}(Tensor[] tensors, int[] counts, int body, float arg0, float arg1, ScalarType out_dtype) -> Tensor")

    def general(self, tensors: list[Tensor], *rest: Any) -> Tensor:
        self.fallbacks += 1
        if self.raises is not None:
            raise self.raises
        return tensors[0] + 1

    def stream(self, device: int, out: Any) -> int:
        out[0] = 5
        return 0

    def encode(self, at: int, kind: int, rank: int, begin: int, *rest: Any) -> int:
        self.encoded.append((at, kind, rank, begin, *[(ctypes.c_uint64 * rank).from_address(r)[:] for r in rest[:2]], *rest[4:]))
        return self.refuses_maps

    def launch(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        step = self.plan.steps[len(self.launched) % len(self.plan.steps)]
        kinds = self.direct.parameters(list(step.compiled.src.signature.values()), [len(d.shape) for _, d in step.descs])
        at = {
            step.args[position]: ctypes.c_uint64.from_address(params[i]).value
            for i, ((position, *_), kind) in enumerate(kinds)
            if kind == "pointer"
        }
        known = self.direct._Config.from_address(config)
        self.launched.append((function, known.stream, tuple(known.grid), at))
        return self.errors.pop(0) if self.errors else 0

    def remember(self, tensors: list[Tensor]) -> bool:
        key = self.native.key_of(tensors, COUNTS, 3, 0.5, -0.25, BF16)
        return bool(self.native.remember(key, self.plan, self.plan.positions(COUNTS), None, self.library, Driver()))

    def known(self) -> int:
        self.library.moefuse_known.restype = ctypes.c_int64
        return int(self.library.moefuse_known())


def call(tensors: list[Tensor], counts: list[int] = COUNTS, body: int = 3, arg0: float = 0.5, out_dtype: torch.dtype = BF16) -> Tensor:
    out: Tensor = torch.ops.moefuse_direct_test.infer(tensors, counts, body, arg0, -0.25, out_dtype)
    return out


def tensors(tokens: int = T, ids: torch.dtype = torch.int64) -> list[Tensor]:
    x, weights = torch.zeros(tokens, H, dtype=BF16), torch.zeros(tokens, K, dtype=BF16)
    return [x, torch.zeros(tokens, K, dtype=ids), weights, torch.zeros(E, 2 * INNER, H, dtype=BF16), torch.zeros(E, H, INNER, dtype=BF16)]


@pytest.fixture(scope="module")
def everything() -> World:
    return World()


@pytest.fixture
def world(everything: World) -> World:
    everything.library.moefuse_forget()
    everything.launched.clear()
    everything.errors.clear()
    everything.encoded.clear()
    everything.plan, everything.refuses_maps = everything.vectors, 0
    everything.fallbacks = 0
    everything.raises = None
    everything.memory.room, everything.memory.full = 1 << 30, False
    everything.memory.alive.clear()
    return everything


def test_a_known_call_is_launched(world: World) -> None:
    """Every kernel with its grid, on the current stream, with the addresses of this call; the output has the plan's shape and dtype."""
    assert world.remember(tensors())
    for _ in range(2):  # the second call has other addresses
        world.launched.clear()
        args = tensors()
        out = call(args)
        assert (out.shape, out.dtype, out.stride()) == ((T, H), BF16, (H, 1))
        assert world.fallbacks == 0
        assert [(f, s, g) for f, s, g, _ in world.launched] == [(77, 5, step.grid) for step in world.plan.steps]
        for _, _, _, at in world.launched:
            for name, tensor in (("x", args[0]), ("ids", args[1]), ("w_in", args[3]), ("w_out", args[4]), ("out", out)):
                assert at.get(name, tensor.data_ptr()) == tensor.data_ptr(), name
        first, last = world.launched[0][3], world.launched[-1][3]
        assert first["h"] == last["h"] not in (0, out.data_ptr())


def test_tensor_maps(world: World) -> None:
    """A map is made before the launches where its array begins elsewhere than in the last call, and what the driver refuses is Python's."""
    world.plan = world.tiles
    args = tensors()
    assert world.remember(args)
    out = call(args)
    assert (out.shape, world.fallbacks) == ((T, H), 0)
    shown = [d for step in world.plan.steps for _, d in step.descs]
    assert shown
    assert len(world.encoded) == len(shown)
    begins = {"w_in": args[3].data_ptr(), "w_up": args[3].data_ptr(), "w_out": args[4].data_ptr(), "x": args[0].data_ptr()}
    for d, (at, kind, rank, begin, shape, strides, *rest) in zip(shown, world.encoded, strict=True):
        assert at % 64 == 0
        assert (kind, rank, begin) == (9, len(d.shape), begins.get(d.array, begin))
        assert (shape, strides[:-1]) == ([*reversed(d.shape)], [2 * s for s in reversed(d.strides[:-1])])
        assert (rest[0], *rest[2:]) == (0, 2, 0)
    world.encoded.clear()
    other = tensors()
    call([*args[:3], args[3], other[4]])
    assert other[4].data_ptr() in [made[3] for made in world.encoded]
    assert args[3].data_ptr() not in [made[3] for made in world.encoded]
    world.refuses_maps = 1
    world.launched.clear()
    call(tensors())
    assert (world.fallbacks, world.launched) == (1, [])


def test_what_is_unknown_goes_on(world: World) -> None:
    """Another size, dtype, stride, alignment, option, or number of lists: each is another plan's business, or nobody's."""
    assert world.remember(tensors())
    strided = tensors()
    strided[0] = torch.zeros(H, T, dtype=BF16).t()
    shifted = tensors()
    shifted[0] = torch.zeros(T * H + 1, dtype=BF16)[1:].view(T, H)
    calls = [
        lambda: call(tensors(4)),
        lambda: call(tensors(ids=torch.int32)),
        lambda: call(strided),
        lambda: call(shifted),
        lambda: call(tensors(), body=4),
        lambda: call(tensors(), arg0=0.75),
        lambda: call(tensors(), out_dtype=torch.float32),
        lambda: call(tensors(), counts=[0, 1, 1, 0, 0, 0]),
        lambda: call([*tensors(), *(torch.zeros(1) for _ in range(20))]),
    ]
    for i, other in enumerate(calls, 1):
        assert torch.equal(other(), torch.ones(4 if i == 1 else T, H, dtype=BF16))
        assert world.fallbacks == i
    assert not world.launched


def test_many_plans_side_by_side(world: World) -> None:
    """One plan per number of tokens, as a server has them."""
    for tokens in range(1, 40):
        assert world.remember(tensors(tokens))
    assert world.known() == 39
    for tokens in range(1, 40):
        call(tensors(tokens))
    assert world.fallbacks == 0
    call(tensors(40))
    assert world.fallbacks == 1


def test_a_launch_that_fails(world: World) -> None:
    """Declined before anything ran: the Python op takes over. Later: an error that names the code."""
    assert world.remember(tensors())
    world.errors[:] = [2]
    call(tensors())
    assert world.fallbacks == 1
    world.launched.clear()
    world.errors[:] = [0, 719]
    with pytest.raises(RuntimeError):
        call(tensors())
    assert world.fallbacks == 1


def test_what_stays_in_python(world: World) -> None:
    """float32 depends on the TF32 switch; a dtype that has no number cannot be a key."""
    from moefuse.tuning.problem import Problem

    plan, _ = make_plan(Problem(T, K, E, H, INNER, H, "merged", "float32"), None)
    assert not world.native.remember((1, 2), plan, plan.positions(COUNTS), None, world.library)
    assert not world.native.remember(None, world.plan, world.plan.positions(COUNTS), None, world.library)
    odd = tensors()
    odd[0] = odd[0].to(torch.complex64)
    assert world.native.key_of(odd, COUNTS, 3, 0.5, 0.0, BF16) is None
    assert world.known() == 0


def test_separate_parameters(world: World) -> None:
    """A table of addresses takes the place of a list; the same call over other Parameters is another call."""
    separate = [E, 0, E, 0, 0, 0]

    def arguments() -> list[Tensor]:
        many = [torch.zeros(2 * INNER, H, dtype=BF16) for _ in range(E)] + [torch.zeros(H, INNER, dtype=BF16) for _ in range(E)]
        return [*tensors()[:3], *many]

    first, second = arguments(), arguments()
    tables = {3: torch.zeros(E, dtype=torch.int64), 5: torch.zeros(E, dtype=torch.int64)}
    key = world.native.key_of(first, separate, 3, 0.5, -0.25, BF16)
    assert world.native.remember(key, world.plan, world.plan.positions(separate), tables, world.library, Driver())
    call(first, separate)
    assert world.fallbacks == 0
    up, down = world.launched[0][3], world.launched[-1][3]
    assert (up["w_in"], down["w_out"]) == (tables[3].data_ptr(), tables[5].data_ptr())
    call(second, separate)
    assert world.fallbacks == 1
    call([*first[:3], *first[3 : 3 + E - 1], second[3], *first[3 + E :]], separate)
    assert world.fallbacks == 2


@pytest.mark.parametrize("takes", [True, False])
def test_handing_over(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is handed over once, or once for each set of Parameters; one that C++ does not take is not offered again."""
    from moefuse.kernels.triton.host.plan import Separate
    from moefuse.kernels.triton.launch import dispatcher
    from moefuse.tuning.problem import Config, Problem, Vectors

    offered: list[Any] = []
    monkeypatch.setattr(dispatcher, "remember", lambda key, plan, positions, tables: offered.append(plan) or takes)  # type: ignore[func-returns-value]
    problem, config = Problem(T, K, E, H, INNER, H, "merged", "bfloat16"), Config(0, Vectors(4, 64), Vectors(4, 32))
    how = (3, 0.5, -0.25, BF16)
    many = [
        *tensors()[:3],
        *(torch.zeros(2 * INNER, H, dtype=BF16) for _ in range(E)),
        *(torch.zeros(H, INNER, dtype=BF16) for _ in range(E)),
    ]

    def offer(plan: Any, packed: Any, addresses: list[int]) -> None:
        if not plan.told:  # as ``provide/experts.py`` does
            plan.hand_over(packed, addresses)

    stacked, _ = make_plan(problem, config)
    stacked.direct = object()
    offer(stacked, (tensors(), COUNTS, *how), list(range(5)))
    assert not offered  # nothing is compiled yet
    stacked.ready = True
    for _ in range(3):
        offer(stacked, (tensors(), COUNTS, *how), list(range(5)))
    assert len(offered) == 1

    apart, _ = make_plan(problem, config, separate=True)
    apart.ready = True
    offered.clear()
    for first in (100, 200):
        every = list(range(first, first + len(many)))
        offer(apart, (many, [E, 0, E, 0, 0, 0], *how), every)  # it has no tables yet
        apart.known[tuple(every[3:])] = Separate({}, [])
        for _ in range(2):
            offer(apart, (many, [E, 0, E, 0, 0, 0], *how), every)
    assert len(offered) == (2 if takes else 1)


def test_nothing_leaks(world: World) -> None:
    """Arguments and results are released: a tensor that only the op saw is gone after it."""
    assert world.remember(tensors())
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
def test_an_allocation_that_fails(world: World, room: int) -> None:
    """Out of memory has its type and text, by which programs try a smaller batch, and holds on to nothing: what was already allocated and
    the arguments would be missing in that next try. Both were lost, and the text was one of moefuse's."""
    args = tensors()
    assert world.remember(args)
    before = counts_of(args)
    for _ in range(3):
        world.memory.room = room
        with pytest.raises(torch.OutOfMemoryError, match=NO_ROOM):
            call(args)
    assert world.fallbacks == 0
    assert not world.memory.alive
    assert counts_of(args) == before
    world.memory.room = 2
    assert call(args).shape == (T, H)


def test_a_launch_that_fails_keeps_nothing(world: World) -> None:
    """Neither the arguments, which were never released, nor the output."""
    args = tensors()
    assert world.remember(args)
    before = counts_of(args)
    for errors in ([0, 719], [2]):
        world.launched.clear()
        world.errors[:] = errors
        if len(errors) == 2:
            with pytest.raises(RuntimeError, match="CUDA error 719"):
                call(args)
        else:
            call(args)
    assert world.fallbacks == 1
    assert not world.memory.alive
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
def test_exceptions_of_the_python_op(world: World, error: Exception, kind: type[Exception], text: str) -> None:
    """They pass through libtorch's C interface, which keeps their text. Each was a RuntimeError that said "a call into libtorch failed"."""
    args = tensors()
    before = counts_of(args)
    world.raises = error
    with pytest.raises(kind, match=text) as raised:
        call(args)
    assert type(raised.value) is kind
    assert "): general\n" in str(raised.value)  # where it was raised
    assert world.fallbacks == 1
    world.raises = error.__traceback__ = None
    del raised
    assert counts_of(args) == before


def test_a_libtorch_that_keeps_no_text(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11: the Python op keeps the text of its exception, and what cannot be allocated is out of memory. An interrupt says that it
    was one."""
    # Another file is another library, with a table of its own.
    copy = Path(shutil.copy(world.library._name, tmp_path))
    monkeypatch.setattr(_torch_private, "build_cpp", lambda source, folder: copy)
    world.define("older")
    world.define("general_older")
    world.ops.impl("general_older", _torch_private.failures.told(world.general), "CPU")
    library = world.native.load([_torch_private.failures.what(), *world.functions[1:]], NAME, "CPU", "older", "general_older", 0)

    def older() -> Tensor:
        return torch.ops.moefuse_direct_test.older(tensors(), COUNTS, 3, 0.5, -0.25, BF16)  # type: ignore[no-any-return]

    kinds: list[tuple[BaseException, type[Exception], str]] = [
        (torch.OutOfMemoryError(NO_ROOM), torch.OutOfMemoryError, f"^{NO_ROOM}$"),
        (ValueError("of 3 experts"), ValueError, "^of 3 experts$"),
        (KeyboardInterrupt(), RuntimeError, "^KeyboardInterrupt: $"),
    ]
    for error, kind, text in kinds:
        world.raises = error
        with pytest.raises(kind, match=text):
            older()
    assert world.fallbacks == len(kinds)
    monkeypatch.setattr(world, "library", library)
    assert world.remember(tensors())
    world.memory.room = 0
    with pytest.raises(torch.OutOfMemoryError, match="moefuse::experts: out of memory"):
        older()


def test_a_function_that_this_libtorch_lacks() -> None:
    """Without the text of failures everything works; any other function is needed."""
    assert all(_torch_private.libtorch_interface(())[1:])
    with pytest.raises(AttributeError):
        _torch_private.libtorch_functions(["torch_no_such_function"])
