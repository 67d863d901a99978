"""transformers' float8 experts: ``experts_implementation="moefuse"``, and what ``backend="moefuse"`` makes of transformers' own.

The kernels that transformers fetches from the hub run on GPUs alone, so operators of the same names stand for them
(``tests/programs/fp8.py``). Releases differ; where they do, a test says what each does, by what its modules have.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("moefuse.integrations.transformers_fp8", exc_type=ImportError)

from transformers import PretrainedConfig
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import moefuse
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.integrations.transformers import NAME, ExpertsModuleError
from moefuse.integrations.transformers_fp8 import fp8_experts_forward
from moefuse.pipeline import rewrite
from tests.programs import fp8
from tests.zoo import tiny

hf: Any = finegrained_fp8
EXPERTS, HIDDEN, TOP_K = 8, 64, 2
BF16 = torch.bfloat16
GRADIENTS = hasattr(hf, "FP8GroupedMatmulFunction")
"""Whether transformers' own ``grouped_mm`` has a backward pass: in 5.17 it has none. ``batched_mm`` never has."""


@pytest.fixture(autouse=True)
def _stand_ins(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(hf, "_FINEGRAINED_FP8", hf.FineGrainedFP8(fp8.matmul, fp8.matmul_batched, fp8.matmul_grouped))


def experts(impl: str, *, width: int = 32, block: Any = (16, 16), gate: bool = True, hidden: int = HIDDEN, **flags: Any) -> Any:
    """A module as transformers makes it, with weights of every size; ``flags``: of its configuration, or its own."""
    config = PretrainedConfig()
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": EXPERTS, "hidden_act": "silu"}
    own = {k: flags.pop(k) for k in ("activation_scheme", "scale_fmt", "expert_dtype") if k in flags}
    if "expert_dtype" not in inspect.signature(hf.FP8Experts.__init__).parameters and "expert_dtype" in own:
        flags["expert_dtype"] = own.pop("expert_dtype")  # in 5.17 it is the configuration's
    for name, value in (sizes | flags | {"_experts_implementation": impl}).items():
        setattr(config, name, value)
    made = use_experts_implementation(
        experts_class=type("Experts", (hf.FP8Experts,), {}), experts_interface=hf.ALL_FP8_EXPERTS_FUNCTIONS, has_gate=gate
    )(config, block_size=None if block is None else list(block), has_gate=gate, **own)
    for parameter in made.parameters():
        value = _values(parameter)
        parameter.data = value
    return made


def _values(of: Tensor) -> Tensor:
    if of.dtype == torch.int8:
        return torch.randint(-128, 128, of.shape, dtype=torch.int8)
    if of.dtype == torch.float8_e4m3fn:
        return torch.randn(of.shape).to(of.dtype)
    if of.dtype == torch.float32:
        return (torch.rand(of.shape) + 0.2) * 0.05
    return torch.randint(116, 122, of.shape, dtype=torch.uint8).view(of.dtype)


def call(tokens: int = 11, hidden: int = HIDDEN, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = torch.rand(tokens, EXPERTS).topk(TOP_K, -1)
    return torch.randn(tokens, hidden).to(dtype), ids, weights


def near(ours: Tensor, theirs: Tensor, apart: float = 0.02) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert (ours.double() - theirs.double()).norm() <= apart * theirs.double().norm()


MODULES: dict[str, dict[str, Any]] = {
    "blocks": {},
    "other blocks": {"block": (8, 32)},
    "powers": {"scale_fmt": "ue8m0"},
    "no gate": {"gate": False},
    "gelu": {"hidden_act": "gelu"},
    "clamped": {"swiglu_limit": 0.7},
    "oai": {"swiglu_limit": 0.7, "swiglu_alpha": 1.7},
    "groups of 32": {"scale_fmt": "ue8m0", "block": (1, 32)},
    "four bits": {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    "a block reaches into up": {"width": 16, "block": (32, 16)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("own", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MODULES)
def test_as_transformers_computes(name: str, own: str) -> None:
    """Without torch.compile, and without a kernel: what the operators give, but for codes of numbers in the middle of two."""
    module = experts(own, **MODULES[name])
    if name == "a block reaches into up":
        module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv.data[:, :1]  # what the kernel takes for 32 rows
    given = call()
    with torch.no_grad():
        theirs = module(*given)
        module.config._experts_implementation = NAME
        near(module(*given), theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_sizes_and_dtypes(tokens: int, dtype: torch.dtype) -> None:
    module, given = experts("batched_mm"), call(tokens, dtype=dtype)
    with torch.no_grad():
        theirs = module(*given)
        module.config._experts_implementation = NAME
        near(module(*given), theirs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("width", "rows", "gating"), [(24, 4, "separate"), (24, 3, "merged"), (8, 2, "separate"), (32, 4, "merged")])
def test_blocks_at_the_boundary_of_gate_and_up(width: int, rows: int, gating: str) -> None:
    """Where the width is no multiple of a block, each half has its own blocks, or one is of both: the number of scales says which."""
    module, given = experts(NAME, width=width, block=(16, 8)), call(dtype=torch.float32)
    module.gate_up_proj_scale_inv.data = torch.rand(EXPERTS, rows, HIDDEN // 8) + 0.2
    module.down_proj_scale_inv.data = torch.rand(EXPERTS, HIDDEN // 16, -(-width // 8)) + 0.2
    x, ids, weights = given
    with torch.no_grad():
        ours = module(*given)
    scale = module.gate_up_proj_scale_inv.double()
    parts = scale.chunk(2, 1) if gating == "separate" else (scale,)
    spread = torch.cat([p.repeat_interleave(16, 1)[:, : width if len(parts) > 1 else 2 * width] for p in parts], 1)
    up = module.gate_up_proj.double() * spread.repeat_interleave(8, 2)
    down = module.down_proj.double() * module.down_proj_scale_inv.double().repeat_interleave(16, 1).repeat_interleave(8, 2)
    gate, more = torch.einsum("th,tkoh->tko", x.double(), up[ids]).chunk(2, -1)
    exact = torch.einsum("tki,tkoi,tk->to", F.silu(gate) * more, down[ids], weights.double()).detach()
    near(ours.double(), exact, 0.08)  # activations are rounded: a wrong scale would be off by far more


def test_sentinels_of_expert_parallelism() -> None:
    """An id behind the last expert is nobody's."""
    module, (x, ids, weights) = experts(NAME), call()
    with torch.no_grad():
        whole = module(x, ids, weights)
        weights[4, 1] = 0
        without = module(x, ids, weights)
        ids[4, 1], weights[4, 1] = EXPERTS, float("nan")
        assert torch.equal(module(x, ids, weights), without)
    assert not torch.equal(whole[4], without[4])


def test_gradients() -> None:
    """Of tokens and routing weights: those of the weights that codes stand for, and of transformers, within what rounding costs.

    Weights have none, though they ask for some.
    """
    module, (x, ids, weights) = experts("grouped_mm"), call(64)
    assert module.gate_up_proj.requires_grad

    def found(forward: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        return torch.autograd.grad(forward(leaves[0], ids, leaves[1]).float().square().sum(), leaves)

    up, down = (_decoded(getattr(module, n), getattr(module, f"{n}_scale_inv"), 16) for n in ("gate_up_proj", "down_proj"))

    def exact(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate, more = torch.einsum("th,tkoh->tko", x.double(), up[ids]).chunk(2, -1)
        return torch.einsum("tki,tkoi,tk->to", F.silu(gate) * more, down[ids], weights.double())

    others = [found(exact)]
    if GRADIENTS:
        others.append(found(module))
    else:
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            found(module)
    module.config._experts_implementation = NAME
    ours = found(module)
    for theirs in others:
        near(ours[0], theirs[0], 0.1 if theirs is others[0] else 0.05)
        near(ours[1], theirs[1], 0.1)


def _decoded(storage: Tensor, scale: Tensor, block: int) -> Tensor:
    return storage.detach().double() * scale.detach().double().repeat_interleave(block, 1).repeat_interleave(block, 2)


def test_plain_weights_are_plain_experts() -> None:
    """A module that holds its weights in 16 bits after all."""
    module, given = experts(NAME), call()
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, nn.Parameter((getattr(module, name).float() / 8).to(BF16), requires_grad=False))
    with torch.no_grad():
        ours = module(*given)
        module.config._experts_implementation = "eager"
        near(ours, module(*given))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "static": ({"activation_scheme": "static"}, "activation_scheme='static'"),
    "softcap": ({"mlp_gate_softcap": 3.0, "mlp_up_softcap": 3.0}, "capped by tanh"),
    "activation": ({"hidden_act": "mish"}, "has no activation"),
    "clamps": ({"hidden_act": "gelu", "swiglu_limit": 1.0}, "with clamps"),
    "half a block": ({"width": 12, "block": (16, 4)}, "may belong to the gate alone, or reach from it into up"),
    "inputs": ({"hidden": 72, "block": (16, 16)}, "72 inputs, no multiple of the 16"),
    "four bits, numbers": ({"expert_dtype": "fp4"}, "is torch.int8 with scales"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    flags, text = REFUSED[name]
    module = experts(NAME, **flags)
    if name == "softcap" and not hasattr(module, "gate_softcap"):
        pytest.skip("this release has no caps")
    with pytest.raises(ExpertsModuleError, match=rf"cannot run .*Experts: .*{text}"), torch.no_grad():
        module(*call(hidden=flags.get("hidden", HIDDEN)))


def test_other_scales_and_gates_are_refused() -> None:
    module = experts(NAME)
    module.down_proj_scale_inv.data = module.down_proj_scale_inv.data[:, :-1]
    with pytest.raises(ExpertsModuleError, match=r"`down_proj` \[64, 32\] has scales \[3, 2\] for blocks \[16, 16\]"):
        module(*call())
    module = experts(NAME)
    type(module)._apply_gate = lambda self, h: h.chunk(2, -1)[0]
    with pytest.raises(ExpertsModuleError, match="an _apply_gate of its own"):
        module(*call())


class Layer(nn.Module):
    """Experts behind a router."""

    def __init__(self, made: Any, *, elsewhere: bool = False) -> None:
        super().__init__()
        self.gate, self.experts, self.elsewhere = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=BF16), made, elsewhere

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.gate(x).float().softmax(-1), TOP_K, -1)
        if self.elsewhere:
            ids = ids.masked_fill(weights < 0.2, EXPERTS)
        return cast(Tensor, self.experts(x, ids, weights))


@pytest.mark.code_elsewhere
@pytest.mark.sampled(4)
@pytest.mark.parametrize("impl", ["grouped_mm", "batched_mm", NAME])
@pytest.mark.parametrize("name", ["blocks", "powers", "clamped", "four bits"])
def test_compiled(name: str, impl: str) -> None:
    """One graph and one op, which the report names the encoding of; the nodes that load kernels stay."""
    if impl == NAME and name == "clamped":
        pytest.skip("what the op computes it computes without being recognised")
    layer, x = Layer(experts(impl, **MODULES[name])), torch.randn(11, HIDDEN).to(BF16)
    with torch.no_grad():
        theirs = layer(x)
        near(torch.compile(layer, backend="moefuse", fullgraph=True)(x), theirs)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1, str(report)
    assert report.skipped == []
    assert "activations e4m3 per token and" in report.fused[0].spec.encoding


@pytest.mark.code_elsewhere
@pytest.mark.sampled(3)
@pytest.mark.parametrize("impl", ["grouped_mm", "batched_mm", NAME])
def test_experts_of_other_devices(impl: str) -> None:
    """Their slots have an id behind the last expert: transformers puts zeros there, 5.17 always, others if experts are spread."""
    layer, x = Layer(experts(impl), elsewhere=True), torch.randn(11, HIDDEN).to(BF16)
    layer.experts._is_expert_parallel = True
    with torch.no_grad():
        theirs = layer(x)
        near(torch.compile(layer, backend="moefuse", fullgraph=True)(x), theirs)
    assert theirs.isfinite().all()
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped) == (1, []), str(report)


def test_kernels_are_loaded_as_the_program_says() -> None:
    """The nodes that load the hub's kernel (one or two) stay, for whoever needs it later; the operators they are for are gone."""
    graphs: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(_names(gm.graph))
        rewrite.rewrite(gm, example_inputs, Options(), entry.frame())
        graphs.append(_names(gm.graph))
        return gm.forward

    with torch.no_grad():
        torch.compile(Layer(experts("grouped_mm")), backend=backend, fullgraph=True)(torch.randn(11, HIDDEN).to(BF16))
    before, after = graphs
    loads = before.count("_load_finegrained_fp8_kernel")
    assert loads
    assert after.count("_load_finegrained_fp8_kernel") == loads
    assert [name for name in before if "matmul" in name]
    assert not [name for name in after if "matmul" in name]


def _names(graph: torch.fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.code_elsewhere
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["blocks", "powers", "clamped"])
def test_the_loop(name: str) -> None:
    """Over experts with tokens, each of which asks for the kernel to be loaded: that happens while the graph is traced, and never after."""
    layer, x = Layer(experts("eager", **MODULES[name])), torch.randn(11, HIDDEN).to(BF16)
    with torch.no_grad():
        near(torch.compile(layer, backend="moefuse", fullgraph=True)(x), layer(x))
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped) == (1, []), str(report)
    assert "activations e4m3 per token and" in report.fused[0].spec.encoding


@pytest.mark.code_elsewhere
@pytest.mark.skipif(not hasattr(hf, "FP8LinearFunction"), reason="this release has no backward pass there")
def test_the_loop_in_training() -> None:
    """transformers' function has a backward pass of its own, which is that of the weights that codes stand for."""
    layer, x = Layer(experts("eager")), torch.randn(64, HIDDEN).to(BF16).requires_grad_()
    found = []
    for run in (torch.compile(layer, backend="moefuse", fullgraph=True), layer):
        out = run(x)
        out.backward(torch.sin(torch.arange(out.numel())).view_as(out).to(BF16))
        assert layer.experts.down_proj.grad is None
        assert x.grad is not None
        found.append((out.detach(), x.grad, layer.gate.weight.grad.clone()))
        x.grad = layer.gate.weight.grad = None
    for ours, theirs in zip(*found, strict=True):
        near(ours, theirs, 0.03)
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped) == (1, []), str(report)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("trained", [False, True])
def test_activation_scales_that_are_held(trained: bool) -> None:
    """The op rounds rows by scales of their own, and says so; the line is that of the library's operator."""
    layer, x = Layer(experts("eager", activation_scheme="static")), torch.randn(11, HIDDEN).to(BF16).requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        near(torch.compile(layer, backend="moefuse")(x), layer(x), 0.05)
    report = moefuse.last_report()
    assert report is not None
    (found,) = report.skipped
    assert (found.code, report.fused) == ("encoding-unsupported", [])
    assert "rows are rounded with a scale that the model holds" in found.message
    assert fp8.__file__ in found.location


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("impl", ["grouped_mm", "batched_mm"])
def test_tokens_that_need_gradients(impl: str) -> None:
    """Where transformers has a backward pass, it breaks the graph itself; where it has none, the layer is fused, and the op has one."""
    layer, x = Layer(experts(impl)), torch.randn(11, HIDDEN).to(BF16)
    x.requires_grad_()
    own = GRADIENTS and impl == "grouped_mm"
    torch.compile(layer, backend="moefuse")(x).float().sum().backward()
    report = moefuse.last_report()
    assert report is not None
    assert ([s.code for s in report.skipped], len(report.fused)) == ((["encoding-unknown"], 0) if own else ([], 1)), str(report)
    got = x.grad
    if not own:
        layer.experts.config._experts_implementation = NAME
        x.grad = None
        layer(x).float().sum().backward()
        assert got is not None
        assert x.grad is not None
        near(got, x.grad)


@pytest.mark.usefixtures("no_code")
def test_a_model_generates() -> None:
    """Whole, with the name that is given to transformers; every layer is in the report."""
    model = tiny.build("qwen3_moe").to(BF16)
    for layer in model.model.layers:
        layer.mlp.experts = experts(NAME, width=48, block=(16, 16))
    ids = tiny.tokens()
    with torch.no_grad():
        theirs = model(ids).logits
        model.compile(backend="moefuse")
        near(model(ids).logits, theirs, 0.05)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == len(model.model.layers), str(report)


def test_modules_of_older_releases() -> None:
    """transformers 5.17 knows no caps: its modules do not have the attribute. (Others are made to be so.)"""
    module, given = experts(NAME), call()
    with torch.no_grad():
        ours = module(*given)
        module.__dict__.pop("gate_softcap", None)
        assert torch.equal(module(*given), ours)


def test_the_name_is_registered() -> None:
    assert hf.ALL_FP8_EXPERTS_FUNCTIONS[NAME] is fp8_experts_forward


def test_a_release_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.57 has the file, and no registry in it."""
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", types.ModuleType("finegrained_fp8"))
    monkeypatch.delitem(sys.modules, "moefuse.integrations.transformers_fp8")
    with pytest.raises(ImportError, match="needs the registry of float8 experts"):
        importlib.import_module("moefuse.integrations.transformers_fp8")
