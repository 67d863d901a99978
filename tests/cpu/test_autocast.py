"""Weights in float32, computed with in 16 bits: ``torch.autocast`` around the experts, and casts that users write themselves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn

import moefuse
from tests.cpu.ops_case import Case, assert_as_exact, leaves, oracle_grads, reference, run, to
from tests.programs import check
from tests.programs.program import Program, invalid
from tests.programs.refused.plain import E, H, K, Layer, T
from tests.strategies import FEW, PHASES, SPELLINGS, programs

SHORT = (torch.bfloat16, torch.float16)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda cls: cls.__name__.lower())
def test_any_program(spelling: type[Any]) -> None:
    """Every program that eager takes under autocast is fused there as it is without, and is as exact as eager."""

    @settings(phases=PHASES, max_examples=FEW, suppress_health_check=list(HealthCheck))
    @given(programs((spelling,)), st.sampled_from(SHORT))
    def run(p: Program, dtype: torch.dtype) -> None:
        p = replace(p, dtype="float32")
        if not invalid(p) and check.runs(p, dtype):
            check.check_autocast(p, dtype)

    run()


def _loop(self: Layer, x: Tensor, project: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
    ids, weights = self.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        tok, slot = torch.where(ids == e)
        gate, up = project(x[tok], self.w_in[e]).chunk(2, dim=-1)
        y = project(F.silu(gate) * up, self.w_out[e]) * weights[tok, slot, None]
        out.index_add_(0, tok, y.to(out.dtype))
    return out


class Around(Layer):
    """Autocast is the caller's."""

    def forward(self, x: Tensor) -> Tensor:
        return _loop(self, x)


class RouterApart(Layer):
    """The router in float32, in a block without autocast, as ernie4_5 has it."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            return super().route(x.float())

    def forward(self, x: Tensor) -> Tensor:
        return _loop(self, x)


class OnlyExperts(Layer):
    """Autocast around the experts, in the model."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _loop(self, x)


class SwitchedOff(Layer):
    """The experts in a block without autocast: float32, whatever stands around."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return _loop(self, x.float())


class OfOneExpert(Layer):
    """The user rounds the weight of one expert where it is read."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        x = x.bfloat16()
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            gate, up = F.linear(x[tok], self.w_in[e].to(x.dtype)).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.w_out[e].to(x.dtype)) * weights[tok, slot, None]
            out.index_add_(0, tok, y.to(out.dtype))
        return out.float()


class OfTheStack(Layer):
    """The user rounds all weights at once: moefuse keeps no copy of them."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        x = x.bfloat16()
        w_in = self.w_in.transpose(1, 2).to(x.dtype)
        gate, up = torch.einsum("th,tkhi->tki", x, w_in[ids]).chunk(2, dim=-1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w_out.bfloat16()[ids])
        return (y * weights[..., None]).sum(1)


class OfOneOfTwo(Layer):
    """One weight is the user's cast of a Parameter, and one is computed: a copy in any case, of both."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        x, w_in, w_out = x.bfloat16(), (2.0 * self.w_in).bfloat16(), self.w_out.bfloat16()
        gate, up = torch.einsum("th,tkih->tki", x, w_in[ids]).chunk(2, dim=-1)
        return (torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, w_out[ids]) * weights[..., None]).sum(1)


