"""Ranks that want gradients of other things: all have the same collectives in backward, or all say that they have not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist import faults, layers, scenes

TOKENS = (5, 7)


def _tokens(model: Any, x: Tensor, rank: int) -> None:
    x.requires_grad_(rank == 0)


def _router(model: Any, x: Tensor, rank: int) -> None:
    _freeze(model.first.router, rank)


def _router_and_tokens(model: Any, x: Tensor, rank: int) -> None:
    """One rank wants gradients of what the other one does not."""
    _freeze(model.first.router, rank)
    x.requires_grad_(rank == 1)


def _experts(model: Any, x: Tensor, rank: int) -> None:
    for parameter in model.first._parameters.values():
        parameter.requires_grad_(rank == 0)


def _freeze(module: nn.Module, rank: int) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(rank == 0)


WANTS: dict[str, Callable[[Any, Tensor, int], None]] = {
    "tokens": _tokens,
    "router": _router,
    "router or tokens": _router_and_tokens,
    "experts": _experts,
}


def trained(rank: int, name: str, how: dict[str, Any], behind: str | None = "aot_eager") -> float:
    """The largest error of outputs and of the gradients of experts that are wanted on both ranks, against one process."""
    model, single = scenes.both(layers.Stacked, 2, **how)
    same = how.get("tokens") == "replicated" or ("max_tokens" in how and how["max_tokens"] == "equal")
    every = [torch.randn(5 if same else n, layers.H, generator=torch.Generator().manual_seed(r)) for r, n in enumerate(TOKENS)]
    every = every[:1] * 2 if how.get("tokens") == "replicated" else every
    x = every[rank].clone()
    WANTS[name](model, x, rank)
    run = model if behind is None else scenes.compiled(model)
    off = []
    for _ in range(2):  # whatever was left on the way would meet the second one
        x.grad = None
        model.zero_grad()
        single.zero_grad()
        out = run(x)
        out.square().mean().backward()
        inputs = [e.clone().requires_grad_() for e in every]
        wanted = [single(e) for e in inputs]
        ranks = 1 if how.get("tokens") == "replicated" else 2
        sum((w.square().mean() for w in wanted[:ranks]), torch.zeros(())).div(ranks).backward()
        off.append((out - wanted[rank]).abs().max().item())
        if x.requires_grad:
            off.append((x.grad / ranks - inputs[0 if ranks == 1 else rank].grad).abs().max().item())  # type: ignore[operator]
        for layer in ("second",) if name == "experts" else ("first", "second"):
            # Slices of the two in one are not in the order of the whole.
            for part in ("gate_up", "down") if how.get("experts") != "tp" else ("down",):
                grad: Any = model.get_submodule(layer)._parameters[part].grad  # type: ignore[union-attr]
                off.append((grad.full_tensor() - getattr(single.get_submodule(layer), part).grad).abs().max().item())
    return max(off)


def _all_frozen(at: faults.Layer, x: Tensor, rank: int) -> Any:
    x.requires_grad_(rank == 0)
    return contextlib.nullcontext()


def _no_grad(at: faults.Layer, x: Tensor, rank: int) -> Any:
    x.requires_grad_()
    return torch.no_grad() if rank else contextlib.nullcontext()


APART: dict[str, Callable[[faults.Layer, Tensor, int], Any]] = {"frozen": _all_frozen, "no_grad": _no_grad}


def apart(rank: int, name: str, how: dict[str, Any]) -> tuple[str, bool]:
    """What a call raises where only rank 0 has gradients to send back, and whether a later one of both is right."""
    at = faults.layer(**how)
    x = torch.randn(3 + rank, layers.H)

    def call() -> None:
        with APART[name](at, x, rank):
            out = at(x)
        if out.requires_grad:
            out.sum().backward()

    return faults.tried(call)[0], faults.right(at, rank)


def no_backward(rank: int, how: dict[str, Any]) -> tuple[str, float, str]:
    """Rank 1 goes on to the next step without its backward pass: both are told, at the latest after the group's timeout."""
    at = faults.layer(**how)
    assert faults.right(at, rank)
    faults.impatient(at.mesh)
    x = torch.randn(3, layers.H, requires_grad=True)

    def step() -> None:
        out = at(x)
        if not rank:
            out.sum().backward()
        at(x)

    text, seconds = faults.tried(step)
    return text, seconds, faults.tried(lambda: at(x))[0]
