"""Weights of a class whose product may do more than multiply: another operation at some place of it, in forward or in backward.

``PLACES`` are where: what is given there goes on as what a step gives. ``MORE`` are steps that change what a product is, though with the
numbers that a layer has today most of them change nothing, and ``SAME`` those that leave it what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.held import Channels, Expert, H

Place = Literal["rows", "codes", "scales", "weight", "result", "gradient", "backward weight", "gradient of rows"]
Step = Callable[[Tensor], Tensor]
PLACES: tuple[Place, ...] = ("rows", "codes", "scales", "weight", "result", "gradient", "backward weight", "gradient of rows")
BACKWARD = frozenset(("gradient", "backward weight", "gradient of rows"))


class Clipped(torch.autograd.Function):
    """The numbers themselves, and gradients that are cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e4, 1e4)


def _hooked(x: Tensor) -> Tensor:
    y = x.clone()
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-1e4, 1e4))
    return y


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[y.abs() > 1e20] = 0
    return y


MORE: Mapping[str, Step] = {
    "clamp": lambda x: x.clamp(-1e20, 1e20),
    "minimum": lambda x: torch.minimum(x, torch.full_like(x, 1e20)),
    "maximum": lambda x: torch.maximum(x, -torch.full_like(x, 1e20)),
    "where": lambda x: torch.where(x.abs() < 1e-15, torch.zeros_like(x), x),
    "mask": lambda x: x * (x.abs() < 1e20),
    "nan_to_num": lambda x: x.nan_to_num(0.0, 7.0, -7.0),
    "sign": lambda x: x.sign() * x.abs(),
    "round": lambda x: (x * 2.0**40).round() * 2.0**-40,
    "another dtype": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "tanh": lambda x: 1e20 * (x * 1e-20).tanh(),
    "hardtanh": lambda x: F.hardtanh(x, -1e20, 1e20),
    "threshold": lambda x: F.threshold(x, -1e20, -1e20),
    "masked_fill": lambda x: x.masked_fill(x.abs() > 1e20, 0.0),
    "written": _written,
    "more": lambda x: x + 1e-25,
    "with its sum": lambda x: x + 1e-20 * x.sum(),
    "half": lambda x: x * 0.5,
    "normed": lambda x: x * x.new_ones(()).maximum(x.norm() * 1e-20),
    "squared": lambda x: x + x * x * 1e-15,
    "shrunk": lambda x: F.hardshrink(x, 1e-15),
}
MORE_OF_GRADIENTS: Mapping[str, Step] = {
    "clipped": Clipped.apply, "hooked": _hooked, "detached": torch.detach, "partly": lambda x: x.detach() * 0.5 + x * 0.5,
}  # fmt: skip
SAME: Mapping[str, Step] = {
    "nothing": lambda x: x,
    "a copy": lambda x: x.clone().contiguous(),
    "shapes": lambda x: x.reshape(-1, 1, x.shape[-1]).squeeze(1),
    "turned twice": lambda x: x.t().contiguous().t(),
    "wider and back": lambda x: x.to(torch.float64).to(x.dtype),
    "times one": lambda x: x * 1.0,
}
STEPS_OF_BACKWARD: Mapping[str, Step] = {name: step for name, step in SAME.items() if name not in ("a copy", "times one")}
"""Those that functions' backward passes are known to be linear with."""


def _hidden(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.numpy()[:] = x.numpy().clip(-1e20, 1e20)
    return out


def operator(name: str, kernel: Step) -> Step:
    """An operator of a library, of a tensor."""
    whole = f"own_products_0a1b2c3::{name}"
    torch.library.define(whole, "(Tensor x) -> Tensor")
    torch.library.impl(whole, "CPU", kernel)
    torch.library.register_fake(whole, torch.empty_like)
    return getattr(torch.ops.own_products_0a1b2c3, name)  # type: ignore[no-any-return]


SHOWN, HIDDEN = operator("shown", lambda x: x.clone()), operator("hidden", _hidden)
"""One that torch's operations are seen in, and one that is none of torch's."""


@dataclass(frozen=True)
class How:
    """What a class does beside its product. ``own``: with a backward pass of its own; ``behind``: with scales behind the product."""

    place: Place = "rows"
    step: Step = SAME["nothing"]
    own: bool = False
    behind: bool = False

    def at(self, place: Place, x: Tensor) -> Tensor:
        return self.step(x) if place == self.place else x


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(q, s)
        return _forward(how, x, q, s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        how, (q, s) = ctx.how, ctx.saved_tensors
        weight = how.at("backward weight", q.to(s.dtype) * s)
        return None, how.at("gradient of rows", how.at("gradient", grad) @ weight), None, None


def _forward(how: How, x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    codes, scales = how.at("codes", q.to(s.dtype)), how.at("scales", s)
    x = how.at("rows", x)
    if how.behind:
        return how.at("result", F.linear(x, how.at("weight", codes)) * scales.flatten())
    return how.at("result", F.linear(x, how.at("weight", codes * scales)))


def kind(how: How) -> type[Channels]:
    """A class whose product is that."""

    class Own(Channels):
        def times(self, rows: Tensor) -> Tensor:
            q, s = self.q, self.s  # type: ignore[attr-defined]
            return _Own.apply(how, rows, q, s) if how.own else _forward(how, rows, q, s)  # type: ignore[no-any-return, no-untyped-call]

    return Own


class Dispatched(Channels):
    """A class that says what aten's products are, and not what torch's functions are. ``limit``: of what they give."""

    limit: float | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.linear.default):
            found = func(*(a.unpacked() if isinstance(a, Dispatched) else a for a in args))
            return found if cls.limit is None else found.clamp(-cls.limit, cls.limit)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Limited(Dispatched):
    limit = 1e20


class Layer(nn.Module):
    """A loop over two experts, one for each token."""

    def __init__(self, of: type[Channels], expert: type[Expert] = Expert, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()

        def make(shape: Any, dtype: torch.dtype) -> Channels:
            codes = torch.randint(-127, 128, tuple(shape), dtype=torch.int8)
            return of({"q": codes, "s": ((torch.rand(shape[0], 1) + 0.5) / 99).to(dtype)}, shape, dtype)

        self.router = nn.Linear(H, 2, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(expert(make, dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 1, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out

    def scale(self, by: float) -> None:
        """Other scales, in place."""
        for weight in (p for p in self.experts.parameters() if isinstance(p, Channels)):
            weight.s.mul_(by)