class Rewritten(Layer):
    """The weights are written to behind the cast: what was read is the copy."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        x, w_in, w_out = x.bfloat16(), self.w_in.bfloat16(), self.w_out.bfloat16()
        with torch.no_grad():
            self.w_in.add_(1.0)
            self.w_out.add_(1.0)
        gate, up = torch.einsum("th,tkih->tki", x, w_in[ids]).chunk(2, dim=-1)
        return (torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, w_out[ids]) * weights[..., None]).sum(1)


MIXED: dict[str, tuple[type[Layer], str, str]] = {
    "around the model": (Around, "autocast", "float32 weights, computed in bfloat16,"),
    "router in float32": (RouterApart, "autocast", "float32 weights, computed in bfloat16,"),
    "around the experts": (OnlyExperts, "", "float32 weights, computed in bfloat16,"),
    "switched off": (SwitchedOff, "autocast", "float32"),
    "weights in bfloat16": (Around, "autocast, bfloat16", "bfloat16"),
    "the user's cast": (OfOneExpert, "", "float32 weights, computed in bfloat16,"),
    "the user's cast of all": (OfTheStack, "", "float32 weights, computed in bfloat16,"),
    "a weight that is computed": (OfOneOfTwo, "", "bfloat16"),
    "written to behind the cast": (Rewritten, "", "bfloat16"),
}


def _step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = call(x)
    out.float().square().sum().backward()
    return [out.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


@pytest.mark.sampled(2)
@pytest.mark.code_elsewhere
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", MIXED)
def test_mixed(name: str) -> None:
    """What each part computes in is eager's: dtypes of results and gradients are equal, and values up to 16-bit roundings."""
    kind, how, dtypes = MIXED[name]
    torch.manual_seed(0)
    made = [kind(), kind()]
    made[1].load_state_dict(made[0].state_dict())
    if "bfloat16" in how:
        made = [m.bfloat16() for m in made]
    x = torch.randn(T, H, dtype=made[0].w_in.dtype)
    if kind is not Rewritten:
        compiled = torch.compile(made[0], backend="moefuse", fullgraph=True)
        found, wanted = (_step(call, m, x, how != "") for call, m in zip((compiled, made[1]), made, strict=True))
    else:
        compiled = torch.compile(made[0], backend="moefuse", fullgraph=True)
        with torch.no_grad():
            found, wanted = [compiled(x)], [made[1](x)]
    report = moefuse.last_report()
    assert not report.skipped, report
    assert f" {dtypes} silu" in str(report.fused[0].spec)
    assert not any("in float32 under autocast" in note for note in report.notes)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=2.0**-5 * float(want.abs().max()))


