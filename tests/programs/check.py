"""Run a program compiled and as it is, and compare outputs, gradients and inputs within an error budget that comes from fp64."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import settings
from torch import Tensor, nn

import moefuse
from moefuse.config import Options
from moefuse.diagnosis import trial
from moefuse.report.entries import Fused, Skipped
from moefuse.spec import ExpertsSpec
from tests.programs.effects import words
from tests.programs.model import MoE, build, gold, inputs_for
from tests.programs.mutations import BY_NAME
from tests.programs.nearby import nearby
from tests.programs.program import Program, Sorted

BAND: dict[torch.dtype, float] = {torch.float32: 16 * 2.0**-23, torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
"""Rounding allowance relative to the size of a tensor, for results where eager happens to be exact: sums in another order; in bfloat16 they
are float32 inside, and an expert's row and the result are rounded once each."""


@dataclass
class Outcome:
    """What a compilation reported."""

    fused: list[Fused] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    graphs: int = 0

    def __str__(self) -> str:
        lines = [f"graphs={self.graphs}"]
        lines += [f"fused {f.tier} {f.domain}: {f.spec}" for f in self.fused]
        return "\n".join(lines + [f"skipped {s.code}: {s.message} ({s.location})" for s in self.skipped])


@dataclass
class Run:
    """Outputs, inputs after the call, and gradients of one execution; all detached."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    grads: dict[str, Tensor]


def light(outcome: Outcome, options: Options | None = None) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A Dynamo backend: moefuse's passes, then eager execution of the rewritten graph."""
    from moefuse.passes import driver

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        result = driver.fuse(gm, example_inputs, options or Options())
        outcome.fused += result.fused
        outcome.skipped += result.skipped
        outcome.graphs += 1
        return gm.forward

    return backend


def execute(
    call: Callable[..., Any], model: nn.Module, inputs: tuple[Tensor, ...], *, grad: bool = True, autocast: torch.dtype | None = None
) -> Run:
    """Call, and differentiate a fixed scalar of the floating outputs. Inputs are fed as copies, so that the call may write to them."""
    casts = torch.autocast("cpu", autocast, enabled=autocast is not None)
    if not grad:
        fed = [t.detach().clone() for t in inputs]
        torch.manual_seed(0)
        with torch.no_grad(), casts:
            return Run(tuple(call(*fed)), tuple(fed), {})
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    fed = [t.clone() for t in leaves]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with casts:
        outputs = call(*fed)
    generator, loss = torch.Generator().manual_seed(7), torch.zeros((), dtype=torch.float64)
    for out in outputs:
        if out.is_floating_point() and out.requires_grad:
            direction = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            loss = loss + (out.double() * direction).sum()
    if loss.requires_grad:
        loss.backward()
    named = {**dict(model.named_parameters()), **{f"input{i}": leaf for i, leaf in enumerate(leaves) if leaf.is_floating_point()}}
    grads = {name: torch.zeros_like(t) if t.grad is None else t.grad.clone() for name, t in named.items()}
    model.zero_grad(set_to_none=True)
    return Run(tuple(o.detach().clone(memory_format=torch.preserve_format) for o in outputs), tuple(t.detach().clone() for t in fed), grads)


def _problem(
    what: str, got: Tensor, pairs: list[tuple[Tensor, Tensor]], scale: float, factor: float, autocast: torch.dtype | None
) -> str | None:
    """What is wrong with a tensor, beside eager's and the exact one at some points (the first is its own)."""
    eager, exact = pairs[0]
    if got.shape != eager.shape:
        return f"{what}: shape {tuple(got.shape)}, eager {tuple(eager.shape)}"
    if got.dtype != eager.dtype:
        return f"{what}: dtype {got.dtype}, eager {eager.dtype}"
    if what.startswith("outputs") and got.is_contiguous() != eager.is_contiguous():
        return f"{what}: strides {got.stride()}, eager {eager.stride()}"
    if not got.is_floating_point():
        return None if torch.equal(got, eager) else f"{what}: integers differ"
    if got.numel() == 0:
        return None
    ours, theirs = _error(got, exact), max(_error(a, b) for a, b in pairs)
    limit = factor * theirs + BAND.get(autocast or got.dtype, 1e-12) * scale
    return None if ours <= limit else f"{what}: error {ours:.3g} against fp64, eager's is {theirs:.3g}, limit {limit:.3g}"


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).abs().max())


def _problems(got: Run, pairs: list[tuple[Run, Run]], factor: float, autocast: torch.dtype | None) -> list[str]:
    """What is wrong with a run, beside eager's and exact ones."""
    eager, exact = pairs[0]
    assert len(got.outputs) == len(eager.outputs)
    found = []
    for kind in ("outputs", "inputs"):
        for i, value in enumerate(getattr(got, kind)):
            c = getattr(exact, kind)[i]
            scale = float(c.double().abs().max()) if c.numel() else 0.0
            both = [(getattr(a, kind)[i], getattr(b, kind)[i]) for a, b in pairs]
            found.append(_problem(f"{kind}[{i}]", value, both, scale, factor, autocast))
    assert got.grads.keys() == eager.grads.keys()
    # A gradient may be zero but for cancellation (top-1 renormalised): its scale is then what the others say.
    largest = max((float(g.abs().max()) for g in exact.grads.values() if g.numel()), default=0.0)
    for name, g in exact.grads.items():
        scale = max(float(g.abs().max()) if g.numel() else 0.0, 0.1 * largest)
        found.append(
            _problem(f"grad of {name}", got.grads[name], [(a.grads[name], b.grads[name]) for a, b in pairs], scale, factor, autocast)
        )
    return [problem for problem in found if problem is not None]


