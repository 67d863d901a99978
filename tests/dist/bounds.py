"""What ranks do in the tests of rows that training keeps."""

from __future__ import annotations

from typing import Any

import torch

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, scenes

E, T = 4, 24


def saved(rank: int, bound: Any, skew: bool) -> tuple[list[int], str, str]:
    """(Rows of hidden activations that each of two layers keeps, what was raised or the gradients that are not finite, report).

    Float32, T tokens on each of two ranks; ``skew``: all of them go to experts of rank 0.
    """
    model = layers.Model(layers.Stacked, E)
    if skew:
        with torch.no_grad():
            for layer in (model.first, model.second):
                layer.router.weight[: E // 2] += 5  # type: ignore[index,union-attr,operator]
    moefuse.parallelize(model, scenes.mesh(), bound=bound)
    seen = Seen()
    run = torch.compile(model, backend=capturing(seen, behind="eager"))
    x = torch.randn(T, layers.H, generator=torch.Generator().manual_seed(rank)).abs()
    rows: list[int] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 2 and t.shape[1] == 2 * layers.I and not t.requires_grad:
            rows.append(len(t))
        return t

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = run(x)
        out.square().mean().backward()
    except Exception as error:
        return rows, f"{type(error).__name__}: {error}", str(seen.report)
    wrong = [n for n, p in model.named_parameters() if p.grad is not None and not _local(p.grad).isfinite().all()]
    return rows, ", ".join(wrong), str(seen.report)


def one_layer(rank: int) -> tuple[list[str], str]:
    """More rows than are kept, in the only layer: (Parameters whose gradients are not finite, what the next call raises)."""
    model = layers.Stacked(E)
    with torch.no_grad():
        model.router.weight[: E // 2] += 5
    moefuse.parallelize(model, scenes.mesh(), bound=1.2)
    run = torch.compile(model, backend=capturing(Seen(), behind=scenes.BEHIND))
    x = torch.randn(T, layers.H, generator=torch.Generator().manual_seed(rank)).abs()
    out = run(x)
    assert out.isfinite().all()
    out.square().mean().backward()
    wrong = [n for n, p in model.named_parameters() if p.grad is not None and not _local(p.grad).isfinite().all()]
    try:
        run(x)
    except Exception as error:
        return wrong, f"{type(error).__name__}: {error}"
    return wrong, ""


def _local(t: Any) -> torch.Tensor:
    found: torch.Tensor = t.to_local() if hasattr(t, "to_local") else t
    return found
