"""Operators of a library of these tests: some are an operator of ATen by another name, and some only look like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLAG = [1]
_defined: dict[str, Any] = {}
"""torch holds them weakly."""


def _empty(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return torch.empty_like(out)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _back(ctx: Any, grad: Tensor) -> Any:
    return grad, None, torch.gather(grad, 0, ctx.saved_tensors[0])


def op(function: Callable[[Tensor, Tensor, Tensor], Tensor], back: Callable[..., Any] | None = _back) -> Any:
    """``function`` as an operator, with a formula for its gradients or without one."""
    name = f"moefuse_tests::{function.__name__}"
    made = torch.library.custom_op(name, function, mutates_args=())
    made.register_fake(_empty)
    if back is not None:
        made.register_autograd(back, setup_context=_keep)
    _defined[name] = made
    return made._opoverload


def _deterministic(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return out.scatter_add(dim=0, index=index, src=src)
    finally:
        torch.use_deterministic_algorithms(before)


def _untrained(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return torch.scatter_add(out, 0, index, src)


def _branch(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src) if src.shape[0] < 1000 else out.scatter_add(0, index, 2 * src)


def _flag(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(FLAG[0] - 1, index, src)


def _scaled(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src * 2)


def _loop(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    for _ in range(1):
        out = out.scatter_add(0, index, src)
    return out


def _read(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(int(index.min()), index, src)


def _drawn(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return torch.bernoulli(out)


def _twice(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return torch.scatter_add(out, 0, index, src)


def _no_share(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return torch.scatter_add(out, 0, index, src)


def _two_kernels(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src)


def _casted(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src)


def _twice_back(ctx: Any, grad: Tensor) -> Any:
    return grad, None, 2 * torch.gather(grad, 0, ctx.saved_tensors[0])


def _no_share_back(ctx: Any, grad: Tensor) -> Any:
    return None, None, torch.gather(grad, 0, ctx.saved_tensors[0])


@torch.library.custom_op("moefuse_tests::_along", mutates_args=())
def _along(out: Tensor, index: Tensor, src: Tensor, dim: int) -> Tensor:
    return torch.scatter_add(out, dim, index, src)


@torch.library.custom_op("moefuse_tests::_of_list", mutates_args=())
def _of_list(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors)


_along.register_fake(lambda out, index, src, dim: torch.empty_like(out))
_of_list.register_fake(lambda tensors: torch.cat(tensors))
_defined |= {"along": _along, "of_list": _of_list}
along, of_list = _along._opoverload, _of_list._opoverload
deterministic = op(_deterministic)
untrained = op(_untrained, None)
ALIKE = {
    "a branch": op(_branch),
    "a number of Python's": op(_flag),
    "a factor": op(_scaled),
    "a loop": op(_loop),
    "reads numbers": op(_read),
    "random numbers": op(_drawn),
    "two kernels": op(_two_kernels),
    "casts under autocast": op(_casted),
}
OTHER_GRADIENTS = {"a factor": op(_twice, _twice_back), "none for what it adds to": op(_no_share, _no_share_back), "none at all": untrained}


@_defined["moefuse_tests::_two_kernels"].register_kernel("cpu")  # type: ignore[untyped-decorator]
def _(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src + 1)


_defined["moefuse_tests::_casted"].register_autocast("cpu", torch.bfloat16)
