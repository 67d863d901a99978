"""One call, forward or forward and backward, and how far the results of two are from each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse import _torch_private


class Result(NamedTuple):
    """What a call gives: its floating-point outputs, and gradients of what is trained (None where there is none)."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to make again and again.

    Attributes:
        args, kwargs: of the call.
        leaves: what gets gradients; none in inference.
        train: forward and backward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Tensor] = ()
    train: bool = False
    _signs: dict[object, Tensor] = dataclasses.field(default_factory=dict)

    def once(self, function: Callable[..., Any]) -> list[Tensor]:
        """The outputs. In training the sum of all of them, each number plus or minus, is the loss."""
        outputs = list(floats(function(*self.args, **self.kwargs)))
        if self.train:
            trained = [value for value in outputs if value.requires_grad]
            if not trained:
                raise ValueError("moefuse.benchmark: train=True, and no output of the model has a gradient")
            torch.autograd.backward(trained, [self._signs_of(value) for value in trained])
        return outputs

    def result(self, function: Callable[..., Any]) -> Result:
        """What a call gives, kept."""
        outputs = [value.detach().clone() for value in self.once(function)]
        return Result(outputs, [None if leaf.grad is None else leaf.grad.detach().clone() for leaf in self.leaves])

    def _signs_of(self, value: Tensor) -> Tensor:
        """Made once: what is timed is the model."""
        key = value.shape, value.dtype, value.device
        if key not in self._signs:
            self._signs[key] = _signs(value)
        return self._signs[key]

    def clear(self) -> None:
        """No gradients, as at the beginning of a step."""
        for leaf in self.leaves:
            leaf.grad = None


def detached(values: Any) -> Any:
    """Inputs that are computed from something, as leaves: backward ends there."""

    def cut(value: Tensor) -> Tensor:
        return value if value.is_leaf else value.detach().requires_grad_(value.requires_grad)

    return _torch_private.map_tensors(cut, values)


def floats(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in an output: in containers and in dataclasses."""
    for leaf in _torch_private.tree_leaves(output):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from floats([getattr(leaf, one.name) for one in dataclasses.fields(leaf)])


def _signs(value: Tensor) -> Tensor:
    """Plus or minus one for each number, the same ones every time: of a normalised output the plain sum has no gradient."""
    if value.dim() == 0:
        return torch.ones_like(value)
    at = torch.arange(value.numel(), device=value.device).reshape(value.shape)
    return (((at * 7919) >> 3) % 2 * 2 - 1).to(value.dtype)


def difference(wanted: Result, got: Result) -> float | None:
    """The largest one, of outputs relative to the largest value of each, of gradients to the largest of all; None without outputs."""
    if len(wanted.outputs) != len(got.outputs):
        return math.inf
    if not any(value.numel() for value in wanted.outputs):
        return None
    found = [_distance(a, b) / (_largest([a]) or 1.0) for a, b in zip(wanted.outputs, got.outputs, strict=True)]
    scale = _largest([g for g in wanted.gradients if g is not None]) or 1.0
    for a, b in zip(wanted.gradients, got.gradients, strict=True):
        one = a if a is not None else b
        if one is not None:
            nothing = torch.zeros_like(one)
            found.append(_distance(nothing if a is None else a, nothing if b is None else b) / scale)
    return max(found)


def tolerance(values: Iterable[Tensor]) -> float:
    """What rounding may make of the largest value: half of the digits of the coarsest dtype that is computed in."""
    kinds = {value.dtype for value in values if value.is_floating_point() and value.dtype.itemsize > 1}
    return math.sqrt(max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps))


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    with torch.no_grad():
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, 0.0, (_wide(a) - _wide(b)).abs())
        return math.inf if apart.isnan().any() else float(apart.max())


def _largest(values: Sequence[Tensor]) -> float:
    finite = (torch.where(_wide(value).isfinite(), _wide(value), 0.0).abs() for value in values if value.numel())
    return max((float(value.max()) for value in finite), default=0.0)


def _wide(value: Tensor) -> Tensor:
    return value.detach() if value.dtype in (torch.float32, torch.float64) else value.detach().float()
