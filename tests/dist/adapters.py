"""Spread experts with what every rank has whole beside them: PEFT's adapters; and experts whose weights are held in few bits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moefuse
from moefuse.passes.lower import spread
from tests.cpu.capture_case import Seen, capturing
from tests.dist import faults, layers, scenes
from tests.zoo.tiny import build

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
LINEARS = r".*experts\.\d+\.[02]"
"""Those of each expert in a list."""


class Dense(nn.Module):
    """All experts on all tokens by batched products, beside what adapters are in."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = layers.Transposed(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


OF_DENSE = ["mlp.up", "mlp.down"]


class Layer(nn.Module):
    """The experts of one layer of a model of transformers, with their router."""

    def __init__(self) -> None:
        super().__init__()
        model = build("qwen3_moe")
        self.mlp = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


def adapted(
    rank: int, first: bool, behind: str | None, grad: bool, dense: bool = False
) -> tuple[float, list[float], list[tuple[int, ...]], list[str]]:
    """PEFT's ``target_parameters``, before ``parallelize`` or behind it, compiled or (None) as written, in two calls.

    Returns:
        The largest error of outputs, those of gradients relative to the largest value of each, ranks of what was fused, what was skipped.
    """
    import peft

    plain: nn.Module = Dense() if dense else Layer()
    targets = OF_DENSE if dense else PARAMETERS
    config = peft.LoraConfig(r=4, target_parameters=targets, target_modules=[], init_lora_weights=False)
    model, seen = copy.deepcopy(plain), Seen()
    if not first:
        moefuse.parallelize(model, scenes.mesh())
    adapters = []
    for m in (plain, model):
        torch.manual_seed(1)
        adapters.append(peft.get_peft_model(m, config))  # type: ignore[arg-type]
    single, model = adapters
    if first:
        moefuse.parallelize(model, scenes.mesh())
    run = model if behind is None else torch.compile(model, backend=capturing(seen, behind=behind), fullgraph=True)
    width = layers.H if dense else next(p for n, p in single.named_parameters() if "lora_A" in n and "base_layer.lora" in n).shape[1]
    every = [torch.randn(1, n, width, generator=torch.Generator().manual_seed(r)) for r, n in enumerate((5, 7))]
    off, grads = 0.0, []
    for _ in range(2):
        model.zero_grad()
        single.zero_grad()
        with torch.set_grad_enabled(grad):
            out, wanted = run(every[rank]), [single(x) for x in every]
        off = max(off, (out - wanted[rank]).abs().max().item())
        if grad:
            out.square().mean().backward()
            (sum((w.square().mean() for w in wanted), torch.zeros(())) / 2).backward()
            grads += _apart(model, single)
    return off, grads, [f.spec.lora for f in seen.report.fused], [s.code for s in seen.report.skipped]


def scaled(rank: int) -> str:
    """What is raised where ranks scale their adapters by other numbers."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=4 + rank, target_parameters=OF_DENSE, target_modules=[], init_lora_weights=False)
    model = peft.get_peft_model(Dense(), config)  # type: ignore[arg-type]
    moefuse.parallelize(model, faults.mesh(30))
    run: Any = torch.compile(model, backend=capturing(Seen(), behind=scenes.BEHIND), fullgraph=True)
    return faults.tried(lambda: run(torch.randn(1, 5, layers.H)))[0]


def merged(rank: int) -> tuple[str, float]:
    """What is said of ``merge`` into spread experts, and the error of the model that is merged when they are whole again."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_parameters=PARAMETERS, target_modules=[], init_lora_weights=False)
    single: Any = peft.get_peft_model(Layer(), config)  # type: ignore[arg-type]
    model = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh())
    x = torch.randn(1, 5, single.base_model.model.mlp.gate.weight.shape[1], generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        model(x)
        try:
            model.merge_adapter()
            said = ""
        except moefuse.ParallelError as error:
            said = str(error)
        moefuse.unparallelize(model)
        off = (model.merge_and_unload()(x) - single.merge_and_unload()(x)).abs().max().item()
    assert not any(name.startswith("_moefuse") for module in model.modules() for name in vars(module))
    return said, off


def frozen(rank: int) -> tuple[list[bool], list[bool], int]:
    """PEFT's two adapters of experts in a list, of which one is frozen when the list has their weights.

    Returns:
        Whether Parameters of the frozen one are, and those of the other one; how many Parameters an expert's module says that it has.
    """
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=LINEARS, init_lora_weights=False)
    model: Any = peft.get_peft_model(layers.Model(layers.Listed, 4), config)  # type: ignore[arg-type]
    model.add_adapter("two", config)
    model.base_model.set_adapter(["default", "two"])
    moefuse.parallelize(model, scenes.mesh())
    model.set_requires_grad("default", requires_grad=False)
    model(torch.randn(5, layers.H, generator=torch.Generator().manual_seed(rank))).sum().backward()
    of = {which: [p for name, p in model.named_parameters() if f"_{which}_" in name] for which in ("default", "two")}
    assert all(p.grad is None for p in of["default"])
    assert any(p.grad is not None for p in of["two"])
    inner = model.base_model.model.first.experts[0][0].lora_A["default"]
    return [p.requires_grad for p in of["default"]], [p.requires_grad for p in of["two"]], len(list(inner.parameters()))


