"""``options={"recompute": True}``: the same bits, and less that is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse.ops.schema import SCHEMAS
from moefuse.passes.lower.recompute import still_kept
from tests.cpu import test_lora_weights
from tests.cpu.lora_case import SCALES, SMALL, Sizes, arguments
from tests.cpu.replay_case import H, I, K, Model, light
from tests.strategies import THOROUGH

__all__ = ["light"]

GATINGS = ["merged", "plain", "separate"]


def case(gating: str, tokens: int, dtype: torch.dtype, bias: bool = True) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of ``moefuse::experts``: two ids are nobody's, and one expert has no tokens."""
    torch.manual_seed(0)
    experts, features = 4, 2 * I if gating == "merged" else I
    ids = torch.randint(-1, experts - 1, (tokens, K))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).mul_(0.3).requires_grad_()

    up, up_bias = ([made(experts, features, H)], [made(experts, features)]) if gating == "separate" else ([], [])
    lists = [[made(experts, features, H)], up, [made(experts, H, I)], [made(experts, features)], up_bias, [made(experts, H)]]
    if not bias:
        lists[3:] = [[], [], []]
    return [made(tokens, H), ids, made(tokens, K), *lists], {"gating": gating}


def gradients(op: Any, args: list[Any], options: dict[str, Any]) -> tuple[Tensor, list[Tensor], int]:
    """Output, gradients, and how many numbers are kept beside the arguments."""
    given = [t for a in args for t in (a if isinstance(a, list) else [a])]
    own = {t.untyped_storage().data_ptr() for t in given}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point() and t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = op(*args, **options)
    wanted = [t for t in given if t.requires_grad]
    return out, list(torch.autograd.grad(out.square().sum(), wanted)), sum(kept.values())


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
@pytest.mark.parametrize("gating", GATINGS)
def test_the_same_bits(gating: str, tokens: int, dtype: torch.dtype, weight_on_input: bool) -> None:
    if not THOROUGH and (tokens == 300) != (gating == "merged"):
        pytest.skip("HYPOTHESIS_PROFILE=deep runs all")
    args, options = case(gating, tokens, dtype, bias=tokens != 9)
    options |= {"weight_on_input": weight_on_input}
    out, grads, kept = gradients(torch.ops.moefuse.experts, args, options)
    again, regrads, less = gradients(torch.ops.moefuse.recomputed_experts, args, options)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))
    assert kept == tokens * K * (I if gating == "plain" else 2 * I)
    assert less == 0


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [0, 9, 300])
@pytest.mark.parametrize("gating", GATINGS)
def test_low_rank_terms(gating: str, tokens: int, dtype: torch.dtype, weight_on_input: bool) -> None:
    """The same bits; kept is u [S, r of all terms] alone. Factors are float32 beside bfloat16."""
    of = torch.float32 if dtype == torch.bfloat16 else dtype
    args = arguments(gating, dtype, of, stacked=tokens != 9, sizes=Sizes(tokens=tokens))
    options = {"gating": gating, "weight_on_input": weight_on_input, "scales": SCALES}
    out, grads, kept = gradients(torch.ops.moefuse.experts_extended, args, options)
    again, regrads, less = gradients(torch.ops.moefuse.experts_extended, args, {**options, "recompute": True})
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))
    slots, terms = tokens * SMALL.top_k, 3 if gating == "separate" else 2
    assert less == slots * terms * 3
    assert kept == less + slots * SMALL.inner * (1 if gating == "plain" else 2)


def test_arguments_are_those_of_experts() -> None:
    of = {name: schema for schema in SCHEMAS for name in [schema.partition("(")[0]]}
    assert of["recomputed_experts"].removeprefix("recomputed_") == of["experts"]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("checkpointed", [None, False])
def test_a_model(checkpointed: bool | None) -> None:
    """The option reaches layers in a checkpoint's body, too; what the model computes is the same."""
    found = []
    torch.manual_seed(0)
    model = Model(checkpointed=checkpointed)
    x = torch.randn(6, H)
    for again in (False, True):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        run = torch.compile(one, backend="moefuse", options={"recompute": again, "expect": 2})
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.numel() if t.shape == (6 * K, I) else 0
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = run(x)
        out.square().sum().backward()
        report = moefuse.last_report()
        assert report is not None
        assert len(report.fused) == 2
        found.append((out, [p.grad for p in one.parameters()], sum(kept.values())))
    (out, grads, kept), (again, regrads, less) = found
    assert torch.equal(out, again)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))  # type: ignore[arg-type]
    assert less == 0
    assert kept == (2 * 6 * K * I if checkpointed is None else 0)


class Beside(nn.Module):
    """Adapters beside the Linears of each expert, as PEFT has them."""

    class Adapted(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
            self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x)) * 1.5  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(self.Adapted(32, 24), nn.SiLU(), self.Adapted(24, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("stacked", [False, True], ids=["beside", "in the weight"])
def test_a_model_with_adapters(stacked: bool) -> None:
    """The option reaches layers with low-rank terms; nothing as large as h is kept."""
    torch.manual_seed(0)
    model: nn.Module = test_lora_weights.Layer(test_lora_weights.baddbmm) if stacked else Beside()
    x, found = torch.randn(40, 32), []
    for again in (False, True):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        run = torch.compile(one, backend="moefuse", options={"recompute": again, "expect": 1})
        kept: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(tuple(t.shape)) or t, lambda t: t):
            out = run(x)
        out.square().sum().backward()
        assert "LoRA r=" in str(moefuse.last_report())
        found.append((out, [p.grad for p in one.parameters()], (80, 48 if stacked else 24) in kept))
    (out, grads, kept_h), (again_out, regrads, kept_again) = found
    assert torch.equal(out, again_out)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, regrads, strict=True))  # type: ignore[arg-type]
    assert (kept_h, kept_again) == (True, False)


class Unknown(test_lora_weights.Layer):
    """A body that no op knows: grouped products."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(ids == e)
            out.index_add_(
                0, token, F.linear(F.linear(x[token], self.w_in[e])[:, :24].sin().square(), self.w_out[e]) * weights[token, slot, None]
            )
        return out


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("trained", [True, False])
def test_a_body_that_keeps_its_activations(trained: bool) -> None:
    """It says so once, and only where something would be kept."""
    layer = Unknown(test_lora_weights.baddbmm)
    with torch.set_grad_enabled(trained):
        torch.compile(layer, backend="moefuse", options={"recompute": True, "expect": 1})(torch.randn(40, 32))
    report = moefuse.last_report()
    assert report is not None
    assert report.fused[0].tier == "grouped"
    notes = [note for note in report.notes if note.startswith("recompute: the experts at ")]
    assert len(notes) == trained
    assert all("keep their hidden activations, since they are grouped products around the program's own operations" in n for n in notes)
    assert all("test_recompute.py:" in n for n in notes)


@pytest.mark.parametrize("trained", [True, False])
def test_experts_on_several_ranks_say_what_decides(trained: bool) -> None:
    """They have an option of their own."""
    graph = torch.fx.Graph()
    x, ids, weights = (graph.placeholder(name) for name in ("x", "ids", "weights"))
    x.meta["example_value"] = torch.ones(2, H, requires_grad=True)
    node = graph.call_function(torch.ops.moefuse.bounded_experts.default, (x, ids, weights, [], [], [], [], [], []))
    notes = still_kept(node, [node], "fused", trained)
    assert len(notes) == trained
    assert all(
        "keep their hidden activations, since experts on several ranks keep as many rows as `moefuse.parallelize" in n for n in notes
    )
