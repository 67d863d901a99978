"""``experts`` differentiated by the Triton kernels, at tiny sizes in Triton's interpreter, against autograd of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from moefuse.ops import autograd
from moefuse.ops.meaning.call import ExpertsCall
from tests.cpu.ops_case import (
    Case,
    assert_as_exact,
    assert_equally_finite,
    every_body,
    leaves,
    not_finite,
    oracle_grads,
    reference,
    run,
    tensors,
    to,
)  # fmt: skip
from tests.triton.interpreted_case import TIER, interpreted

pytestmark = [
    pytest.mark.sampled(6),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy, about the NaN of these tests
    pytest.mark.usefixtures("ran"),
]
ALL = ("experts_forward", "experts_backward_rows", "experts_backward_in", "experts_backward_out")
SMALL = Case(tokens=5, hidden=24, inter=20, hidden_out=17, experts=4, top_k=3, dtype=torch.float32)
STORAGES: list[dict[str, bool]] = [{}, {"transposed": True}, {"separate": True}]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from moefuse.kernels.triton.provide import training

    monkeypatch.setattr(autograd, "IN_PARTS", ("cpu",))
    with interpreted(training, ALL) as names:
        yield names


def pull(out: Tensor) -> Tensor:
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.dtype)


def results(function: Any, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradient of every input, in the order of ``leaves``, of the same values in ``dtype``."""
    args = case.args() if dtype == case.dtype else to(case.args(), dtype)
    for t in leaves(args):
        t.requires_grad_()
    options = case.options if dtype == case.dtype else {**case.options, "out_dtype": None}
    out = function(args, **options)
    return [out.detach(), *oracle_grads(out, leaves(args), pull(out.to(case.options["out_dtype"] or case.dtype)).to(out.dtype))]


def check(case: Case) -> None:
    """The error is within twice autograd's own in the same dtype, plus the roundings that the order of sums explains."""
    every = zip(results(run, case, case.dtype), results(reference, case, case.dtype), results(reference, case, torch.float64), strict=True)
    for i, (got, own, exact) in enumerate(every):
        assert (got.shape, got.dtype) == (own.shape, own.dtype)
        assert got.isfinite().all(), i
        if not got.numel():
            continue
        dtype = case.dtype if case.held else got.dtype
        roundings = 16 if dtype in (torch.float32, torch.float64) else 2
        floor = roundings * torch.finfo(dtype).eps * max(float(exact.abs().max()), 1.0)
        error, allowed = (float((t.double() - exact).abs().max()) for t in (got, own))
        assert error <= 2 * allowed + floor, f"result {i}: error {error:.3g}, autograd's own {allowed:.3g}"


