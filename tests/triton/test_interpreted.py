"""What the Triton kernels compute, at tiny sizes in Triton's interpreter, against the reference in double precision.

The interpreter multiplies the raw bits of bfloat16 in ``tl.dot``, so tiles run in float16 and float32 here; bfloat16 runs on a GPU.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from tests.cpu.ops_case import Case, reference, to

pytestmark = [
    pytest.mark.sampled(6),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]


def call(case: Case, config: Any = None, args: list[Any] | None = None, poison: bool = True) -> torch.Tensor:
    """One call with the given configuration (None: the one it would take); every buffer begins as NaN."""
    from moefuse.kernels.triton.host import plan as plans

    given = case.call(args)
    plan = plans.Plan(given, config)
    empty = torch.empty

    def poisoned(*size: Any, **more: Any) -> torch.Tensor:
        t = empty(*size, **more)
        return t.fill_(255) if t.dtype == torch.uint8 else t.fill_(float("nan")) if t.is_floating_point() else t

    with pytest.MonkeyPatch.context() as patch:
        if poison:
            patch.setattr(torch, "empty", poisoned)
        return plan.run(given)


def check(case: Case, config: Any = None, args: list[Any] | None = None) -> None:
    """The error is within twice the reference's own, in the same dtype, plus the roundings that the order of sums explains."""
    args = case.args() if args is None else args
    out = call(case, config, args)
    options = case.options
    exact = reference(to(args, torch.float64), **{**options, "out_dtype": None})
    own = reference(args, **options)
    assert out.shape == own.shape
    assert out.dtype == own.dtype
    if not out.numel():
        return
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(out.double()), finite)
    error = float((out.double() - exact)[finite].abs().max()) if finite.any() else 0.0
    own_error = float((own.double() - exact)[finite].abs().max()) if finite.any() else 0.0
    scale = float(exact[finite].abs().max()) if finite.any() else 0.0
    # Sums in another order differ by a few roundings of the type they run in; of a few dozen numbers the reference may have had none.
    roundings = 8 if out.dtype in (torch.float32, torch.float64) else 1
    assert error <= 2 * own_error + roundings * torch.finfo(out.dtype).eps * max(scale, 1.0)


def tiles(bm: int = 16, **more: Any) -> Any:
    from moefuse.tuning.problem import Config, Tiles

    part = Tiles(**{"bn": 16, "bk": 16, "warps": 4, "stages": 1, **more})
    return Config(bm, part, part)


def vectors(**more: Any) -> Any:
    from moefuse.tuning.problem import Config, Vectors

    part = Vectors(**{"bn": 4, "bk": 8, "at": 2, **more})
    return Config(0, part, part)


SMALL = Case(tokens=5, hidden=24, inter=20, hidden_out=17, experts=4, top_k=3, dtype=torch.float32)


STORAGES: list[dict[str, bool]] = [{}, {"transposed": True}, {"separate": True}]


