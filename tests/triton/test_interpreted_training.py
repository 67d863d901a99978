"""``experts`` differentiated by the Triton kernels, at tiny sizes in Triton's interpreter, against autograd of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops import autograd
from tests.cpu.ops_case import (
    Case,
    assert_as_exact,
    leaves,
    oracle_grads,
    reference,
    run,
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


def test_inference_with_weights_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is made of it: the products of training."""
    from moefuse.kernels.triton.provide import experts

    case = SMALL.with_(held=torch.float32, dtype=torch.float16)
    monkeypatch.setattr(experts, "plan_of", None)
    assert_as_exact(
        experts.experts(case.call()), *(reference(args, **case.options) for args in (case.args(), to(case.args(), torch.float64)))
    )


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