class Parts(Layer):
    """Each part of an expert under an autocast of its own: to bfloat16, off, or the one around it."""

    def __init__(self, parts: dict[str, bool | None]) -> None:
        super().__init__()
        self.parts = parts

    def under(self, part: str) -> Any:
        on = self.parts[part]
        return contextlib.nullcontext() if on is None else torch.autocast("cpu", torch.bfloat16, enabled=on)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            with self.under("rows"):
                rows = x[tok]
            with self.under("up" if e else "first"):
                gate, up = F.linear(rows, self.w_in[e]).chunk(2, dim=-1)
            with self.under("middle"):
                y = F.silu(gate) * up
            with self.under("down"):
                y = F.linear(y.to(self.w_out.dtype), self.w_out[e])
            with self.under("sum"):
                out.index_add_(0, tok, (y * weights[tok, slot, None]).to(out.dtype))
        return out


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("fresh_dynamo", "no_code")
@pytest.mark.parametrize("around", [False, True], ids=["", "in autocast"])
@pytest.mark.parametrize("other", [None, False, True], ids=["", "others off", "others on"])
@pytest.mark.parametrize("products", list(itertools.product((None, False, True), repeat=3)), ids=str)
def test_autocast_of_parts(products: tuple[bool | None, ...], other: bool | None, around: bool) -> None:
    """What each product computes in counts, and nothing else of the autocasts around the parts.

    Products of several dtypes are refused, of one expert (up and down) or of two.
    """
    first, up, down = products
    parts = {"first": first, "up": up, "down": down, "rows": other, "middle": other, "sum": other}
    torch.manual_seed(0)
    made = [Parts(parts), Parts(parts)]
    made[1].load_state_dict(made[0].state_dict())
    x = torch.randn(T, H)
    found, wanted = (_step(call, m, x, around) for call, m in zip((torch.compile(made[0], backend="moefuse"), made[1]), made, strict=True))
    one = len({around if on is None else on for on in products}) == 1
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), len(report.skipped)) == ((1, 0) if one else (0, 1)), report
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=2.0 ** (-5 if one else -18) * float(want.abs().max()))


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_loss_scaling() -> None:
    """float16 with a GradScaler: a step whose gradients overflow is left out and the scale halved, as in eager."""
    torch.manual_seed(0)
    weights, x, steps = Around().state_dict(), torch.randn(T, H), []
    for backend in ("eager", "moefuse"):
        model = Around()
        model.load_state_dict(weights)
        call = torch.compile(model, backend=backend, fullgraph=True)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
        scales = []
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = call(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        steps.append((scales[:20], float(loss.detach())))
        assert scales[0] == 2.0**39  # the first overflows
        assert scales[-1] < 2.0**40
        assert all(p.isfinite().all() for p in model.parameters())
    assert steps[0][1] == pytest.approx(steps[1][1], rel=1e-2)


HELD = [{}, {"transposed": True}, {"separate": True}, {"gating": "separate"}, {"weight_on_input": True}, {"gating": "plain"}]
HELD += [{"tokens": 70, "hidden": 40, "inter": 24}, {"tokens": 0}, {"activation": "swiglu_oai"}]


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("changes", HELD, ids=str)
def test_the_op(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Values and gradients as exact as those of the reference, and in the dtype of what they are of; under autocast, too."""
    case = Case(dtype=dtype, held=torch.float32, out_dtype=torch.float32, **changes)
    for ambient in (False, True):
        args, every = case.args(requires_grad=True), []
        pull = torch.randn(case.tokens, case.hidden_out, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", dtype, enabled=ambient):
            out = run(args, **case.options)
        every.append([out.detach(), *torch.autograd.grad(out, leaves(args), pull)])
        for same, result in ((args, torch.float32), (to(args, torch.float64), torch.float64)):
            fresh = [[_leaf(t) for t in a] if isinstance(a, list) else _leaf(a) for a in same]
            out = reference(fresh, **{**case.options, "out_dtype": result})
            every.append([out.detach(), *oracle_grads(out, leaves(fresh), pull.to(result))])
        for ours, theirs, exact in zip(*every, strict=True):
            assert_as_exact(ours, theirs, exact, dtype)
        assert [g.stride() for g in every[0][1:]] == [t.stride() for t in leaves(args)]


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def test_no_copy_of_a_weight_is_kept() -> None:
    """What is saved for backward: the Parameters themselves, and nothing else of their size."""
    args = Case(dtype=torch.bfloat16, held=torch.float32, hidden=32, inter=16, bias=False).args(requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(args)
    weights = {t.data_ptr() for t in (*args[3], *args[5])}
    large = [t for t in saved if t.numel() >= min(w.numel() for w in (*args[3], *args[5]))]
    assert {t.data_ptr() for t in large} == weights
    assert {t.dtype for t in large} == {torch.float32}


@pytest.mark.parametrize(
    ("compute", "first", "last", "legal"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16, "`w_out` has dtype bfloat16; legal: float32, the dtype of `w_in`"),
        (torch.bfloat16, torch.float64, torch.float64, "`w_in` has dtype float64; legal: bfloat16, the dtype of `x`"),
        (torch.float64, torch.float32, torch.float32, "`w_in` has dtype float32; legal: float64, the dtype of `x`"),
    ],
)
def test_what_the_op_refuses(compute: torch.dtype, first: torch.dtype, last: torch.dtype, legal: str) -> None:
    """Only float32 is rounded, only to 16 bits, and all weights of a call are in one dtype."""
    args = Case(dtype=torch.float32, bias=False).args()
    args[0], args[3], args[5] = args[0].to(compute), [t.to(first) for t in args[3]], [t.to(last) for t in args[5]]
    with pytest.raises(TypeError, match=legal.replace("`", ".")):
        run(args)


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_transformers(implementation: str) -> None:
    """What ``Trainer(bf16=True)`` runs. Autocast has no rule for grouped_mm, so that spelling computes in float32, as in eager."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=32, num_hidden_layers=1, num_experts=E, num_experts_per_tok=K, intermediate_size=16, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation(implementation)
    ids, found = torch.randint(0, 32, (2, 9)), []
    for call in (torch.compile(model, backend="moefuse"), model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    report = moefuse.last_report()
    assert [f.spec.dtypes for f in report.fused] == [
        "float32" if implementation == "grouped_mm" else "float32 weights, computed in bfloat16"
    ]
    told = [note for note in report.notes if "in float32 under autocast to bfloat16 at " in note]
    assert len(told) == (implementation == "grouped_mm")
    for got, want in zip(*found, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=2.0**-4 * float(want.abs().max()))
