"""Error budgets that come from data: a result may be about as far from an exact reference as the unmodified code is.

The measure is the error of a row (one token) relative to the size of a typical row. Low precision can flip which expert a token is sent
to, in either program, and such a row is not comparable; so the budget is held at the upper quartile of the rows, not at the worst row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Gradients = dict[str, Tensor]


def row_errors(got: Tensor, exact: Tensor) -> Tensor:
    """Error of every row (all dimensions but the last are rows) over the root mean square row of ``exact``."""
    got, exact = got.detach().double().flatten(0, -2), exact.detach().double().flatten(0, -2)
    scale = exact.norm(dim=-1).square().mean().sqrt().clamp_min(1e-30)
    return (got - exact).norm(dim=-1) / scale


def assert_within_budget(got: Tensor, eager: Tensor, exact: Tensor, factor: float = 1.5) -> None:
    """``got`` is as close to ``exact`` as ``eager`` is, up to ``factor`` and a few roundings of the dtype."""
    assert got.dtype == eager.dtype
    assert got.shape == eager.shape
    assert bool(torch.isfinite(got).all())
    floor = 4 * torch.finfo(got.dtype).eps
    ours, theirs = (float(row_errors(value, exact).quantile(0.75)) for value in (got, eager))
    assert ours <= factor * theirs + floor, f"error {ours:.3g}, the unmodified program makes {theirs:.3g}"


FEW = 16
"""Numbers of a parameter whose errors do not average out."""


def assert_gradients_within_budget(got: Gradients, eager: Gradients, exact: Gradients, factor: float = 1.5) -> None:
    """The same for the gradients of a model: every parameter has one, and the upper quartile of their relative errors fits the budget.

    In float32 each single parameter is held to three times the budget as well: one gradient has few roundings, and luck in them, so it
    varies more than the quartile does. Where a parameter is a few numbers, the unmodified program's own luck is no measure: there the
    quartile of all its errors counts, if it is the larger one.
    """
    assert got.keys() == eager.keys() == exact.keys()
    ours, theirs = [], []
    for name, reference in exact.items():
        assert bool(torch.isfinite(got[name]).all()), name
        scale = reference.double().norm().clamp_min(1e-12)
        ours.append(float((got[name].double() - reference).norm() / scale))
        theirs.append(float((eager[name].double() - reference).norm() / scale))
    floor = 16 * torch.finfo(next(iter(got.values())).dtype).eps
    our, usual = (float(torch.tensor(errors).quantile(0.75)) for errors in (ours, theirs))
    assert our <= factor * usual + floor, f"error of the gradients {our:.3g}, the unmodified program makes {usual:.3g}"
    if floor < 1e-4:
        for name, our, own in zip(exact, ours, theirs, strict=True):
            their = max(own, usual) if exact[name].numel() <= FEW else own
            assert our <= 3 * factor * their + floor, f"gradient of {name}: error {our:.3g}, the unmodified program makes {their:.3g}"


def output_and_gradients(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, Gradients]:
    """Output of ``run`` and the gradients of a fixed scalar of it with respect to the parameters of ``model``."""
    model.zero_grad(set_to_none=True)
    out = run()
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    (out * direction).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.detach(), grads


class Wide(TorchFunctionMode):
    """Whatever a program wants in float32 it gets in float64: a model in double precision, its router included."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*torch.utils._pytree.tree_map(_wider, args), **torch.utils._pytree.tree_map(_wider, kwargs or {}))


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model in another floating dtype, keeping rotary frequencies as they are."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer
    return model
