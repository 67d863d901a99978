"""What a user gives to :func:`moefuse.warmup`, as a list of layers to measure: equal layers once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from moefuse import _torch_private
from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.reference import GATINGS
from moefuse.report.grouping import module_names
from moefuse.spec import ExpertsSpec, op_gating
from moefuse.tuning import sites
from moefuse.tuning.problem import Problem


@dataclass
class Target:
    """A layer (or several equal ones) to measure.

    Attributes:
        problem: with 0 tokens.
        kind: keyword arguments of :class:`moefuse.kernels.triton.tune.call.Kind`.
        sites: the fused regions that it stands for; none for a spec.
    """

    spec: ExpertsSpec
    problem: Problem
    kind: dict[str, Any]
    device: torch.device
    names: list[str] = field(default_factory=list)
    sites: list[sites.Site] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The modules, or the number of the spec."""
        return module_names(self.names)


def of(what: Any) -> tuple[list[Target], list[str]]:
    """(targets, notes on what is none).

    Raises:
        TypeError: neither a model, nor specs.
        ValueError: a spec that is none of a fused op.
    """
    if isinstance(what, ExpertsSpec):
        return _of_specs([what]), []
    if isinstance(what, nn.Module) or (callable(what) and not isinstance(what, type)):
        return _of_model(what)
    if isinstance(what, Iterable) and not isinstance(what, str | bytes):
        specs = list(what)
        if specs and all(isinstance(s, ExpertsSpec) for s in specs):
            return _of_specs(specs), []
    raise TypeError(f"moefuse.warmup needs a model, or one or more moefuse.ExpertsSpec, got {type(what).__name__}")


def _of_specs(specs: Sequence[ExpertsSpec]) -> list[Target]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return _equal_once([Target(s, _problem(s), kind_of(s), device, [f"spec {i}"]) for i, s in enumerate(specs)])


def _problem(spec: ExpertsSpec) -> Problem:
    legal = spec.activation in ACTIVATIONS and op_gating(spec.gating) in GATINGS
    sizes = spec.num_experts, spec.top_k, spec.hidden, spec.intermediate
    if not legal or min(sizes) < 1 or not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
        raise ValueError(f"this spec is not one of a fused op, so there is nothing to tune: {spec}")
    return Problem(
        tokens=0,
        top_k=spec.top_k,
        experts=spec.num_experts,
        hidden=spec.hidden,
        inter=spec.intermediate,
        out=spec.hidden_out or spec.hidden,
        gating=op_gating(spec.gating),
        dtype=spec.dtype,
        transposed_in=spec.layout[0] == "in-out",
        transposed_out=spec.layout[1] == "in-out",
        separate=spec.weights == "per_expert",
    )


def kind_of(spec: ExpertsSpec) -> dict[str, Any]:
    """What a call of the layer is besides its sizes."""
    arg0, arg1, *_ = (*spec.activation_args, 0.0, 0.0)
    return {
        "activation": spec.activation,
        "args": (arg0, arg1),
        "up_first": spec.up_first,
        "on_input": spec.weight_on == "input",
        "out_dtype": "",
        "biases": (spec.bias, spec.bias and spec.gating == "split", spec.bias),
    }


def _of_model(model: Callable[..., Any]) -> tuple[list[Target], list[str]]:
    with _torch_private.not_compiled(model) as inner:
        owner = inner if isinstance(inner, nn.Module) else getattr(inner, "__self__", None)
    whole = isinstance(owner, nn.Module)
    found = sites.of([*owner.parameters(), *owner.buffers()]) if isinstance(owner, nn.Module) else sites.of(None)
    notes = [] if whole or not found else ["a function's weights are not known to moefuse: every fused region of this process is measured"]
    if not found:
        notes.append(
            "no fused region on a CUDA device holds weights of this model: run the compiled model once, so that it is compiled, "
            "then call moefuse.warmup (moefuse.last_report() says what was fused); or give it moefuse.ExpertsSpec"
        )
    trained = [s for s in found if s.trained]
    if trained:
        notes.append(
            f"{len(trained)} regions were compiled for training, whose kernels are not tuned: compile the model under torch.no_grad()"
        )
    return _equal_once([_of_site(s) for s in found if not s.trained]), notes


def _of_site(site: sites.Site) -> Target:
    kind = kind_of(site.spec) | {"out_dtype": str(site.out_dtype).removeprefix("torch."), "biases": site.biases}
    return Target(site.spec, replace(site.problem, tokens=0), kind, site.device, [site.module], [site])


def _equal_once(targets: Iterable[Target]) -> list[Target]:
    """Equal layers as one target."""
    found: dict[Any, Target] = {}
    for target in targets:
        key = target.problem, tuple(target.kind.items()), target.device
        first = found.setdefault(key, target)
        if first is not target:
            first.names += [name for name in target.names if name not in first.names]
            first.sites += target.sites
    return list(found.values())


def buckets(target: Target, tokens: Iterable[int]) -> list[tuple[Problem, tuple[int, ...]]]:
    """(the largest problem of a bucket, the numbers of tokens in it), by size."""
    found: dict[int, list[int]] = {}
    for count in sorted(set(tokens)):
        found.setdefault(replace(target.problem, tokens=count).bucket, []).append(count)
    return [(replace(target.problem, tokens=counts[-1]), tuple(counts)) for counts in found.values()]