def compare(
    got: Run,
    eager: Run,
    exact: Run,
    factor: float = 2.0,
    near: Callable[[], list[tuple[Run, Run]]] = list,
    autocast: torch.dtype | None = None,
) -> None:
    """``got`` equals ``eager`` within ``factor`` of eager's own error plus a few roundings.

    Where a result is all cancellation, eager's error at one point is luck: ``near`` are eager's and exact runs one rounding away.
    """
    found = _problems(got, [(eager, exact)], factor, autocast)
    more = near() if found else []
    found = _problems(got, [(eager, exact), *more], factor, autocast) if more else found
    assert not found, found[0]


def check_model(model: MoE, *, plain: bool, full: bool = False, grad: bool = True, autocast: torch.dtype | None = None) -> Outcome:
    """Compile and compare on two inputs with the same shapes; ``plain`` takes the slot-by-slot reference for fp64.

    ``full`` goes through ``backend="moefuse"`` and Inductor, otherwise the rewritten graph runs in eager.
    """
    torch._dynamo.reset()
    outcome = Outcome()

    def exactly(of: MoE, inputs: tuple[Tensor, ...]) -> Run:
        exact = gold(of, plain=plain)
        return execute(exact, exact, tuple(t.double() if t.is_floating_point() else t for t in inputs), grad=grad)

    if full:
        compiled = torch.compile(model, backend="moefuse", fullgraph=True)
    else:
        compiled = torch.compile(model, backend=light(outcome), fullgraph=True)
    for seed in range(2):
        inputs = inputs_for(model, seed, autocast)
        run = functools.partial(execute, inputs=inputs, grad=grad, autocast=autocast)
        near = functools.partial(_near, model, inputs, exactly, grad, autocast)
        compare(run(compiled, model), run(model, model), exactly(model, inputs), near=near, autocast=autocast)
    if full:
        report = moefuse.last_report()
        outcome = Outcome(list(report.fused), list(report.skipped), report.graph_count)
    return outcome


def check_explained(model: MoE, outcome: Outcome, *, grad: bool = True) -> None:
    """``moefuse.explain`` says what the compilation said, and leaves the model and its inputs as they were."""
    inputs, state = inputs_for(model, 0), {name: value.clone() for name, value in model.state_dict().items()}
    fed = [t.clone() for t in inputs]
    torch._dynamo.reset()
    # Only of the first call: what explain says of later ones is not what ``outcome`` is about.
    with torch.set_grad_enabled(grad), mock.patch.object(trial, "later_sizes", return_value=[]):
        report = moefuse.explain(model, *fed)
    # A report has one line for a layer, however many graphs it is refused in.
    found = (len(report.fused), {skipped.code for skipped in report.skipped})
    told = (len(outcome.fused), {skipped.code for skipped in outcome.skipped})
    assert report.graph_breaks or found == told, f"explained as\n{report}\n{outcome}"  # the compilation was asked for one graph
    for before, after in (*zip(inputs, fed, strict=True), *((state[name], value) for name, value in model.state_dict().items())):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def explained(p: Program, full: bool) -> bool:
    """Whether a program is explained, too: it costs as much as the rest of its check, so only some are, and in the deep profile all."""
    return full or settings().max_examples > 100 or zlib.crc32(repr(p).encode()) % 8 == 0


def _near(
    model: MoE, inputs: tuple[Tensor, ...], exactly: Callable[[MoE, tuple[Tensor, ...]], Run], grad: bool, autocast: torch.dtype | None
) -> list[tuple[Run, Run]]:
    return [
        (execute(twin, twin, given, grad=grad, autocast=autocast), exactly(twin, given)) for twin, given in nearby(model, inputs, autocast)
    ]


def check_exact(
    model: nn.Module, *inputs: tuple[Tensor, ...], options: Options | None = None, dynamic: bool = False, tolerance: float = 1e-4
) -> Outcome:
    """Any module, in one graph, on each of the inputs: outputs and gradients equal to those in double precision.

    The first input of each is differentiated, too; a parameter without a gradient has zeros.
    """
    torch._dynamo.reset()
    outcome, exact = Outcome(), copy.deepcopy(model).double()
    compiled = torch.compile(model, backend=light(outcome, options), fullgraph=True, dynamic=dynamic)
    for first, *rest in inputs:
        results: list[list[Tensor]] = []
        for called, owner, value in ((compiled, model, first), (exact, exact, first.double())):
            owner.zero_grad()
            leaf = value.clone().requires_grad_()
            out = called(leaf, *rest)
            out.square().sum().backward()
            grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (leaf, *owner.parameters())]
            results.append([out.detach(), *grads])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=0.1 * tolerance)
    return outcome


