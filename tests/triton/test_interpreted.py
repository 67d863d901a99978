"""What the Triton kernels compute, at tiny sizes in Triton's interpreter, against the reference in double precision.

The interpreter multiplies the raw bits of bfloat16 in ``tl.dot``, so tiles run in float16 and float32 here; bfloat16 runs on a GPU.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.cpu.ops_case import Case, every_body, reference, tensors, to

pytestmark = [
    pytest.mark.sampled(6),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
]

TILE_BODIES = [c for c in every_body() if c.activation in ("silu", "swiglu_oai", "gelu", "relu2")]


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


@pytest.mark.parametrize("case", every_body(), ids=lambda c: f"{c.activation}-{c.gating}-{c.up_first}")
def test_every_body_as_vectors(case: Case) -> None:
    check(case.with_(tokens=3, dtype=torch.float32), vectors())


@pytest.mark.parametrize("case", TILE_BODIES, ids=lambda c: f"{c.activation}-{c.gating}-{c.up_first}")
def test_bodies_as_tiles(case: Case) -> None:
    check(case.with_(tokens=3, dtype=torch.float32), tiles())


STORAGES: list[dict[str, bool]] = [{}, {"transposed": True}, {"separate": True}]


@pytest.mark.parametrize("storage", STORAGES, ids=["stacked", "in-out", "separate"])
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
@pytest.mark.parametrize("form", ["vectors", "parts", "tiles", "swap"])
def test_every_storage(gating: str, storage: dict[str, bool], form: str) -> None:
    """Stacked and separate Parameters (a table of addresses), stored out-in and in-out, with biases."""
    config = {"vectors": vectors(), "parts": vectors(parts=3), "tiles": tiles(), "swap": tiles(swap=True)}[form]
    check(SMALL.with_(gating=gating, **storage), config)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """float64 has no tiles; the rules send it to the vectors."""
    check(SMALL.with_(dtype=dtype))
    check(SMALL.with_(dtype=dtype, tokens=12))


FORMS = {"vectors": vectors(), "parts": vectors(parts=2), "tiles": tiles(), "swap": tiles(swap=True)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_weights_on_the_input(form: str) -> None:
    check(SMALL.with_(weight_on_input=True), FORMS[form])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "swap"])
def test_output_dtype(form: str) -> None:
    check(SMALL.with_(dtype=torch.float16, out_dtype=torch.float32), FORMS[form])


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"tokens": 1}, {"experts": 1, "high_id": 1}, {"top_k": 1}, {"hidden": 1}, {"inter": 1}])
def test_sizes_at_the_edge(sizes: dict[str, int]) -> None:
    check(SMALL.with_(**sizes), vectors())
    check(SMALL.with_(**sizes), tiles())


def test_no_valid_id() -> None:
    for config in (vectors(), vectors(parts=2), tiles()):
        out = call(SMALL.with_(low_id=-3, high_id=0), config)
        assert not out.any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_stays_in_its_token(form: str) -> None:
    args = SMALL.args()
    args[0][2] = float("nan")
    check(SMALL, FORMS[form], args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["parts", "tiles"])
def test_unused_experts_and_invalid_weights_are_not_read(form: str) -> None:
    """NaN in experts that nobody chose, and in routing weights of invalid ids, changes nothing."""
    case, config = SMALL.with_(low_id=-1, high_id=2), FORMS[form]
    args = case.args()
    clean = call(case, config, args)
    args[1][0, 0] = 99
    want = call(case, config, args)
    args[2][args[1] < 0] = float("nan")
    args[2][0, 0] = float("nan")
    for t in tensors(args[3:]):
        t[2:] = float("nan")
    assert torch.equal(call(case, config, args), want)
    assert torch.equal(clean[1:], want[1:])


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
            step.first([at[name] for name in step.names])
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


@given(
    tokens=st.integers(0, 12),
    hidden=st.integers(1, 24),
    inter=st.integers(1, 24),
    hidden_out=st.integers(1, 24),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 5),
    gating=st.sampled_from(["merged", "interleaved", "separate", "plain"]),
    storage=st.sampled_from(STORAGES),
    bias=st.booleans(),
    on_input=st.booleans(),
    form=st.sampled_from(["chosen", "tiles", "swap", "vectors", "parts"]),
    seed=st.integers(0, 99),
)
def test_any_sizes(form: str, storage: dict[str, bool], on_input: bool, **sizes: Any) -> None:
    case = Case(dtype=torch.float32, weight_on_input=on_input, **storage, **sizes)
    configs = {"chosen": None, "tiles": tiles(), "swap": tiles(swap=True), "vectors": vectors(), "parts": vectors(parts=2)}
    check(case, configs[form])
