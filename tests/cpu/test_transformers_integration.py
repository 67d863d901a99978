"""``experts_implementation="moefuse"`` computes what transformers' own implementations compute, on every flag they have."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

pytest.importorskip("transformers.integrations.moe")

from transformers import Trainer, TrainingArguments
from transformers.activations import ACT2FN
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward, use_experts_implementation

import moefuse
from moefuse.integrations.transformers import NAME, ExpertsModuleError, _fused_activation, experts_forward
from tests.cpu.replay_case import light
from tests.strategies import THOROUGH
from tests.zoo import tiny
from tests.zoo.budget import assert_gradients_within_budget, assert_within_budget, cast, output_and_gradients

__all__ = ["light"]

REGISTERED = [
    "aria", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "minimax_m3_vl", "mixtral", "muse_spark", "nemotron_h", "olmoe",
    "openai_privacy_filter", "phimoe", "qwen2_moe", "qwen3_moe",
]  # fmt: skip
EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 32, 24, 2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- whole models ----------------------------------------------------------------------------------------------------------------


def three_models(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any, Any]:
    """The same model with moefuse's experts, with transformers' loop, and with the loop in double precision."""
    ours = cast(tiny.build(name, experts_implementation=NAME, **changes), dtype)
    loop = cast(tiny.build(name, experts_implementation="eager", **changes), dtype)
    loop.load_state_dict(ours.state_dict())
    return ours, loop, cast(copy.deepcopy(loop), torch.float64)


@pytest.mark.parametrize("name", REGISTERED)
def test_family_equals_eager_loop(name: str) -> None:
    ours, loop, exact = three_models(name)
    ids = tiny.tokens()
    (out, grads), (out_loop, grads_loop), (out_exact, grads_exact) = (
        output_and_gradients(model, lambda m=model: tiny.hidden(m, ids)) for model in (ours, loop, exact)
    )
    assert_within_budget(out, out_loop, out_exact)
    assert_gradients_within_budget(grads, grads_loop, grads_exact)


@pytest.mark.parametrize("name", REGISTERED)
def test_family_in_bfloat16(name: str) -> None:
    ours, loop, exact = three_models(name, torch.bfloat16)
    ids = tiny.tokens(2, 24)
    with torch.no_grad():
        assert_within_budget(*(tiny.hidden(model, ids) for model in (ours, loop, exact)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REGISTERED)
def test_family_is_one_graph(name: str) -> None:
    model = tiny.build(name, experts_implementation=NAME)
    if not any(hasattr(module, "is_transposed") for module in model.modules()):
        pytest.skip("not decorated in this transformers")
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes if str(node.target).startswith("moefuse."))
        return gm.forward

    ids = tiny.tokens()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(tiny.hidden(compiled, ids), tiny.hidden(model, ids))
    ends = [op for op in seen if op.startswith(("moefuse.experts", "moefuse.combine"))]
    experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
    assert len(ends) == tiny.FAMILIES[name].layers
    assert ends == ["moefuse.combine" if _fused_activation(module) is None else "moefuse.experts" for module in experts]


COMPILED = [
    ("qwen3_moe", torch.float32),
    ("gpt_oss", torch.float32),
    pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.thorough),
]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(("name", "dtype"), COMPILED)
def test_compiled_with_our_backend(name: str, dtype: torch.dtype) -> None:
    """The report has layers that call our ops themselves as it has the others: with one op, or with a gate of their own between two."""
    ours, loop, exact = three_models(name, dtype)
    compiled, ids = torch.compile(ours, backend="moefuse", fullgraph=True), tiny.tokens()
    (out, grads), (out_loop, grads_loop), (out_exact, grads_exact) = (
        output_and_gradients(owner, lambda m=model: tiny.hidden(m, ids))
        for owner, model in ((ours, compiled), (loop, loop), (exact, exact))
    )
    assert_within_budget(out, out_loop, out_exact, factor=2.0)
    assert_gradients_within_budget(grads, grads_loop, grads_exact, factor=2.0)
    report = moefuse.last_report()
    assert report is not None
    assert ([f.tier for f in report.fused], report.skipped) == (["fused"] * tiny.FAMILIES[name].layers, [])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"] if THOROUGH else ["gpt_oss"])
def test_compiled_with_inductor(name: str) -> None:
    ours, loop, exact = three_models(name, num_hidden_layers=1, layer_types=["full_attention"])
    compiled = torch.compile(ours, backend="inductor", fullgraph=True)
    ids = tiny.tokens()
    (out, grads), (out_loop, grads_loop), (out_exact, grads_exact) = (
        output_and_gradients(owner, lambda m=model: tiny.hidden(m, ids))
        for owner, model in ((ours, compiled), (loop, loop), (exact, exact))
    )
    assert_within_budget(out, out_loop, out_exact, factor=2.0)
    assert_gradients_within_budget(grads, grads_loop, grads_exact, factor=2.0)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_generate(name: str) -> None:
    ours, loop, _ = three_models(name)
    arguments = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = tiny.tokens(2, 5)
    assert torch.equal(ours.generate(ids, **arguments), loop.generate(ids, **arguments))


def test_set_experts_implementation() -> None:
    model = tiny.build("mixtral")
    model.set_experts_implementation(NAME)
    assert model.get_experts_implementation()[""] == NAME
    ids = tiny.tokens()
    with torch.no_grad():
        got = tiny.hidden(model, ids)
        model.set_experts_implementation("eager")
        torch.testing.assert_close(got, tiny.hidden(model, ids))


def test_trainer(tmp_path: Any) -> None:
    losses = []
    for implementation in (NAME, "eager"):
        model = tiny.build("qwen3_moe", experts_implementation=implementation)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / implementation), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            logging_steps=1, save_strategy="no", learning_rate=1e-2, seed=0, disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in tiny.tokens(8, 8)]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---- one experts module: every flag ----------------------------------------------------------------------------------------------


def make_experts(
    *, gate: bool = True, bias: bool = False, transposed: bool = False, norm: bool = False, custom_gate: bool = False,
    concatenated: bool = True, act: Any = "silu", dtype: torch.dtype = torch.float32,
) -> nn.Module:  # fmt: skip
    """An experts module decorated with the given flags; no family of transformers uses all of their combinations."""
    generator = torch.Generator().manual_seed(3)

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter((torch.randn(*shape, generator=generator) * 0.3).to(dtype))

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            name, width = ("gate_up_proj", 2 * WIDTH) if gate else ("up_proj", WIDTH)
            setattr(self, name, parameter(EXPERTS, HIDDEN, width) if transposed else parameter(EXPERTS, width, HIDDEN))
            self.down_proj = parameter(EXPERTS, WIDTH, HIDDEN) if transposed else parameter(EXPERTS, HIDDEN, WIDTH)
            if bias:
                setattr(self, f"{name}_bias", parameter(EXPERTS, width))
                self.down_proj_bias = parameter(EXPERTS, HIDDEN)
            if norm:
                self.post_expert_norm = nn.RMSNorm(HIDDEN, eps=1e-6, dtype=dtype)
            self.act_fn = ACT2FN[act] if isinstance(act, str) else act

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise NotImplementedError

    if custom_gate:

        def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
            first, second = gate_up[..., ::2], gate_up[..., 1::2]
            return torch.tanh(first.clamp(max=0.7)) * (second + 1)

        Experts._apply_gate = _apply_gate  # type: ignore[attr-defined]
    flags = {"is_concatenated": concatenated, "is_transposed": transposed, "has_bias": bias, "has_gate": gate}
    if norm:
        if "has_post_expert_norm" not in inspect.signature(use_experts_implementation).parameters:
            pytest.skip("this transformers has no norm after experts")
        flags["has_post_expert_norm"] = True
    decorated = use_experts_implementation(**flags)(Experts)
    return decorated(types.SimpleNamespace(_experts_implementation=NAME))


def routed(tokens: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weights, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K)
    return x, ids, weights.to(dtype).requires_grad_()


def run(function: Any, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = function(module, x, ids, weights)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, list(torch.autograd.grad(out, [x, weights, *module.parameters()], direction))


def assert_same(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    out, grads = run(experts_forward, module, x, ids, weights)
    expected, expected_grads = run(grouped_mm_experts_forward, module, x, ids, weights)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("gate", "bias", "transposed", "norm", "custom_gate"), list(itertools.product([True, False], repeat=5)))
def test_flags(gate: bool, bias: bool, transposed: bool, norm: bool, custom_gate: bool) -> None:
    module = make_experts(gate=gate, bias=bias, transposed=transposed, norm=norm, custom_gate=custom_gate)
    assert_same(module, *routed())


@pytest.mark.every_value
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("act", [*sorted(ACT2FN), torch.nn.functional.silu, torch.tanh, lambda x: x.sin()])
def test_activations(act: Any, gate: bool) -> None:
    module = make_experts(gate=gate, act=act)
    if act == "xielu":
        module.float()
    assert_same(module, *routed())


def test_hooked_activation_is_called() -> None:
    module = make_experts()
    seen: list[int] = []
    module.act_fn.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr, operator]
    experts_forward(module, *routed())
    assert seen


def test_gate_set_on_the_instance_is_honoured() -> None:
    module = make_experts()
    module._apply_gate = types.MethodType(lambda self, rows: rows[..., :WIDTH].cos(), module)  # type: ignore[assignment]
    assert_same(module, *routed())


@pytest.mark.parametrize("custom_gate", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_sentinels_of_expert_parallelism(custom_gate: bool, bias: bool) -> None:
    """Ids of experts on other ranks equal num_experts: no contribution, no gradient, and never a read out of bounds."""
    module = make_experts(custom_gate=custom_gate, bias=bias)
    module._is_expert_parallel = True  # type: ignore[assignment]
    x, ids, weights = routed()
    ids = torch.where(torch.arange(ids.numel()).view_as(ids) % 3 == 0, EXPERTS, ids)
    ids[0] = EXPERTS
    weights = weights.detach().masked_fill(ids == EXPERTS, 0.0).requires_grad_()
    assert_same(module, x, ids, weights)


def test_flags_of_older_releases() -> None:
    """transformers 5.17 knows neither has_post_expert_norm nor _is_expert_parallel."""
    module = make_experts()
    expected = experts_forward(module, *routed())
    for flag in ("has_post_expert_norm", "_is_expert_parallel", "is_concatenated"):
        module.__dict__.pop(flag, None)
    torch.testing.assert_close(experts_forward(module, *routed()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("custom_gate", [True, False])
def test_dtypes_follow_grouped_mm(custom_gate: bool) -> None:
    """Autocast leaves float32 hidden states or routing weights beside bfloat16 experts."""
    module = make_experts(dtype=torch.bfloat16, custom_gate=custom_gate)
    x, ids, weights = routed()
    for hidden, routing in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        x_cast, weights_cast = x.detach().to(hidden), weights.detach().to(routing)
        got, want = (function(module, x_cast, ids, weights_cast) for function in (experts_forward, grouped_mm_experts_forward))
        exact = batched_mm_experts_forward(copy.deepcopy(module).double(), x_cast.double(), ids, weights_cast.double())
        assert got.dtype == hidden
        assert_within_budget(got, want, exact)


@pytest.mark.parametrize("custom_gate", [True, False])
def test_no_tokens(custom_gate: bool) -> None:
    module = make_experts(custom_gate=custom_gate)
    x, ids, weights = routed(0)
    out = experts_forward(module, x, ids, weights)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()


# ---- refusals --------------------------------------------------------------------------------------------------------------------


def test_refuses_interleaved_flag_with_the_default_gate() -> None:
    with pytest.raises(ExpertsModuleError, match=r"make_experts.*Experts: is_concatenated=False"):
        experts_forward(make_experts(concatenated=False), *routed())


def test_interleaved_flag_with_its_own_gate_runs() -> None:
    assert_same(make_experts(concatenated=False, custom_gate=True), *routed())


def test_refuses_flags_that_promise_missing_weights() -> None:
    module = make_experts()
    module.has_bias = True  # type: ignore[assignment]
    with pytest.raises(ExpertsModuleError, match=r"has_bias=True.*gate_up_proj_bias"):
        experts_forward(module, *routed())
    module.has_gate = False  # type: ignore[assignment]
    with pytest.raises(ExpertsModuleError, match=r"has_gate=False.*`up_proj`"):
        experts_forward(module, *routed())


def test_refuses_quantised_weights() -> None:
    module = make_experts()
    module.down_proj = nn.Parameter(module.down_proj.detach().to(torch.int8), requires_grad=False)  # type: ignore[operator, union-attr]
    with pytest.raises(ExpertsModuleError, match=r"`down_proj` is torch.int8"):
        experts_forward(module, *routed())


def test_refuses_distributed_tensors() -> None:
    module = make_experts()
    module.gate_up_proj.device_mesh = object()  # type: ignore[union-attr]
    with pytest.raises(ExpertsModuleError, match=r"`gate_up_proj` is a DTensor"):
        experts_forward(module, *routed())


def reload_without(monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    monkeypatch.setitem(sys.modules, blocked, None)
    monkeypatch.delitem(sys.modules, "moefuse.integrations.transformers")
    importlib.import_module("moefuse.integrations.transformers")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="pip install transformers"):
        reload_without(monkeypatch, "transformers")


def test_transformers_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"registry of transformers 5.0 or newer.*has none"):
        reload_without(monkeypatch, "transformers.integrations.moe")


# ---- weights that are computed -----------------------------------------------------------------------------------------------------


class Low(nn.Module):
    """A low-rank update of a stacked weight, as LoRA adapters write it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        experts, out, width = weight.shape
        self.a, self.b = nn.Parameter(torch.randn(experts, 2, width) / 4), nn.Parameter(torch.randn(experts, out, 2) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.bmm(self.b, self.a)


def adapt(model: Any) -> None:
    """PEFT's ``target_parameters``: weights of experts are parametrized."""
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.register_parametrization(layer.mlp.experts, name, Low(getattr(layer.mlp.experts, name)))


@pytest.mark.usefixtures("no_code")
def test_adapters_of_expert_weights_under_compile() -> None:
    """PEFT computes them once in a call, which Dynamo guards: it must not run one while it asks whether the module has the weight."""
    ours, loop, _ = three_models("qwen3_moe")
    torch.manual_seed(0)
    adapt(ours)
    adapt(loop)
    loop.load_state_dict(ours.state_dict())
    compiled, ids = torch.compile(ours, backend=NAME), tiny.tokens()
    for model in (compiled, loop):
        with parametrize.cached():
            out = model(ids).logits
        out.square().mean().backward()
    torch.testing.assert_close(compiled(ids).logits, out, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(ours.named_parameters(), loop.parameters(), strict=True):
        if ".parametrizations." in name:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"gradient of {name}: {m}")


@pytest.mark.parametrize("how", ["func.jvp", "dual, no_grad", "dual, frozen", "dual", "func.grad", "hessian", "vmap", "second derivative"])
def test_derivatives_of_other_kinds(how: str) -> None:
    """Without torch.compile: what transformers' "eager" gives, this gives; a tangent, and never none."""
    weights, ids = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).softmax(-1).topk(2)

    def of(implementation: str) -> Any:
        torch.manual_seed(0)
        experts = tiny.build("qwen3_moe", experts_implementation=implementation).model.layers[0].mlp.experts
        hidden = torch.randn(6, experts.gate_up_proj.shape[-1], generator=torch.Generator().manual_seed(1))

        def run(x: Tensor) -> Tensor:
            out: Tensor = experts(x, ids, weights)
            return out

        def score(x: Tensor) -> Tensor:
            return run(x).square().sum()

        if how == "func.jvp":
            return torch.func.jvp(run, (hidden,), (torch.ones_like(hidden),))[1]
        if how == "func.grad":
            return torch.func.grad(score)(hidden)
        if how == "hessian":
            return torch.func.hessian(score)(hidden[:2].repeat(3, 1))
        if how == "vmap":
            return torch.func.vmap(run)(torch.stack([hidden, hidden + 1]))
        if how == "second derivative":
            leaf = hidden.clone().requires_grad_()
            (first,) = torch.autograd.grad(score(leaf), leaf, create_graph=True)
            return torch.autograd.grad(first.square().sum(), [leaf, experts.gate_up_proj])
        experts.requires_grad_("frozen" not in how)
        with torch.set_grad_enabled("no_grad" not in how), forward_ad.dual_level():
            return forward_ad.unpack_dual(run(forward_ad.make_dual(hidden, torch.ones_like(hidden)))).tangent

    ours, theirs = of(NAME), of("eager")
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
