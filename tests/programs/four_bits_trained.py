"""The operator of ``four_bits.py`` in a function with a backward pass of its own, as a library trains with it, and others like it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.four_bits import EVERY, Guarded, weight


def _unpacked(B: Tensor, shape: list[int], scale: Tensor, block: int, kind: str, dtype: torch.dtype) -> Tensor:
    return weight(B, shape, scale, block, kind, dtype)


torch.library.define("four_bits_0a1b2c3::unpack", "(Tensor B, int[] shape, Tensor scale, int block, str kind, ScalarType dtype) -> Tensor")
torch.library.impl("four_bits_0a1b2c3::unpack", "CPU", _unpacked)
torch.library.register_fake("four_bits_0a1b2c3::unpack", lambda B, shape, scale, block, kind, dtype: B.new_empty(shape, dtype=dtype))
UNPACK = torch.ops.four_bits_0a1b2c3.unpack


class Product(torch.autograd.Function):
    """Rows times a weight that is not trained."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.is_empty = False
        if A.numel() == 0:
            ctx.is_empty = True
            ctx.A, ctx.bias = A, bias
            return torch.empty((*A.shape[:-1], state.shape[0]), dtype=A.dtype, device=A.device)
        B = B.view(-1, 1)
        ctx.state, ctx.kept = state, (None, B)
        return state.op(A, B, state.shape, state.absmax, state.block, state.kind, bias=bias, **state.scales())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.is_empty:
            return torch.zeros_like(ctx.A), None, None if ctx.bias is None else torch.zeros_like(ctx.bias), None
        _, _, of_bias, _ = ctx.needs_input_grad
        return matrix_of(ctx, grad), None, grad.sum(0) if of_bias else None, None


def matrix_of(ctx: Any, grad: Tensor) -> Tensor:
    """The gradient of rows."""
    return torch.matmul(grad, unpacked(ctx.state, ctx.kept[1]).to(grad.dtype))


def unpacked(state: Any, B: Tensor) -> Tensor:
    """The weight in float32, as the library's own operators unpack it; of scales that are codes these are unpacked in place."""
    scale = state.absmax
    if state.nested:
        scale = state.absmax_code[state.absmax_8bit.long()] * scale.repeat_interleave(EVERY)[: len(state.absmax_8bit)]
        scale += state.absmax_offset
    return UNPACK(B, state.shape, scale, state.block, state.kind, torch.float32)  # type: ignore[no-any-return]


class Trained(Guarded):
    """Where its rows have gradients, the function; else the operator, as the library has it."""

    function: Any = Product

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return super().forward(x)
        return self.function.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return]


class Lora(Trained):
    """An adapter beside it, as PEFT computes it."""

    def __init__(self, n: int, k: int, *, factors: torch.dtype = torch.bfloat16, **how: Any) -> None:
        super().__init__(n, k, **how)
        self.a, self.b = nn.Linear(k, 4, bias=False, dtype=factors), nn.Linear(4, n, bias=False, dtype=factors)

    def forward(self, x: Tensor) -> Tensor:
        base = super().forward(x).clone()
        return base + (self.b(self.a(x.to(self.a.weight.dtype))) * 0.5).to(base.dtype)


class Always(Product):
    """It has no other way without rows."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.is_empty, ctx.state, ctx.kept = False, state, (None, B.view(-1, 1))
        return state.op(A, B.view(-1, 1), state.shape, state.absmax, state.block, state.kind, bias=bias, **state.scales())  # type: ignore[no-any-return]


class Doubled(Product):
    """Gradients of rows twice as large as they are."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return matrix_of(ctx, grad) * 2, None, None, None


class Clamped(Product):
    """Gradients are cut off, which ones of one do not show."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return matrix_of(ctx, grad.clamp(-2, 2)), None, None, None


class Squared(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return matrix_of(ctx, grad * grad), None, None, None


class OfRows(Product):
    """Gradients that depend on the rows."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.rows = A
        return Product.forward(ctx, A, B, bias, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return matrix_of(ctx, grad) * (ctx.rows < 4), None, None, None


class Straight(Product):
    """The gradient of another weight: what rounding it once more leaves."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.matmul(grad, unpacked(ctx.state, ctx.kept[1]).mul(16).round().div(16).to(grad.dtype)), None, None, None


class Nothing(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, None


class Drawn(Product):
    """Some of the gradient, by chance."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return matrix_of(ctx, torch.dropout(grad, 0.5, True)), None, None, None


class Few(Product):
    """It asks for something else than whether there are rows."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        if A.shape[0] < 3:
            ctx.is_empty, ctx.A, ctx.bias = True, A, bias
            return torch.zeros((*A.shape[:-1], state.shape[0]), dtype=A.dtype, device=A.device)
        return Product.forward(ctx, A, B, bias, state)


class Ones(Product):
    """Without rows there is one all the same."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        if A.numel() == 0:
            ctx.is_empty, ctx.A, ctx.bias = True, A, bias
            return torch.ones((1, state.shape[0]), dtype=A.dtype)
        return Always.forward(ctx, A, B, bias, state)


class Noted(Product):
    """Not only ``ctx`` is told that there are no rows."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        if A.numel() == 0:
            ctx.is_empty, ctx.A, ctx.bias = True, A, bias
            state.seen = True
            return torch.empty((0, state.shape[0]), dtype=A.dtype)
        return Always.forward(ctx, A, B, bias, state)


class Kept(Product):
    """Somebody else may read what is noted."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        state.last, ctx.inputs, ctx.is_empty = ctx, A.shape[-1], False
        if A.numel() == 0:
            ctx.is_empty = True
            return torch.empty((*A.shape[:-1], state.shape[0]), dtype=A.dtype, device=A.device)
        return state.op(A, B, state.shape, state.absmax, state.block, state.kind)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.sum(-1, keepdim=True).expand(-1, ctx.inputs), None, None, None


class Written(Product):
    """Backward counts its calls."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.state.times.add_(1)
        return matrix_of(ctx, grad), None, None, None


class Two(Product):
    """A second result, which nobody reads: what Dynamo has forward return of its own accord looks like it."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, bias: Tensor | None, state: Any) -> Any:
        return Always.forward(ctx, A, B, bias, state), A.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        return matrix_of(ctx, grad), None, None, None


class Both(Two):
    """Backward reads the gradient of the second."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        return matrix_of(ctx, grad) + other, None, None, None


class First(Trained):
    """The first of two results."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found[0] if isinstance(found, tuple) else found


def of(function: Any) -> type[Trained]:
    """Matrices that are multiplied by another function."""
    return type(f"With{function.__name__}", (First if issubclass(function, Two) else Trained,), {"function": function})
