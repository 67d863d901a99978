"""Where the weights are: lists of Parameters, dictionaries, Sequentials, one flat tensor; and what else stands in an expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.research.base import E, Gated, H, I, Layer, fused, mlp, refused


class Loop(Layer):
    """A loop over experts with selected rows; subclasses have the experts."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@fused("selected")
class ParameterLists(Loop):
    """``nn.ParameterList`` for each projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.ParameterList(torch.randn(H, 2 * I) / 3 for _ in range(E))
        self.w2 = nn.ParameterList(torch.randn(I, H) / 3 for _ in range(E))
        self.b2 = nn.ParameterList(torch.randn(H) / 3 for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.w1[e]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.w2[e] + self.b2[e]


@fused("selected")
class Sequentials(Loop):
    """``nn.Sequential(Linear, ReLU, Linear)``."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]


@fused("selected")
class Dictionary(Loop):
    """A ``ModuleDict`` by the number as text (fairseq, nllb)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{e}": Gated() for e in range(E)})

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[f"expert_{e}"](x)  # type: ignore[no-any-return]


@fused("selected")
class Attributes(Loop):
    """Experts are attributes, found by ``getattr``."""

    def __init__(self) -> None:
        super().__init__()
        for e in range(E):
            self.add_module(f"expert{e}", Gated())

    def expert(self, e: int, x: Tensor) -> Tensor:
        return getattr(self, f"expert{e}")(x)  # type: ignore[no-any-return]


@fused("selected")
class OneFlat(Loop):
    """All weights in one flat Parameter, viewed as experts (megatron-like flat buffers)."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(E * 3 * I * H) / 3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        w1, w3, w2 = self.flat.view(E, 3, I, H)[e]
        return (F.silu(x @ w1.t()) * (x @ w3.t())) @ w2


@fused("selected")
class FlatPieces(Loop):
    """One tensor [3, E, I, H] for all projections."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(3, E, I, H) / 3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return (F.silu(x @ self.all[0, e].t()) * (x @ self.all[1, e].t())) @ self.all[2, e]


@fused("selected", "grouped")
class NormInside(Loop):
    """A LayerNorm in front of each expert's projections."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.LayerNorm(H), nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]


class _Random(Loop):
    """Behind each expert a module of torch that draws random numbers in training."""

    kind: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(*mlp(), self.kind(0.25)) for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]  # at: SlopesTrained


@refused("random", "`rrelu` draws random numbers inside the expert", whole=False)
class SlopesTrained(_Random):
    """Slopes of an activation, drawn in training. Dropout fuses there, with other numbers than eager's: ``tests/cpu/test_dropout.py``."""

    kind = nn.RReLU


@fused("selected", train=False)
class DropoutEvaluated(_Random):
    """Dropout in evaluation."""

    kind = nn.Dropout


class LoraLinear(nn.Module):
    """``W x + scale * B(A x)``, as peft wraps a Linear."""

    def __init__(self, inner: int, outer: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer, bias=False)
        self.a, self.b, self.scale = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False), 0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x)) * self.scale
        return out


class LoraExpert(nn.Module):
    """A gated expert of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = LoraLinear(H, I), LoraLinear(H, I), LoraLinear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


@fused("selected")
class LowRank(Loop):
    """LoRA in every projection of every expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(LoraExpert() for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]


@fused("selected")
class SharedBase(Loop):
    """MixLoRA, LoRAMoE: one frozen layer for all tokens, experts that are low-rank branches."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(H, H)
        self.a, self.b = nn.Parameter(torch.randn(E, 2, H) / 3), nn.Parameter(torch.randn(E, H, 2) / 3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a[e]), self.b[e])

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * super().forward(x)  # type: ignore[no-any-return]


@fused("selected")
class Conv1dExperts(Loop):
    """Transposed weights, GPT-2's Conv1D: ``addmm(b, x, w)``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(E, H, I) / 3), nn.Parameter(torch.randn(E, I) / 3)
        self.w2, self.b2 = nn.Parameter(torch.randn(E, I, H) / 3), nn.Parameter(torch.randn(E, H) / 3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return torch.addmm(self.b2[e], F.gelu(torch.addmm(self.b1[e], x, self.w1[e])), self.w2[e])


@fused("selected", "grouped")
class ThreeLayers(Loop):
    """Three projections (deep experts)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, I), nn.ReLU(), nn.Linear(I, I), nn.ReLU(), nn.Linear(I, H)) for _ in range(E)
        )

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]


@fused("selected", "grouped")
class Residual(Loop):
    """``x + mlp(x)`` in each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return x + self.experts[e](x)  # type: ignore[no-any-return]


@fused("selected", "grouped")
class OneLinear(Loop):
    """Experts of a single projection (mixture of linear layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def expert(self, e: int, x: Tensor) -> Tensor:
        return self.experts[e](x)  # type: ignore[no-any-return]


@fused("selected")
class SwappedViews(OneFlat):
    """Expert e takes its last matrix from its neighbour's part of the flat tensor: other weights, and the same computation."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        parts = self.flat.view(E, 3, I, H)
        w1, w3, _ = parts[e]
        return (F.silu(x @ w1.t()) * (x @ w3.t())) @ parts[(e + 1) % E, 2]


@fused("selected")
class OffsetViews(Loop):
    """Expert e's matrices begin one row late in the flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn((E * 2 * I + 1) * H) / 3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        size = I * H
        w1 = self.flat[2 * e * size + H : (2 * e + 1) * size + H].view(I, H)
        w2 = self.flat[(2 * e + 1) * size : (2 * e + 2) * size].view(I, H)
        return F.relu(x @ w1.t()) @ w2
