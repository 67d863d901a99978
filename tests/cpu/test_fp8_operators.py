"""Operators of libraries that multiply float8 weights and round activations: experts that call them are one op on the same storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.capture import entry
from moefuse.config import Options
from moefuse.ops.meaning.encoding import Rounding
from moefuse.passes.lower import held
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.programs import fp8
from tests.programs.fp8 import BK, BN, NO_ZEROS, ZEROS, Absent, Batched, E, Grouped, H, Hit, K, Layer, Listed, Loop, Mx, OfTensors

OP = torch.ops.moefuse.experts_extended.default
BLOCKS = f"e4m3, blocks of {BN}x{BK}"
ROUNDED = f"{BLOCKS}, activations e4m3 per token and {BK} inputs"


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


class Compiled:
    """A model by moefuse's pass, its graphs run by torch as they are."""

    def __init__(self, model: nn.Module, *, captured: bool = False, **options: Any) -> None:
        self.report, self.graphs, self.model = FusionReport(), [], model
        chosen = Options(**options)

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            self.report.extend(rewrite.rewrite(gm, example_inputs, chosen, entry.frame()))
            self.graphs.append(gm)
            return gm.forward

        if captured:
            entry.enable(backend, lambda _arguments: chosen, lambda found, *_: self.report.extend(found))
        self.run = torch.compile(model, backend=backend, fullgraph=not captured)

    def check(self, x: Tensor, apart: float) -> None:
        """Results are so far from the model's, as a part of their size."""
        with torch.no_grad():
            got, wanted = self.run(x).double(), self.model(x).double()
        assert (got - wanted).norm() <= apart * wanted.norm()

    @property
    def ops(self) -> list[torch.fx.Node]:
        return [node for gm in self.graphs for node in gm.graph.nodes if node.target is OP]

    @property
    def operators(self) -> list[torch.fx.Node]:
        return [n for gm in self.graphs for n in gm.graph.nodes if "matmul" in str(n.target)]

    def is_fused(self, encoding: str) -> None:
        assert [f.spec.encoding for f in self.report.fused] == [encoding], str(self.report)
        assert (len(self.ops), self.operators, self.report.skipped) == (1, [], [])


APART = {torch.bfloat16: 0.02, torch.float16: 0.01, torch.float32: 0.005}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", APART)
@pytest.mark.parametrize("program", [Batched, Grouped, Loop, Listed])
def test_every_way_to_call_them(program: type[Layer], dtype: torch.dtype) -> None:
    """The report has the encoding; what the program called is gone."""
    compiled = Compiled(program(dtype=dtype))
    compiled.check(torch.randn(11, H).to(dtype), APART[dtype])
    compiled.is_fused(ROUNDED)


def test_a_loop_over_hit_experts() -> None:
    compiled = Compiled(Hit(), captured=True)
    compiled.check(torch.randn(11, H).bfloat16(), 0.02)
    compiled.is_fused(ROUNDED)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [Batched, Grouped, Loop])
def test_scales_that_are_powers(program: type[Layer]) -> None:
    """Bytes of exponents are as they are held, too."""
    compiled = Compiled(program(powers=True))
    compiled.check(torch.randn(11, H).bfloat16(), 0.02)
    compiled.is_fused(ROUNDED.replace(", act", ", scales 2^n, act"))


def test_one_scale_for_a_matrix() -> None:
    """In one dimension, or three."""
    compiled = Compiled(OfTensors())
    compiled.check(torch.randn(11, H).bfloat16(), 0.02)
    compiled.is_fused("e4m3, one scale, activations e4m3 per token")


