"""Ops as compositions of torch's own operations: what runs where a transform asks for more than a kernel and its gradient give.

Forward-mode AD, ``torch.func`` (``vmap``, ``grad``, ``jvp``, ..), a gradient of a gradient, a batch of gradients. All of them ask for rules
that an op in C++ or Triton has not; torch's operations have them, and what the op means is written in them already: its reference. It
costs time and memory, and only where somebody transforms something. An op without a composite raises and says so. What must not happen is
that a kernel runs and its result has no tangent, which to forward-mode AD is a derivative of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private

Composite = Callable[..., Any]


def flatten(args: Iterable[Any]) -> list[Tensor]:
    """All tensors among op arguments, lists opened."""
    out: list[Tensor] = []
    for a in args:
        if isinstance(a, Tensor):
            out.append(a)
        elif isinstance(a, (list, tuple)):
            out += [t for t in a if isinstance(t, Tensor)]
    return out


def transformable(name: str, entry: Callable[..., Any], composite: Composite | None) -> Callable[..., Any]:
    """The Autograd kernel of an op that is ``entry`` where nothing transforms the call."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        tensors = flatten((*args, *kwargs.values()))
        if not _transformed(tensors, whole=composite is not None):
            return entry(*args, **kwargs)
        if composite is None:
            raise RuntimeError(f"moefuse::{name} has no rules for {_which()}: {REMEDY}")
        return composed(composite, tensors, args, kwargs)

    return _torch_private.unless_transformed(entry, instead)


REMEDY = "call the layer outside of it, or without moefuse (MOEFUSE_DISABLE=1, exclude, unparallelize)"


def _transformed(tensors: Sequence[Tensor], whole: bool) -> bool:
    """Whether there is something to transform. In ``torch.func`` all is left to a composite, which torch takes apart as it needs."""
    if _torch_private.transform():
        return whole or any(map(_torch_private.is_transformed, tensors))
    return any(map(_torch_private.has_tangent, tensors))


def _which() -> str:
    found = _torch_private.transform()
    return f"torch.func.{found}" if found else "forward-mode AD"


def composed(composite: Composite, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Any) -> Any:
    """The composite's result; an op computes in the dtypes that it is given, whatever autocast is around it."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        return composite(*args, **kwargs)


def batched(name: str, composite: Composite) -> Callable[..., Any]:
    """The kernel of an op under ``vmap``."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return composed(composite, flatten((*args, *kwargs.values())), args, kwargs)
        except RuntimeError as error:
            raise RuntimeError(f"moefuse::{name} cannot be batched so: {error}") from error

    return kernel


def pulled_back(function: Callable[..., Any], inputs: Sequence[Tensor], needs: Sequence[bool], grad: Tensor) -> list[Tensor]:
    """Gradients of ``function(*inputs)`` for the inputs that are needed, themselves differentiable.

    Each input stands for itself alone: one may be computed from another, as routing weights are from tokens.
    """
    with torch.enable_grad():
        held = [_alone(t) if need else t for t, need in zip(inputs, needs, strict=True)]
        wanted = [t for t, need in zip(held, needs, strict=True) if need]
        found = torch.autograd.grad(function(*held), wanted, grad, create_graph=True, allow_unused=True)
        zeros = (torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True))
    return list(zeros)


def _alone(t: Tensor) -> Tensor:
    """The same values, with a gradient of their own."""
    if t.requires_grad:
        return t.view_as(t)
    # Not by requires_grad_(), which torch.func forbids.
    return t * torch.ones((), dtype=t.dtype, device=t.device, requires_grad=True)