def check_read(model: nn.Module, *shape: int, verify: Any = "off") -> Outcome:
    """A layer in two calls with tokens of a shape. Without verification: what is read wrongly shows in the values."""
    inputs = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return check_exact(model, *((x,) for x in inputs), options=Options(verify=verify))


def check_spec(p: Program, spec: ExpertsSpec) -> None:
    """What a template read from the graph is what the program says."""
    expected = {
        "top_k": p.top_k,
        "intermediate": p.inter,
        "activation": p.body.activation,
        "bias": p.body.bias,
        "weights": "stacked" if p.store.kind in ("stacked", "flat") else "per_expert",
        "layout": p.store.layout,
    }
    if p.top_k > 1:
        # With one slot per token, weighted input rows are as good as token rows.
        expected["weight_on"] = p.weight_on
    if p.inter > 1:
        # With one feature per half, merged and interleaved are the same thing.
        expected |= {"gating": p.body.gating, "up_first": p.body.up_first}
    if p.body.activation == "identity":
        # Gate and up are interchangeable.
        expected.pop("up_first", None)
    found = {name: getattr(spec, name) for name in expected}
    assert found == expected, f"{found}, expected {expected}\n{p}"


def known_gap(p: Program) -> bool:
    """Programs that only have to be right, fused or not: sizes of one leave open which dimension is which, and the passes do not guess.

    With one slot, a loop over slots weighs every token before its mask: that is the grouped tier.
    """
    only_token = p.top_k == 1 and all(size == 1 for size in p.tokens)
    one_slot = p.top_k == 1 and getattr(p.spelling, "weight", None) == "slot_loop"
    return p.inter == 1 or one_slot or (only_token and p.spelling.__class__.__name__ in ("Dense", "Masked"))


def check_program(p: Program, *, full: bool = False) -> Outcome:
    """A positive program: equal to the reference, and fused as one region of the expected domain and tier."""
    model = build(p)
    outcome = check_model(model, plain=True, full=full)
    said = words.untrue(outcome, sources())
    assert not said, said
    if explained(p, full):
        check_explained(model, outcome)
    if known_gap(p):
        return outcome
    assert (len(outcome.fused), outcome.skipped) == (1, []), f"expected one fused region\n{outcome}\n{p}"
    fused = outcome.fused[0]
    assert fused.domain in p.domains, f"domain {fused.domain}, expected {p.domains}\n{p}"
    assert fused.tier == p.tier or p.inter == 1, f"tier {fused.tier}, expected {p.tier}: {fused.spec}\n{p}"
    if p.tier == fused.tier == "fused":
        check_spec(p, fused.spec)
    spec = fused.spec
    assert (spec.num_experts, spec.hidden) == (p.experts, p.hidden), f"{spec}\n{p}"
    assert spec.dtype.removeprefix("torch.") == p.dtype
    return outcome


def check_autocast(p: Program, autocast: torch.dtype) -> Outcome:
    """A positive program in float32 under autocast: fused as it is without, and as far from fp64 as eager is under autocast."""
    model = build(p)
    outcome = check_model(model, plain=True, autocast=autocast)
    if known_gap(p) or (not outcome.fused and not check_model(model, plain=True).fused):
        return outcome
    assert len(outcome.fused) == 1, f"expected one fused region\n{outcome}\n{p}"
    fused = outcome.fused[0]
    assert (fused.domain in p.domains, fused.tier) == (True, p.tier), f"{fused.domain} {fused.tier}: {fused.spec}\n{p}"
    # Autocast leaves grouped_mm alone, and so does the op that stands for it in transformers.
    compute = "" if isinstance(p.spelling, Sorted) else str(autocast).removeprefix("torch.")
    assert (fused.spec.dtype, fused.spec.compute) == ("float32", compute), f"{fused.spec}\n{p}"
    return outcome


def runs(p: Program, autocast: torch.dtype) -> bool:
    """Whether eager takes a program under autocast: not where it adds to a tensor of another dtype than it has there, or overflows."""
    model = build(p)
    try:
        found = [execute(model, model, inputs_for(model, seed, autocast), autocast=autocast) for seed in range(2)]
    except RuntimeError:
        return False
    return all(bool(t.isfinite().all()) for one in found for t in (*one.outputs, *one.grads.values()))


@functools.cache
def sources() -> str:
    """The text of the programs: whose words a refusal may use."""
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))


def check_near_miss(p: Program, name: str) -> Outcome:
    """A mutated program equals eager, whatever was fused; under no_grad where eager cannot differentiate it."""
    mutation = BY_NAME[name]
    model = mutation.build(p)
    grad = mutation.grad and differentiable(model)
    outcome = check_model(model, plain=False, grad=grad)
    said = words.untrue(outcome, sources())
    assert not said, said
    if explained(p, full=False):
        check_explained(model, outcome, grad=grad)
    return outcome


def differentiable(model: MoE) -> bool:
    """Whether autograd takes a model: not where a value that it saved is written to."""
    try:
        execute(model, model, inputs_for(model))
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True
