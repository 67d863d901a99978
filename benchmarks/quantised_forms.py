"""What becomes of experts that real libraries quantised: fused as they are held, or refused, with the error and the memory of a call.

python benchmarks/quantised_forms.py [NAME...]

Each form is a layer of a tiny random model in bfloat16 (8 experts of 256x128, two per token, three tokens), one graph or the loop of
transformers 4.57 (only experts with tokens), on a CPU; without gradients, or in training, with those of tokens. "as on CUDA": what a CPU
leaves alone, for nothing is quicker there, is fused all the same. Prints the table of results/quantised.md. A library that is not installed
is said to be missing. ``error`` is the compiled call's difference from the eager one over the largest value (that of a gradient, if it is
more), ``peak`` the most memory that one call holds at once, compiled by moefuse, over that of the eager program.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse.passes.match import encodings
from moefuse.passes.rules.rows import foreign_flat

H, M, E, K, TOKENS = 256, 128, 8, 2, 3
BF16 = torch.bfloat16


class Expert(nn.Module):
    """Three ``nn.Linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(H, M, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(M, H, bias=False, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Loop(nn.Module):
    """A loop over modules. ``way``: "each" has a token or none, "hit" runs experts with tokens only, "dense" all experts on all tokens."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(H, E, bias=False, dtype=BF16)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero().flatten() if self.way == "hit" else range(E):
            if self.way == "dense":
                out = out + self.experts[e](x) * (weights * (ids == e)).sum(-1, keepdim=True)
                continue
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


class Stacked(nn.Module):
    """Sorted rows and grouped products, as transformers 5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False, dtype=BF16)
        self.gate_up, self.down = (nn.Parameter(torch.randn(s, dtype=BF16) / 16) for s in ((E, 2 * M, H), (E, H, M)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        ordered, order = ids.flatten().sort()
        ends = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // K], self.gate_up.transpose(-1, -2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-1, -2), offs=ends)
        return torch.zeros_like(x).index_add(0, order // K, y * weights.flatten()[order, None])


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The same with other modules in place of the experts' projections."""
    for expert in model.experts:  # type: ignore[union-attr]
        for name, linear in list(expert.named_children()):
            setattr(expert, name, make(linear))
    return model


def torchao(config: str, way: str = "each", **options: Any) -> nn.Module:
    """Weights that are tensor subclasses."""
    from torchao import quantization as library

    made = getattr(library, config)(**options)
    model: nn.Module = Stacked() if way == "stacked" else Loop(way)
    if way == "stacked":
        library.quantize_(model, library.FqnToConfig({"gate_up": made, "down": made}), filter_fn=None)
    else:
        library.quantize_(model.experts, made)
    return model


def quanto(kind: str, way: str = "each") -> nn.Module:
    """Weights that are tensor subclasses, some made of another subclass."""
    from optimum import quanto as library

    model = Loop(way)
    if kind == "qint4":
        model = model.float()  # in 16 bits it has a layout for one kernel
    library.quantize(model.experts, weights=getattr(library, kind))
    library.freeze(model.experts)
    return model


def hqq(bits: int, way: str = "each") -> nn.Module:
    """Modules that unpack in PyTorch."""
    from hqq.core import quantize as library

    config = library.BaseQuantizeConfig(nbits=bits, group_size=64)
    library.HQQLinear.set_backend(library.HQQBackend.PYTORCH)
    return replaced(Loop(way), lambda linear: library.HQQLinear(linear, config, compute_dtype=BF16, device="cpu"))


def bitsandbytes(kind: str, way: str = "each") -> nn.Module:
    """Modules with operators, or with codes that move between attributes."""
    import bitsandbytes as library

    def make(linear: nn.Linear) -> nn.Module:
        n, k = linear.out_features, linear.in_features
        made: nn.Module
        if kind == "int8":
            made = library.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False)
            made.weight = library.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            made = library.nn.Linear4bit(k, n, bias=False, compute_dtype=BF16, quant_type="nf4", compress_statistics=kind == "nested")
            made.weight = library.nn.Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=kind == "nested"
            )
        made.support_avx512bf16_for_cpu = False  # a layout for one kernel, which no other device has
        return made.to("cpu")

    return replaced(Loop(way), make)


def adapted(model: Any) -> nn.Module:
    """Adapters beside each projection, which are trained."""
    import peft

    model.is_loaded_in_4bit = True
    config = peft.LoraConfig(r=8, target_modules=["gate", "up", "down"], init_lora_weights=False)
    return peft.get_peft_model(model, config).base_model.model  # type: ignore[no-any-return]


def compressed(scheme: str, way: str = "each") -> nn.Module:
    """``nn.Linear`` whose forward is another."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    model = Loop(way)
    frozen = QuantizationStatus.FROZEN
    config = QuantizationConfig(
        config_groups={scheme: ["Linear"]}, quant_method="compressed-tensors", quantization_status=frozen, ignore=["router"]
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            if name.endswith("scale"):
                value.data.fill_(0.01)
            elif name.endswith("zero_point"):
                value.data.zero_()
    return model


FORMS: Mapping[str, tuple[str, Callable[[], nn.Module]]] = {
    "torchao fp8 weight-only, stacks": ("torchao", lambda: torchao("Float8WeightOnlyConfig", "stacked")),
    "torchao fp8 weight-only, modules": ("torchao", lambda: torchao("Float8WeightOnlyConfig")),
    "torchao fp8 weight-only, hit experts": ("torchao", lambda: torchao("Float8WeightOnlyConfig", "hit")),
    "torchao fp8 with dynamic activations": ("torchao", lambda: torchao("Float8DynamicActivationFloat8WeightConfig", "dense")),
    "torchao int8 weight-only, stacks": ("torchao", lambda: torchao("Int8WeightOnlyConfig", "stacked")),
    "torchao int8 weight-only, modules": ("torchao", lambda: torchao("Int8WeightOnlyConfig")),
    "torchao int8 with dynamic activations": ("torchao", lambda: torchao("Int8DynamicActivationInt8WeightConfig", "dense")),
    "torchao int4 in int8 (Intx), groups of 32": ("torchao", lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "torchao int4": ("torchao", lambda: torchao("Int4WeightOnlyConfig")),
    "quanto int8": ("optimum-quanto", lambda: quanto("qint8")),
    "quanto fp8": ("optimum-quanto", lambda: quanto("qfloat8")),
    "quanto int4, groups of 128 (float32)": ("optimum-quanto", lambda: quanto("qint4")),
    "quanto int2": ("optimum-quanto", lambda: quanto("qint2")),
    "HQQ 8 bits, groups of 64": ("hqq", lambda: hqq(8)),
    "HQQ 4 bits, groups of 64": ("hqq", lambda: hqq(4)),
    "HQQ 4 bits, hit experts": ("hqq", lambda: hqq(4, "hit")),
    "HQQ 3 bits, groups of 64": ("hqq", lambda: hqq(3)),
    "bitsandbytes int8": ("bitsandbytes", lambda: bitsandbytes("int8", "dense")),
    "bitsandbytes nf4": ("bitsandbytes", lambda: bitsandbytes("nf4")),
    "bitsandbytes nf4, as on CUDA": ("bitsandbytes", lambda: bitsandbytes("nf4")),
    "bitsandbytes nf4, nested, as on CUDA": ("bitsandbytes", lambda: bitsandbytes("nested")),
    "bitsandbytes nf4, nested, in training, as on CUDA": ("bitsandbytes", lambda: bitsandbytes("nested")),
    "bitsandbytes nf4, hit experts, in training, as on CUDA": ("bitsandbytes", lambda: bitsandbytes("nf4", "hit")),
    "bitsandbytes nf4 with PEFT's adapters, in training, as on CUDA": ("bitsandbytes", lambda: adapted(bitsandbytes("nested", "hit"))),
    "compressed-tensors FP8 (static)": ("compressed-tensors", lambda: compressed("FP8", "dense")),
    "compressed-tensors FP8_DYNAMIC": ("compressed-tensors", lambda: compressed("FP8_DYNAMIC", "dense")),
    "compressed-tensors W4A16": ("compressed-tensors", lambda: compressed("W4A16", "dense")),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    form: str
    library: str
    told: str
    error: str = ""
    peak: str = ""

    def __str__(self) -> str:
        return f"| {self.form} | {self.told} | {self.error} | {self.peak} |"


def peak(run: Callable[[], object]) -> int:
    """The most memory that a call holds at once, in bytes, by the profiler's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def row(name: str) -> Row:
    """What becomes of one form."""
    package, make = FORMS[name]
    try:
        version = f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return Row(name, package, "not installed")
    torch.manual_seed(0)
    torch._dynamo.reset()
    trained = "in training" in name
    with torch.set_grad_enabled(trained), _as_on_cuda("as on CUDA" in name):
        try:
            model = make()
            x = torch.randn(TOKENS, H, dtype=model.router.weight.dtype).requires_grad_(trained)  # type: ignore[union-attr, arg-type]
            want = results(model, model, x)
        except Exception as error:
            return Row(name, version, f"does not run here: {_line(error)}")
        try:
            compiled = torch.compile(model, backend="moefuse", dynamic=False)
            got = results(compiled, model, x)
        except Exception as error:
            return Row(name, version, f"cannot be compiled, by any backend: {_line(error)}")
        apart = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(got, want, strict=True))
        ours, theirs = peak(lambda: results(compiled, model, x)), peak(lambda: results(model, model, x))
    return Row(name, version, told(moefuse.last_report()), f"{apart:.1e}", f"{ours / max(theirs, 1):.2f}")


def results(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result of a call, and in training the gradients of tokens and of what is trained."""
    out = run(x)
    if not torch.is_grad_enabled():
        return [out]
    wanted = [x, *(p for name, p in model.named_parameters() if p.requires_grad and "router" not in name)]
    return [out, *(g for g in torch.autograd.grad(out.float().square().sum(), wanted, materialize_grads=True, allow_unused=True))]


@contextlib.contextmanager
def _as_on_cuda(wanted: bool) -> Iterator[None]:
    """What a CPU leaves alone, for nothing is quicker there, is fused."""
    before = foreign_flat.QUICKER, encodings.OF_HIT_EXPERTS
    if wanted:
        foreign_flat.QUICKER = encodings.OF_HIT_EXPERTS = ("cpu",)
    try:
        yield
    finally:
        foreign_flat.QUICKER, encodings.OF_HIT_EXPERTS = before


def told(report: Any) -> str:
    """What the report says of the layer."""
    if report is None:
        return "no report"
    found = [f"fused as {f.spec.encoding}" if f.spec.encoding else "fused, unpacked by the program" for f in report.fused]
    found += [f"`{s.code}`: {s.message.partition(' does not read: ')[2] or s.message}" for s in report.skipped]
    unsaid = r" at /[^ ;,()|]*|expert weights are held as \w+: |; torch's hint: .*"
    unsaid += "|the program unpacks them one by one; .* they are not multiplied as they are, for "
    return re.sub(unsaid, "", "; ".join(dict.fromkeys(found)).replace("|", "/")) or "nothing found"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160].replace("|", "/")


def main(names: list[str]) -> None:
    """Print the table, and behind it the libraries' versions."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("| form | what becomes of it | error | peak |")
    print("|---|---|---|---|")
    libraries: dict[str, None] = {}
    above = ""
    for name in FORMS:
        if not names or any(part in name for part in names):
            found = row(name)
            libraries[found.library] = None
            print(replace(found, told="as above") if found.told == above else found, flush=True)
            above = found.told
    print(", ".join(libraries))


if __name__ == "__main__":
    main(sys.argv[1:])