@pytest.mark.parametrize(
    "flags",
    [
        {"desc": True},
        {"desc": True, "rows_desc": True},
        {"desc": True, "join": True},
        {"tail": True},
        {"persistent": True},
        {"persistent": True, "flatten": True},
        {"desc": True, "join": True, "tail": True, "persistent": True, "rows_desc": True},
        {"store": 1},
        {"store": 2, "tail": True},
        {"store": 4, "swap": True},
    ],
    ids=lambda flags: "+".join(flags) if isinstance(flags, dict) else None,
)
@pytest.mark.parametrize("storage", STORAGES[:2], ids=["stacked", "in-out"])
@pytest.mark.parametrize("up_first", [False, True])
def test_forms_of_a_tile(flags: dict[str, int], storage: dict[str, bool], up_first: bool) -> None:
    """Descriptors need rows of whole 16 bytes, so the sizes are multiples of four; none is a multiple of the tile."""
    case = SMALL.with_(tokens=40, hidden=40, inter=20, hidden_out=28, up_first=up_first, **storage)
    check(case, tiles(32, **flags))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, too, take descriptors of experts anywhere in memory."""
    from moefuse.kernels.triton.host import plan_tiles as builder

    monkeypatch.setattr(builder, "APART_ROWS", 0)


EVERYTHING = {"desc": True, "tail": True, "persistent": True, "rows_desc": True, "store": 2}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("flags", [{"desc": True}, EVERYTHING], ids=["desc", "everything"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
def test_descriptors_of_experts_apart(gating: str, transposed: bool, flags: dict[str, Any]) -> None:
    """No size is a multiple of the tile; what lies around an expert's own numbers is NaN."""
    from moefuse.kernels.triton.host import plan as plans

    case = SMALL.with_(tokens=40, hidden=40, inter=20, hidden_out=28, gating=gating, separate=True)
    args = case.args()
    for at in (3, 4, 5):
        for e, w in enumerate(args[at]):
            room = torch.full((3, *(w.t() if transposed else w).shape), float("nan"))
            room[1] = w.t() if transposed else w
            args[at][e] = room[1].t() if transposed else room[1]
    assert plans.Plan(case.call(args), tiles(32, **flags)).apart == {"w_in", "w_up", "w_out"}
    check(case, tiles(32, **flags), args)


@pytest.mark.usefixtures("apart")
def test_one_list_apart_and_one_stacked() -> None:
    """Both are reached as experts apart."""
    case = SMALL.with_(tokens=40, hidden=40, inter=20, hidden_out=28, gating="separate", separate=True)
    args = case.args()
    args[4] = [torch.stack(args[4])]
    check(case, tiles(32, desc=True), args)


@pytest.mark.usefixtures("apart")
def test_experts_far_apart() -> None:
    """More than one leading dimension of the descriptor can go. Of 16 GiB of addresses a few pages are used."""
    from moefuse.kernels.triton.host import operands

    case = SMALL.with_(tokens=40, hidden=40, inter=20, hidden_out=28, gating="separate", separate=True)
    args = case.args()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    far = torch.frombuffer(mmap.mmap(-1, operands.STEPS * operands.STEP + (1 << 16), flags=flags), dtype=torch.float32)
    args[3][0], args[3][2] = far[-800:].view(20, 40).copy_(args[3][0]), far[:800].view(20, 40).copy_(args[3][2])
    assert int(operands.steps_table(args[3])[1].max()) >= operands.STEPS
    check(case, tiles(32, desc=True), args)


@pytest.mark.parametrize("tokens", [7, 300])
def test_the_order_is_a_stable_sort(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """One kernel for few slots and three for many give the same arrays as torch's stable sort."""
    from moefuse.kernels.triton.host import plan as plans, plan_tiles as builder
    from moefuse.runtime.routing import sort_slots

    case = SMALL.with_(tokens=tokens, experts=5, low_id=-2, high_id=7)
    for at_once in (8192, 0):
        monkeypatch.setattr(builder, "SORT_AT_ONCE", at_once)
        call = case.call()
        ids, plan = call.ids, plans.Plan(call, tiles())
        space = torch.full((plan.workspace.size,), 255, dtype=torch.uint8)
        views = plan.workspace.views(space)
        at = {**views, "ids": ids}
        for step in plan.steps[: 1 if at_once else 3]:
            step.run([at[name] for name in step.names])
        order, offsets = sort_slots(ids, case.experts)
        assert torch.equal(views["order"].long(), order)
        assert torch.equal(views["offsets"].long(), offsets)
        rows = (offsets[1:] - offsets[:-1]).tolist()
        counts = [-(-n // 16) for n in rows]
        expected = [(e, int(offsets[e]) + 16 * j, min(rows[e] - 16 * j, 16), j, n) for e, n in enumerate(counts) for j in range(n)]
        count, *counters = views["num_tiles"].tolist()
        assert counters == [0, 0]
        found = views["tiles"].view(5, -1)[:, :count].t().tolist()
        assert [tuple(t) for t in found] == expected