def saved(rank: int, folder: str, kind: str) -> list[str]:
    """``save_pretrained`` of PEFT's model that was there before experts were spread: the names of the tensors in it that differ."""
    import peft
    from safetensors.torch import load_file

    torch.manual_seed(0)
    how: dict[str, Any] = {"target_parameters": PARAMETERS, "target_modules": []} if kind == "stacked" else {"target_modules": LINEARS}
    inner: Any = Layer() if kind == "stacked" else layers.Model(layers.Listed, 4)
    single: Any = peft.get_peft_model(inner, peft.LoraConfig(r=2, init_lora_weights=False, **how))
    model = copy.deepcopy(single)
    moefuse.parallelize(model, scenes.mesh())
    model.save_pretrained(f"{folder}/spread")
    if rank:
        return []
    single.save_pretrained(f"{folder}/single")
    found, wanted = (load_file(f"{folder}/{name}/adapter_model.safetensors") for name in ("spread", "single"))
    assert wanted
    return [name for name in found.keys() | wanted.keys() if name not in found or name not in wanted or not found[name].equal(wanted[name])]


def _apart(model: nn.Module, single: nn.Module) -> list[float]:
    """Errors of the mean of gradients over ranks, relative to the largest of each."""
    theirs, found = dict(single.named_parameters()), []
    for name, parameter in model.named_parameters():
        wanted, grad = theirs[name].grad, parameter.grad
        assert (wanted is None) == (grad is None), name
        if wanted is None or grad is None:
            continue
        mean: Any = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        if not isinstance(grad, DTensor):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        found.append(((mean - wanted).abs().max() / wanted.abs().max()).item())
    return found


def left_parametrised(rank: int) -> list[str]:
    """What is said of parametrisations that stay: made within a call of the layer, and outside of one."""
    torch.manual_seed(0)
    said = []
    for within in (True, False):
        layer: Any = Layer().mlp
        moefuse.parallelize(layer, scenes.mesh())
        x = torch.randn(1, 3, layer.experts.gate_up_proj.shape[-1])
        try:
            if within:
                hook = layer.experts.register_forward_pre_hook(_parametrise)
                layer(x)
                hook.remove()
            else:
                _parametrise(layer.experts)
            layer(x)
        except moefuse.ParallelError as error:
            said.append(str(error))
    return said


def _parametrise(experts: nn.Module, *_: object) -> None:
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


@dataclass(frozen=True)
class Held:
    """``off``: the error relative to the largest value; ``bits``: whether tokens sent as they are give the same; ``said`` of the way."""

    off: float
    bits: bool
    encodings: list[str]
    said: list[str]
    skipped: list[str]


ODD = {"tiny": 1e-20, "zeros": 0.0, "huge": 1e20, "infinite": float("inf"), "no number": float("nan")}
"""What one number of each rank's first token is multiplied by, or its whole."""


def held(
    rank: int, kind: str, counts: tuple[int, ...], train: bool | str = False, odd: str = "tiny", pays: bool = True, **how: Any
) -> Held:
    """Experts in float8 beside the op on one process, which rounds activations as this one does.

    Args:
        train: tokens want gradients; "one": the second rank alone is in grad mode, and nothing wants any.
        pays: tokens are rounded however few they are.
    """
    from tests.programs import fp8

    single = nn.Sequential(getattr(fp8, kind)())
    model, seen = copy.deepcopy(single), Seen()
    moefuse.parallelize(model, scenes.mesh(), **how)
    x = torch.randn(counts[rank], fp8.H, generator=torch.Generator().manual_seed(0 if how.get("tokens") else rank)).bfloat16()
    x[:1, : 1 if odd in ("infinite", "no number") else None] *= ODD[odd]
    x.requires_grad_(train is True)
    for module in (single, model) if train == "one" else ():
        module.requires_grad_(False)

    def run(of: nn.Module, seen: Seen) -> Tensor:
        torch._dynamo.reset()
        out: Tensor = torch.compile(of, backend=capturing(seen, behind=scenes.BEHIND))(x)
        return out.detach()

    with (
        torch.set_grad_enabled(train is True or (train == "one" and rank == 1)),
        mock.patch.object(spread, "pays_to_round", (lambda *_: True) if pays else spread.pays_to_round),
    ):
        out, wanted = run(model, seen), run(single, Seen()).double()
        with mock.patch.object(spread.Spread, "rounds", return_value=None):
            unrounded = run(model, Seen())
    same = torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.isnan(), unrounded.isnan())
    out, wanted, unrounded = (t.nan_to_num(0.0) for t in (out, wanted, unrounded))
    off = 0.0 if not len(x) else ((out.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
    fused = seen.report.fused
    said = [f.parallel for f in fused]
    return Held(off, same and torch.equal(out, unrounded), [f.spec.encoding for f in fused], said, [s.code for s in seen.report.skipped])
