"""Operators that Python code registers with ``torch.library.custom_op``: what computes them, and their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def names_of_ops(namespace: str) -> list[str]:
    """All operators of a namespace."""
    every: list[str] = torch._C._dispatch_get_all_op_names()
    return sorted({name.partition("::")[2].partition(".")[0] for name in every if name.startswith(f"{namespace}::")})


def implementations(op: torch._ops.OpOverload, device: str) -> tuple[Callable[..., Any], tuple[Callable[..., Any], ...]] | None:
    """(what computes an operator on a type of device, what its gradients are computed by); None where that is not known.

    An operator that autocast or a tensor subclass may change is not known.
    """
    from torch._library.custom_ops import OPDEFS

    definition: Any = OPDEFS.get(op._schema.name)
    if definition is None or definition._autocast_dtype or definition._torch_dispatch_fns:
        return None
    kernels = definition._backend_fns
    chosen = kernels.get(device, kernels.get(None))
    if chosen is None or definition._disabled_kernel:
        return None
    inner = inspect.unwrap(chosen)
    function = inspect.getclosurevars(inner).nonlocals.get("fn") if inspect.isfunction(inner) else None
    backward = tuple(f for f in (definition._setup_context_fn, definition._backward_fn) if f is not None)
    return (function, backward) if callable(function) else None