@pytest.mark.parametrize("nibbles", [False, True])
def test_groups_of_32(nibbles: bool) -> None:
    compiled = Compiled(Mx(nibbles=nibbles))
    compiled.check(torch.randn(11, H).bfloat16(), 0.02)
    name = "e2m1" if nibbles else "e4m3"
    compiled.is_fused(f"{name}, groups of 32, scales 2^n, activations e4m3 per token and 32 inputs, their scales 2^n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("how", "odd"), [*((how, True) for how in ZEROS), ("in place", False)])
def test_zeros_for_slots_without_expert(how: str, odd: bool) -> None:
    """The op leaves such slots out, so the zeros change nothing: where all ids are experts', and where those of E are nobody's."""
    compiled = Compiled(Absent(ZEROS[how], odd=odd))
    for tokens in (11, 1):
        compiled.check(torch.randn(tokens, H).bfloat16(), 0.03)
    assert [f.spec.encoding for f in compiled.report.fused] == [ROUNDED] * 2, str(compiled.report)
    assert (compiled.report.skipped, compiled.operators) == ([], [])
    compiled.check(torch.randn(0, H).bfloat16(), 0.0)


UNWRITTEN = "ids-out-of-range", "leaves rows of other ids as they are in memory"
OTHERS = {
    "nothing": UNWRITTEN,
    "nobody": ("tokens-differ", "no rule reads"),
    "the last": ("tokens-differ", "no rule reads"),
    "where, the others": ("no-rule", "`where`"),
    **dict.fromkeys(("the others", "ones", "turned", "of weights", "written"), ("no-rule", "`masked_fill`")),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [*OTHERS, "too early"])
def test_other_zeros_stay(how: str) -> None:
    """Zeros of other slots than those that have no expert, or none; or in front of the last product, which writes nothing there either."""
    code, text = OTHERS.get(how, UNWRITTEN)
    model = Absent(NO_ZEROS["nothing"], ZEROS["gt"]) if how == "too early" else Absent(NO_ZEROS[how])
    compiled, x = Compiled(model), torch.randn(11, H).bfloat16()
    with torch.no_grad():
        got, theirs = compiled.run(x), model(x)
    assert torch.equal(got.isnan(), theirs.isnan())
    assert torch.equal(got.nan_to_num(), theirs.nan_to_num())
    assert not compiled.ops
    assert {(s.code, text in s.message) for s in compiled.report.skipped} == {(code, True)}, str(compiled.report)


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens(tokens: int) -> None:
    """One token is one slot's rows; and fewer slots than experts."""
    compiled = Compiled(Batched())
    compiled.check(torch.randn(tokens, H).bfloat16(), 0.03)
    compiled.is_fused(ROUNDED)


def test_any_number_of_tokens() -> None:
    """A graph for all sizes, and no tokens at all."""
    model = Grouped()
    compiled = Compiled(model)
    compiled.run = torch.compile(compiled.run, dynamic=True)
    light = Compiled(model)
    for tokens in (11, 5, 0):
        x = torch.randn(tokens, H).bfloat16()
        torch._dynamo.mark_dynamic(x, 0) if tokens > 1 else None
        light.check(x, 0.02)
    assert light.ops


def test_by_inductor() -> None:
    """The whole way, in grad mode too, where weights are Parameters that say they want gradients."""
    import moefuse

    model, x = Batched(trained=True), torch.randn(11, H).bfloat16()
    got = torch.compile(model, backend="moefuse")(x)
    report = moefuse.last_report()
    assert report is not None
    assert [f.spec.encoding for f in report.fused] == [ROUNDED]
    assert "held as e4m3" in str(report)
    wanted = model(x)
    assert (got - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", APART)
@pytest.mark.parametrize("program", [Batched, Loop])
def test_activations_as_they_are(program: type[Layer], dtype: torch.dtype) -> None:
    """An option multiplies activations as they are: nearer to experts that round nothing than the program is, and away from it by that."""
    model, x = program(dtype=dtype), torch.randn(64, H).to(dtype)
    compiled = Compiled(model, quantised="weights")
    with torch.no_grad():
        got, theirs, exact = compiled.run(x).double(), model(x).double(), _unrounded(model, x)
    compiled.is_fused(BLOCKS)
    cost = (theirs - exact).norm() / exact.norm()
    assert 0.01 < cost < 0.1
    assert (got - exact).norm() / exact.norm() < 0.3 * cost


def _unrounded(model: Layer, x: Tensor) -> Tensor:
    """What experts give in float64 that round nothing, by the program's own choice of experts."""
    ids, weights = model.route(x)
    up, down = (
        getattr(model, n).double() * getattr(model, f"{n}_scale").double().repeat_interleave(BN, 1).repeat_interleave(BK, 2)
        for n in ("up", "down")
    )
    h = torch.einsum("th,tkoh->tko", x.double(), up[ids])
    return torch.einsum("tki,tkoi,tk->to", model.act(h), down[ids], weights.double())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [Batched, Grouped, Loop])
def test_the_option_leaves_them_alone(program: type[Layer]) -> None:
    compiled = Compiled(program(), quantised="off")
    compiled.check(torch.randn(11, H).bfloat16(), 0.0)
    assert not compiled.ops
    assert {(s.code, "`quantised` is off" in s.message) for s in compiled.report.skipped} == {("encoding-unknown", True)}


class OtherArguments(Batched):
    op = torch.ops.other_arguments.w8a8_block_dynamic_fp8_matmul_batched

    def product(self, rows: Tensor, name: str, ids: Tensor) -> Tensor:
        return self.op(rows, getattr(self, name), getattr(self, f"{name}_scale"), ids, self.block)  # type: ignore[no-any-return]


class OtherMeaning(Batched):
    op = torch.ops.other_meaning.w8a8_block_dynamic_fp8_matmul_batched


class Swapped(Batched):
    def __init__(self) -> None:
        super().__init__()
        self.block = [BK, BN]


class Transposed(Batched):
    """Scales that are held the other way round than the operator takes them."""

    def product(self, rows: Tensor, name: str, ids: Tensor) -> Tensor:
        scale = getattr(self, f"{name}_scale").transpose(1, 2).contiguous()
        return self.op(rows, getattr(self, name), scale, ids, self.block, None)  # type: ignore[no-any-return]


class Widened(Batched):
    """Results in another dtype than rows."""

    def product(self, rows: Tensor, name: str, ids: Tensor) -> Tensor:
        return self.op(rows, getattr(self, name), getattr(self, f"{name}_scale"), ids, self.block, torch.float32)  # type: ignore[no-any-return]


class MoreScales(Batched):
    """Of an expert that there is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up_scale = nn.Parameter(torch.cat((self.up_scale, self.up_scale[:1])), requires_grad=False)


class OtherIds(Batched):
    """The second projection goes by ids of another router."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(H, E, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        others = torch.topk(self.other(x).float(), K, dim=-1).indices.reshape(-1)
        y = self.product(self.act(self.product(x.repeat_interleave(K, 0), "up", ids.reshape(-1))), "down", others)
        return (y * weights.reshape(-1).to(y.dtype).unsqueeze(-1)).view(len(x), K, H).sum(1)


class GivenIds(Batched):
    """Ids of which nothing says that there are such experts."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x)
        return ids + (x[:, :1] > 100), weights


class OtherEnds(Grouped):
    """Ends of rows that are sorted by other ids."""

    def bounds(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().bounds((ids + 1) % E)


class CountsForEnds(Grouped):
    def bounds(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ends, counts = super().bounds(ids)
        return counts.int(), ends.float()


class OtherExpert(Loop):
    """Scales of the next expert."""

    def product(self, rows: Tensor, name: str, e: int | Tensor) -> Tensor:
        weight, scale = getattr(self, name)[e], getattr(self, f"{name}_scale")[(e + 1) % E]
        return fp8.OPS.w8a8_block_dynamic_fp8_matmul(rows, weight, scale, self.block, rows.dtype)  # type: ignore[no-any-return]


class Squared(Batched):
    """An activation that the op has not."""

    def act(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up * up


NEAR = {
    "arguments": (OtherArguments, "encoding-unknown", "is an operator that moefuse cannot look into"),
    "meaning": (OtherMeaning, "verification-failed", "differs from its recognised meaning"),
    "blocks swapped": (Swapped, "encoding-unknown", f"of blocks [{BK}, {BN}] for weights"),
    "scales transposed": (Transposed, "encoding-unknown", f"of blocks [{BN}, {BK}] for weights"),
    "dtype": (Widened, "encoding-unknown", "makes float32 of rows in bfloat16"),
    "scales": (MoreScales, "encoding-unknown", f"scales of {E + 1} experts for {E}"),
    "ids": (OtherIds, "experts-differ", "rows of one expert meet the weight of another"),
    "ids outside": (GivenIds, "ids-out-of-range", "leaves rows of other ids as they are in memory"),
    "ends": (OtherEnds, "tokens-differ", "are not those of the experts"),
    "counts for ends": (CountsForEnds, "tokens-differ", "are not those of the experts"),
    "expert": (OtherExpert, "encoding-unknown", "scales that are not of these experts"),
    "activation": (Squared, "encoding-unsupported", "no activation of the op computes"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("near", NEAR)
def test_near_misses_stay(near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left as they are, with the reason, and with the line of the operator (or of the sum)."""
    program, code, text = NEAR[near]
    if near in ("blocks swapped", "scales transposed"):
        monkeypatch.setattr(fp8, "_product", _lenient(fp8._product))
    compiled = Compiled(program())
    x = torch.randn(11, H).bfloat16()
    with torch.no_grad():
        compiled.run(x)
    assert (compiled.ops, compiled.report.fused) == ([], []), str(compiled.report)
    skipped = compiled.report.skipped
    assert {(s.code, text in s.message) for s in skipped} == {(code, True)}, str(compiled.report)
    assert all(__file__ in s.location or fp8.__file__ in s.location for s in skipped)


def _lenient(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Zeros instead of an error: the operator itself would refuse such sizes."""

    def found(rows: Tensor, weight: Tensor, scale: Tensor, block: list[int]) -> Tensor:
        return torch.zeros(len(rows), len(weight))

    return found


def test_storage_is_live() -> None:
    """Requantised weights are followed by the graph that is there."""
    model = Batched()
    compiled = Compiled(model)
    x = torch.randn(11, H).bfloat16()
    compiled.check(x, 0.02)
    model.up_scale.data.mul_(3)
    model.down.data = model.down.data.roll(1, 0)
    compiled.check(x, 0.02)
    assert len(compiled.graphs) == 1


def test_a_dense_product_is_no_expert() -> None:
    """The same operator where nothing chooses experts."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Batched()

        def forward(self, x: Tensor) -> Tensor:
            x = fp8.OPS.w8a8_block_dynamic_fp8_matmul(x, self.layer.up[0, :H], self.layer.up_scale[0, : H // BN], [BN, BK])
            return self.layer(x)  # type: ignore[no-any-return]

    compiled = Compiled(Dense())
    compiled.check(torch.randn(11, H).bfloat16(), 0.02)
    assert len(compiled.ops) == 1
    assert compiled.report.skipped == []


WRONG = {
    "nothing is rounded": lambda e: replace(e, activation=None),
    "by other groups": lambda e: replace(e, activation=Rounding("e4m3", BK // 2)),
    "by powers": lambda e: replace(e, activation=Rounding("e4m3", BK, power=True)),
    "to whole numbers": lambda e: replace(e, activation=Rounding("s8", BK)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_rounding_is_seen(wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What near ties are allowed to weigh hides no replacement that rounds otherwise. (In bfloat16 it would.)"""
    right = held.encoding_of
    monkeypatch.setattr(held, "encoding_of", lambda *args: WRONG[wrong](right(*args)))
    compiled = Compiled(Batched(dtype=dtype))
    compiled.check(torch.randn(11, H).to(dtype), 0.0)
    assert [s.code for s in compiled.report.skipped] == ["verification-failed"], str(compiled.report)


@pytest.mark.every_value
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", APART)
def test_what_is_right_is_never_refused(dtype: torch.dtype, seed: int) -> None:
    """Codes that flip are no difference: other weights, other luck; also without the rounding."""
    torch.manual_seed(100 + seed)
    for options in ({}, {"quantised": "weights"}):
        torch._dynamo.reset()
        compiled = Compiled(Grouped(dtype=dtype), **options)
        compiled.check(torch.randn(3, H).to(dtype), 0.2)
        assert len(compiled.report.fused) == 1, str(compiled.report)
