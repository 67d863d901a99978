"""An operator of a library that multiplies weights of four bits in one dimension, as it registers it, and experts that call it.

Neither its namespace nor what its codes stand for is known to moefuse. ``KINDS`` are tables; scales may be codes of a table themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, K, H, INNER, BLOCK, EVERY = 4, 2, 64, 96, 32, 256
KINDS = {
    "curve": (-1.0, -0.7, -0.525, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0),
    "signs": (0.0, 0.005, 0.67, 1.0, 0.33, 0.5, 0.17, 0.25, -0.0, -0.005, -0.67, -1.0, -0.33, -0.5, -0.17, -0.25),
}


def weight(B: Tensor, shape: list[int], scale: Tensor, block: int, kind: str, dtype: torch.dtype) -> Tensor:
    """[N, K]: the definition, high nibbles first."""
    byte = B.flatten()
    codes = torch.stack((byte >> 4, byte & 15), -1).flatten().long()
    values = torch.tensor(KINDS[kind], device=B.device)[codes].view(-1, block)
    return (values * scale.view(-1, 1)).view(shape).to(dtype)


def gemm_4bit(
    A: Tensor,
    B: Tensor,
    shapeB: list[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    if absmax_8bit is not None:
        assert absmax_code is not None
        assert absmax_offset is not None
        wide = absmax.repeat_interleave(EVERY)[: len(absmax_8bit)]
        absmax = absmax_code[absmax_8bit.long()] * wide + absmax_offset
    return F.linear(A, weight(B, shapeB, absmax, blocksize, quant_type, A.dtype), bias)


def _turned(A: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return gemm_4bit(A.flip(-1), *args, **kwargs)


def _squared(A: Tensor, B: Tensor, shapeB: list[int], absmax: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return gemm_4bit(A, B, shapeB, absmax.square(), *args, **kwargs)


def _bent(A: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Right for the ones and zeros that it is tried with, and for nothing else."""
    return gemm_4bit(A * A, *args, **kwargs)


def _fake(A: Tensor, B: Tensor, shapeB: list[int], *args: Any, **kwargs: Any) -> Tensor:
    return A.new_empty((*A.shape[:-1], shapeB[0]))


_SCHEMA = (
    "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
    "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor"
)


def _register(space: str, kernel: Callable[..., Tensor], schema: str = _SCHEMA) -> Any:
    name = f"{space}::gemm_4bit"
    torch.library.define(name, schema)
    torch.library.impl(name, "CPU", kernel)
    torch.library.register_fake(name, _fake)
    return getattr(torch.ops, space).gemm_4bit


OP = _register("four_bits_0a1b2c3", gemm_4bit)
TURNED, SQUARED, BENT = (_register(f"four_bits_{f.__name__}", f) for f in (_turned, _squared, _bent))
OTHER = _register("four_bits_other", gemm_4bit, _SCHEMA.replace("absmax_offset=None", "absmax_offset=None, int? more=None"))


class Matrix(nn.Module):
    """A weight [n, k] in four bits; ``nested``: its scales are codes too."""

    op: Any = OP

    def __init__(self, n: int, k: int, *, nested: bool = False, kind: str = "curve", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.kind, self.block, self.nested = [n, k], kind, BLOCK, nested
        count = n * k // BLOCK
        self.weight = nn.Parameter(torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.bias: nn.Parameter | None = None
        self.register_buffer("absmax", torch.rand(-(-count // EVERY) if nested else count) * 0.2 + 0.05)
        if nested:
            self.register_buffer("absmax_8bit", torch.randint(0, 256, (count,), dtype=torch.uint8))
            self.register_buffer("absmax_code", torch.linspace(-1, 1, 256))
            self.register_buffer("absmax_offset", torch.tensor(0.3))

    def scales(self) -> dict[str, Any]:
        return {f"absmax_{name}": getattr(self, f"absmax_{name}") for name in ("8bit", "code", "offset")} if self.nested else {}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1, 1)
        return self.op(x, weight, self.shape, self.absmax, self.block, self.kind, bias=self.bias, **self.scales())  # type: ignore[no-any-return]


class Expert(nn.Module):
    def __init__(self, make: Callable[..., nn.Module] = Matrix, **how: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = make(INNER, H, **how), make(INNER, H, **how), make(H, INNER, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Loop(nn.Module):
    """All experts of a list, one after another; those with tokens only if ``hit``."""

    hit = False

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **how: Any) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(Expert(dtype=dtype, **how) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).float().softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero().flatten() if self.hit else range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None].to(x.dtype))
        return out


class Hit(Loop):
    hit = True


class Guarded(Matrix):
    """A product that is not called without rows, as the library has it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return self.nothing(x)
        return super().forward(x)

    def nothing(self, x: Tensor) -> Tensor:
        return torch.empty((*x.shape[:-1], self.shape[0]), dtype=x.dtype, device=x.device)


class Narrow(Guarded):
    """Without rows it has other features, which nobody reads here, and which moefuse does not know."""

    def nothing(self, x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:-1], 1))


class Wide(Guarded):
    def nothing(self, x: Tensor) -> Tensor:
        return super().nothing(x).float()


class Row(Guarded):
    """Without rows there is one all the same."""

    def nothing(self, x: Tensor) -> Tensor:
        return torch.ones((1, self.shape[0]), dtype=x.dtype)


class Counting(Guarded):
    """Something is written down where there are no rows."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.register_buffer("times", torch.zeros(()))

    def nothing(self, x: Tensor) -> Tensor:
        self.times.add_(1)
        return super().nothing(x)


class Noted(Guarded):
    """A Python object changes where there are no rows."""

    def nothing(self, x: Tensor) -> Tensor:
        self.seen = True
        return super().nothing(x)


class Lora(Guarded):
    """An adapter beside it, as PEFT computes it."""

    def __init__(self, n: int, k: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> None:
        super().__init__(n, k, **how)
        self.a, self.b = nn.Linear(k, 4, bias=False, dtype=dtype), nn.Linear(4, n, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clone() + self.b(self.a(x)) * 0.5  # type: ignore[no-any-return]
