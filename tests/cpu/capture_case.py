"""Running a layer under capture without Inductor: what was one graph, what was fused, what Dynamo gave up on."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import Options
from moefuse.capture import entry
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.cheap import without_code
from tests.programs.loops import KINDS, H, logits_for


@dataclass
class Seen:
    """What a backend was called with, and what it found."""

    graphs: list[torch.fx.GraphModule] = field(default_factory=list)
    report: FusionReport = field(default_factory=FusionReport)

    @property
    def codes(self) -> set[str]:
        return {skipped.code for skipped in self.report.skipped}


def capturing(seen: Seen, options: Options | None = None, behind: str = "eager") -> Callable[..., Any]:
    """A Dynamo backend with moefuse's capture and passes, and one of torch's behind them; ``eager`` runs the graph as it is.

    ``front``: all of Inductor but its code.
    """
    own = options or Options()

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        seen.report.extend(rewrite.rewrite(gm, example_inputs, own, entry.frame()))
        seen.graphs.append(gm)
        if behind == "front":
            return without_code(gm, example_inputs)
        return gm.forward if behind == "eager" else torch._dynamo.lookup_backend(behind)(gm, example_inputs)

    def read(_arguments: Mapping[str, Any]) -> Options:
        return own

    def skipped(report: FusionReport, _own: Options, _owner: object) -> None:
        seen.report.extend(report)

    return entry.enable(backend, read, skipped)


@dataclass
class Result:
    """One call and its backward pass."""

    out: Tensor
    grads: dict[str, Tensor]
    state: dict[str, Any]


def call(run: Callable[..., Tensor], model: nn.Module, x: Tensor, logits: Tensor, *, grad: bool = True) -> Result:
    """Output, gradients, and the module's Python state after one call."""
    torch.manual_seed(7)
    if not grad:
        with torch.no_grad():
            return Result(run(x.clone(), logits.clone()), {}, _state(model))
    model.zero_grad(set_to_none=True)
    fed, scores = x.clone().requires_grad_(), logits.clone().requires_grad_()
    out = run(fed, scores)
    if out.requires_grad:
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    # An expert without tokens has no gradient in eager and a zero one behind a fused op.
    grads |= {
        "x": torch.zeros_like(x) if fed.grad is None else fed.grad,
        "logits": torch.zeros_like(logits) if scores.grad is None else scores.grad,
    }
    return Result(out.detach().clone(), grads, _state(model))


def _state(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy({k: v for k, v in vars(model).items() if not k.startswith("_") and isinstance(v, int | list | dict)})


def same(got: Result, expected: Result) -> None:
    """Values and gradients within float32 rounding of layers of this size; Python state exactly."""
    torch.testing.assert_close(got.out, expected.out, rtol=1e-5, atol=1e-5)
    for name, g in expected.grads.items():
        torch.testing.assert_close(got.grads[name], g, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"gradient of {name}: {m}")
    assert got.state == expected.state


class Packed(nn.Module):
    """A layer whose tokens and logits come in one tensor, so that Dynamo knows that there are as many of both."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, both: Tensor) -> Tensor:
        out: Tensor = self.layer(both[:, :H].contiguous(), both[:, H:])
        return out


def check(
    make: Callable[[], nn.Module],
    *,
    grad: bool = True,
    options: Options | None = None,
    tokens: tuple[int, ...] = (5, 5, 5),
    **compile_kwargs: Any,
) -> Seen:
    """Compile, and compare with eager for routings that leave different experts without tokens."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    seen = Seen()
    compiled = torch.compile(Packed(model), backend=capturing(seen, options), **compile_kwargs)
    for kind, count in zip(KINDS, tokens, strict=True):
        x, logits = torch.randn(count, H), logits_for(kind, count)
        expected = call(twin, twin, x, logits, grad=grad)
        same(call(lambda x, logits: compiled(torch.cat([x, logits], dim=1)), model, x, logits, grad=grad), expected)
    return seen


def plain(**changes: Any) -> Options:
    return dataclasses.replace(Options(), **changes)


def equal(total: int, slots: int) -> None:
    """A plain assertion; in a test module pytest would write it anew."""
    assert total == slots, "lost"


def at_most_three(count: float) -> None:
    """As :func:`equal`."""
    assert count <= 3
