"""Low-rank adapters on quantised experts: beside each expert's projection, as PEFT has them, and in the sum with an unpacked stack."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.packed_forms import WIDE, E, H, K, Packed

R = 4
SIZES = ((WIDE, H), (WIDE, H), (H, WIDE))


class Adapted(nn.Module):
    """Experts of two projections, the first with a gate. Subclasses say what a projection of an expert does."""

    def __init__(self, held: str, *, whole: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.whole, self.dtype = whole, dtype
        self.router = nn.Linear(H, E, bias=False)
        self.bases = nn.ModuleList(Packed(held, n, k) for n, k in SIZES)

    def base(self, which: int) -> Callable[[int], Tensor]:
        packed = self.bases[which]
        assert isinstance(packed, Packed)
        if not self.whole:
            return lambda e: packed.of(e).to(self.dtype)
        return packed.whole().to(self.dtype).__getitem__

    def projections(self) -> list[Callable[[Tensor, int], Tensor]]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        gate, up, down = self.projections()
        rows, out = x.to(self.dtype), torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = down(F.silu(gate(rows[tok], e)) * up(rows[tok], e), e)
            out.index_add_(0, tok, y.to(x.dtype) * weights[tok, slot, None])
        return out


class Beside(Adapted):
    """``linear(x, W) + s * linear(linear(x, A), B)``; factors in float32."""

    def __init__(self, held: str, *, whole: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(held, whole=whole, dtype=dtype)
        self.a = nn.ModuleList(nn.ParameterList(torch.randn(R, k) / 4 for _ in range(E)) for _, k in SIZES)
        self.b = nn.ModuleList(nn.ParameterList(torch.randn(n, R) / 4 for _ in range(E)) for n, _ in SIZES)

    def projections(self) -> list[Callable[[Tensor, int], Tensor]]:
        def of(which: int) -> Callable[[Tensor, int], Tensor]:
            base = self.base(which)

            def product(x: Tensor, e: int) -> Tensor:
                a, b = self.a[which][e], self.b[which][e]  # type: ignore[index]
                y = F.linear(x, base(e))
                return y + (F.linear(F.linear(x.to(a.dtype), a), b) * 0.5).to(y.dtype)

            return product

        return [of(which) for which in range(3)]


class Summed(Adapted):
    """``W + s * B @ A`` of whole stacks."""

    def __init__(self, held: str, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(held, whole=True, dtype=dtype)
        self.a = nn.ParameterList(torch.randn(E, R, k) / 4 for _, k in SIZES)
        self.b = nn.ParameterList(torch.randn(E, n, R) / 4 for n, _ in SIZES)

    def projections(self) -> list[Callable[[Tensor, int], Tensor]]:
        def of(which: int) -> Callable[[Tensor, int], Tensor]:
            packed = self.bases[which]
            assert isinstance(packed, Packed)
            weight = packed.whole().to(self.dtype) + 0.5 * torch.bmm(self.b[which], self.a[which]).to(self.dtype)
            return lambda x, e: F.linear(x, weight[e])

        return [of(which) for which in range(3)]