@pytest.mark.parametrize("case", every_body(), ids=lambda c: f"{c.activation}-{c.gating}-{c.up_first}")
def test_every_body(case: Case, ran: list[str]) -> None:
    """In double precision, so a wrong derivative has nowhere to hide."""
    check(case.with_(tokens=4))
    assert ran == [ALL[0], ALL[1], ALL[2], ALL[2], ALL[3]]  # once for the tokens, once for their weights


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "case",
    [c for c in every_body() if c.activation in ("relu", "relu2", "swiglu_oai", "silu_clamp")],
    ids=lambda c: f"{c.activation}-{c.gating}-{c.up_first}",
)
def test_a_gradient_that_is_not_finite(case: Case, value: float) -> None:
    """Zero where the activation is off, as in eager."""
    c = case.with_(tokens=4, inter=9, dtype=torch.float32)
    args = c.args(requires_grad=True)
    out, want = run(args, **c.options), reference(args, **c.options)
    ours = torch.autograd.grad(out, leaves(args), not_finite(out, value))
    assert_equally_finite(list(ours), oracle_grads(want, leaves(args), not_finite(want, value)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES, ids=["stacked", "in-out", "separate"])
@pytest.mark.parametrize("gating", ["merged", "interleaved", "separate", "plain"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_every_storage(gating: str, storage: dict[str, bool], on_input: bool) -> None:
    check(SMALL.with_(gating=gating, weight_on_input=on_input, **storage))


LIBRARY = [{}, {"transposed": True}, {"gating": "interleaved"}, {"gating": "plain"}, {"weight_on_input": True}, {"bias": True}]


@pytest.mark.parametrize("needed", ["everything", "weights only", "input only"])
@pytest.mark.parametrize(
    "changes", [{}, {"transposed": True}, {"gating": "interleaved"}, {"gating": "plain"}, {"weight_on_input": True}], ids=str
)
def test_products_of_the_library(changes: dict[str, Any], needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """grouped_mm instead of our own products; what it leaves unwritten is NaN."""
    from moefuse.kernels.triton import config
    from moefuse.kernels.triton.provide import library as grouped_mm

    monkeypatch.setattr(grouped_mm, "DEVICES", ("cpu",))
    monkeypatch.setattr(grouped_mm, "DTYPES", (torch.float32,))
    case = SMALL.with_(**{"inter": 16, "hidden_out": 32, "tokens": 11, "bias": False, **changes})
    skip = {"everything": (), "weights only": (0,), "input only": (1, 2, 3)}[needed]
    library, calls = torch.nn.functional.grouped_mm, []

    def poisoned(a: Any, b: Any, offs: Any) -> Tensor:
        out = library(a, b, offs=offs)
        if out.dim() == 2:
            out[int(offs[-1]) :] = float("nan")
        calls.append(out.dim())
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", poisoned)
    found = []
    for preferred in ("own", "library"):
        monkeypatch.setattr(config, "PRODUCTS", preferred)
        args = case.args()
        wanted = [t.requires_grad_() for i, t in enumerate(leaves(args)) if i not in skip]
        out = run(args, **case.options)
        found.append([out.detach(), *torch.autograd.grad(out, wanted, pull(out.detach()))])
        assert [g.stride() for g in found[-1][1:]] == [t.stride() for t in wanted]
    # The gradient of routing weights on the input takes that of the rows, as x does. A bias keeps the library out of forward only.
    backward = {"everything": 4, "weights only": 4 if case.weight_on_input else 3, "input only": 2}[needed]
    assert len(calls) == backward + (0 if case.bias else 2)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES, ids=["stacked", "in-out", "separate"])
@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_gradients_of_weights_from_sorted_copies(
    gating: str, storage: dict[str, bool], on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both factors through descriptors; tokens are copied once for gate and up."""
    from moefuse.kernels.triton.host import wgrad
    from moefuse.kernels.triton.provide import library as grouped_mm
    from moefuse.tuning.problem import Tiles

    copies: list[tuple[int, ...]] = []
    gathered = grouped_mm.gathered

    def noted(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        copies.append(tuple(x.shape))
        return gathered(x, *rest, **named)

    monkeypatch.setattr(wgrad, "grad_tiles", lambda *a: (16, Tiles(32, 16, 4, 1, 2)))
    monkeypatch.setattr(grouped_mm, "gathered", noted)
    case = SMALL.with_(tokens=13, inter=16, hidden_out=36, gating=gating, weight_on_input=on_input, **storage)
    check(case)
    assert copies == [(13, case.hidden), (13, case.hidden_out)]
    copies.clear()
    monkeypatch.setattr(wgrad, "HALVED", 0)
    check(case)
    assert len(copies) == 2, "halves are not of whole tiles here"
    copies.clear()
    wide = case.with_(hidden=512, hidden_out=1024, experts=3)
    check(wide)
    x = [(13, 256)] * 2 if gating == "merged" else [(13, 512)]
    out = [(13, 512)] * 2
    assert copies == ([(13, 512), (13, 1024)] if storage.get("separate") else x + out), "one tensor of all experts is made by halves"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_dtypes(dtype: torch.dtype, on_input: bool) -> None:
    check(SMALL.with_(dtype=dtype, weight_on_input=on_input, tokens=20))
    check(SMALL.with_(dtype=dtype, weight_on_input=on_input, out_dtype=torch.float32))


@pytest.mark.parametrize("storage", STORAGES, ids=["stacked", "in-out", "separate"])
@pytest.mark.parametrize("gating", ["merged", "separate"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_weights_in_float32(gating: str, storage: dict[str, bool], on_input: bool) -> None:
    """What autocast asks for: rounded to 16 bits in the tile, through pointers and addresses; their gradients stay in float32."""
    case = SMALL.with_(gating=gating, weight_on_input=on_input, held=torch.float32, **storage)
    check(case.with_(dtype=torch.float16, out_dtype=torch.float32))


@pytest.mark.parametrize("storage", STORAGES, ids=["stacked", "in-out", "separate"])
@pytest.mark.parametrize("flags", [{"desc": True}, {"desc": True, "rows_desc": True, "persistent": True, "store": 1}], ids=str)
def test_weights_in_float32_through_descriptors(flags: dict[str, Any], storage: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of weights in float32 beside rows of 16 bits: their descriptors have other strides in bytes."""
    from moefuse.kernels.triton.host import linear
    from moefuse.tuning.problem import Tiles

    monkeypatch.setattr(linear, "held_sizes", lambda *a: Tiles(16, 16, 4, 1, 2, **flags))
    case = SMALL.with_(tokens=13, hidden=32, inter=16, hidden_out=48, bias=False, held=torch.float32, dtype=torch.float16)
    check(case.with_(out_dtype=torch.float32, **storage))


def test_inference_with_weights_in_float32() -> None:
    """No plan is made of it: the products of training."""
    from moefuse.kernels.triton.provide import experts

    case = SMALL.with_(held=torch.float32, dtype=torch.float16)
    planned = len(experts._PLANS)
    assert_as_exact(
        experts.experts(case.call()), *(reference(args, **case.options) for args in (case.args(), to(case.args(), torch.float64)))
    )
    assert len(experts._PLANS) == planned


def test_gradients_in_float32_are_not_rounded() -> None:
    """Beside rows of 16 bits the sums over rows are stored as they are: most are no numbers of 16 bits."""
    case = SMALL.with_(dtype=torch.float16, held=torch.float32, tokens=20)
    for grad in results(run, case, case.dtype)[3:]:
        assert grad.dtype == torch.float32
        assert float((grad != grad.half().float()).double().mean()) > 0.5


EDGES: list[dict[str, int]] = [{"tokens": 0}, {"tokens": 1}, {"experts": 1, "high_id": 1}, {"top_k": 1}, {"hidden": 1}, {"inter": 1}]
EDGES += [{"low_id": -3, "high_id": 0}]


@pytest.mark.parametrize("sizes", EDGES, ids=str)
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_sizes_at_the_edge(sizes: dict[str, int], on_input: bool) -> None:
    """No slots, one, no valid id, sizes of one."""
    check(SMALL.with_(weight_on_input=on_input, **sizes))


def test_weights_that_share_no_strides() -> None:
    """Separate Parameters, one of them stored the other way; its gradient is too."""
    args = SMALL.with_(separate=True).args()
    args[3][1] = args[3][1].t().contiguous().t()
    for t in leaves(args):
        t.requires_grad_()
    out, want = run(args), reference(args)
    torch.testing.assert_close(out, want)
    ours = torch.autograd.grad(out, leaves(args), pull(out))
    torch.testing.assert_close(list(ours), oracle_grads(want, leaves(args), pull(out)))
    assert [g.stride() for g in ours] == [p.stride() for p in leaves(args)]


@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
@pytest.mark.parametrize("index", range(8))
def test_only_what_is_asked_for(index: int, on_input: bool) -> None:
    """Each input alone gets the gradient that it gets with the others."""
    case = SMALL.with_(gating="separate", weight_on_input=on_input)
    every = results(run, case, case.dtype)[1:]
    args = case.args()
    leaf = leaves(args)[index].requires_grad_()
    out = run(args, **case.options)
    (one,) = torch.autograd.grad(out, leaf, pull(out))
    assert torch.equal(one, every[index])


def test_untouched_experts_get_zeros_and_are_not_read() -> None:
    """NaN in an expert that nobody chose and in routing weights of invalid ids reaches no gradient."""
    case = SMALL.with_(experts=6, low_id=-1, high_id=3)
    args = case.args()
    args[2][args[1] < 0] = float("nan")
    for t in tensors(args[3:]):
        t[3:] = float("nan")
    for t in leaves(args):
        t.requires_grad_()
    out = run(args)
    grads = torch.autograd.grad(out, leaves(args), pull(out))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][args[1] < 0].any()
    assert all(not g[3:].any() for g in grads[2:])


def test_an_expanded_gradient() -> None:
    """sum() hands back a gradient with stride 0."""
    args = SMALL.args(requires_grad=True)
    ours = torch.autograd.grad(run(args).sum(), leaves(args))
    torch.testing.assert_close(ours, torch.autograd.grad(reference(args).sum(), leaves(args)))


def test_forward_equals_the_inference_kernels_reference_and_saves_zeros_for_dead_rows() -> None:
    """What is saved: pre-activation, order and offsets in the layout that the CPU's kernels use, so either backward may follow."""
    from moefuse.kernels.triton.provide import training
    from moefuse.runtime import cpu

    for gating in ("merged", "interleaved", "separate", "plain"):
        case = SMALL.with_(gating=gating)
        call = case.call()
        out, h, order, offsets = training.experts_forward(call)
        want, want_h, want_order, want_offsets = cpu.experts_forward(call)
        assert torch.equal(order, want_order)
        assert torch.equal(offsets, want_offsets)
        torch.testing.assert_close(h, want_h)
        torch.testing.assert_close(out, want)
        assert not h[int(offsets[-1]) :].any()


def test_bitwise_equal_from_run_to_run() -> None:
    case = SMALL.with_(tokens=40)
    first = results(run, case, case.dtype)
    assert all(torch.equal(a, b) for a, b in zip(results(run, case, case.dtype), first, strict=True))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 20),
    hidden=st.integers(1, 40),
    inter=st.integers(1, 40),
    hidden_out=st.integers(1, 40),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 5),
    gating=st.sampled_from(["merged", "interleaved", "separate", "plain"]),
    storage=st.sampled_from(STORAGES),
    bias=st.booleans(),
    on_input=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_any_sizes(storage: dict[str, bool], on_input: bool, **sizes: Any) -> None:
    check(Case(weight_on_input=on_input, **storage, **sizes))


class Block(torch.nn.Module):
    """Routed experts; ``plain`` ones have an activation that no template describes, so they take the grouped tier."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.up = torch.nn.Parameter(torch.randn(4, 24 if plain else 48, 16) / 4)
        self.down = torch.nn.Parameter(torch.randn(4, 16, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(self.gate(x), -1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(ids == e)
            h = torch.nn.functional.linear(x[token], self.up[e])
            if self.plain:
                a = h.sin().square()
            else:
                gate, up = h.chunk(2, -1)
                a = torch.nn.functional.silu(gate) * up
            out.index_add_(0, token, torch.nn.functional.linear(a, self.down[e]) * weights[token, slot, None])
        return out


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("plain", [False, True], ids=["template", "grouped tier"])
def test_a_compiled_block_trains_as_in_eager(plain: bool, ran: list[str]) -> None:
    """Through the backend and Inductor: the kernels run, and one step has the gradients of eager."""
    import moefuse
    from moefuse.kernels.triton.provide import grouped as tier

    torch.manual_seed(0)
    block = Block(plain)
    x = torch.randn(7, 16)
    with interpreted(tier, TIER) as ran_in_tier:
        out = torch.compile(block, backend="moefuse")(x)
        grads = torch.autograd.grad(out.square().sum(), list(block.parameters()))
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped) == (1, [])
    used = {"permute", "grouped_linear", "combine", "grouped_linear_backward", "combine_backward"}
    assert used <= set(ran_in_tier) if plain else set(ALL) <= set(ran)
    want = block(x)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), list(block.parameters())), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gating", ["merged", "separate", "plain"])
@pytest.mark.parametrize("on_input", [False, True], ids=["weight-on-output", "weight-on-input"])
def test_hidden_activations_once_more(gating: str, on_input: bool) -> None:
    """What a layer that keeps none computes in backward: the same bits, rows that are nobody's zero."""
    from moefuse.kernels.triton.provide import training

    case = SMALL.with_(gating=gating, weight_on_input=on_input, bias=True)
    x, ids, *rest = case.args()
    call = ExpertsCall.of(x, torch.where(ids == 1, -1, ids), *rest, **case.options)
    _, h, order, offsets = training.experts_forward(call)
    again = training.experts_hidden(call, order, offsets)
    assert torch.equal(again, h)
    assert not again[int(offsets[-1]) :].any()
