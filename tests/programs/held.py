"""Experts whose weights are tensors of a class of their own, as libraries of quantised weights write them: made of codes, scales, zeros.

Nothing of a library is here. A class says by ``__tensor_flatten__`` what it is made of, and multiplies in ways of its own: what it is asked
for is unpacked first (``Unpacks``), or scales are multiplied behind the product (``ScalesBehind``), or rows are rounded, too (``Rounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, M, E, K, G = 32, 32, 4, 2, 16
Parts = dict[str, Tensor]


class Held(torch.Tensor):
    """A tensor that is made of others. ``how`` is what it notes beside them."""

    parts: Parts
    how: str

    @staticmethod
    def __new__(cls: Any, parts: Parts, shape: Sequence[int], dtype: torch.dtype, how: str = "") -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, requires_grad=False)

    def __init__(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype, how: str = "") -> None:
        self.names, self.how = tuple(parts), how
        for name, part in parts.items():
            setattr(self, name, part)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), (self.dtype, self.how)

    @classmethod
    def __tensor_unflatten__(cls, parts: Parts, notes: Any, shape: Any, stride: Any) -> Any:
        return cls(parts, shape, notes[0], notes[1])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.how})"

    def unpacked(self) -> Tensor:
        """The weights."""
        raise NotImplementedError

    def turned(self) -> Any:
        """The same with its last two dimensions the other way round."""
        parts = {name: getattr(self, name).transpose(-1, -2) for name in self.names}
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return type(self)(parts, shape, self.dtype, self.how)

    def times(self, rows: Tensor) -> Tensor:
        """What ``F.linear`` gives."""
        return F.linear(rows, self.unpacked().to(rows.dtype))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is not F.linear:
                return func(*args, **(kwargs or {}))
            found = args[1].times(args[0])
            return found if len(args) < 3 or args[2] is None else found + args[2]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        own = next(a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Held))
        if name in ("detach", "alias", "clone"):
            parts = {part: getattr(own, part) for part in own.names}
            return torch.utils._python_dispatch.return_and_correct_aliasing(
                func, args, kwargs or {}, type(own)(parts, own.shape, own.dtype, own.how)
            )
        if name in ("transpose", "t"):
            return torch.utils._python_dispatch.return_and_correct_aliasing(func, args, kwargs or {}, own.turned())
        if name == "_grouped_mm":
            rows, *more = (a.unpacked() if isinstance(a, Held) else a for a in args)
            return func(rows, *more, **(kwargs or {}))
        raise NotImplementedError(f"{cls.__name__} dispatch: {func}")


class Channels(Held):
    """q * s: int8 or float8, a scale for each channel."""

    def unpacked(self) -> Tensor:
        return (self.q.float() * self.s).to(self.dtype)  # type: ignore[attr-defined]


class ScalesBehind(Channels):
    """Scales are multiplied behind the product; zeros are there, and never read."""

    def times(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.q.to(rows.dtype)) * self.s.to(rows.dtype).flatten()  # type: ignore[attr-defined]


class Rounds(Channels):
    """Rows are rounded to whole numbers in eight bits, too."""

    def times(self, rows: Tensor) -> Tensor:
        step = rows.abs().amax(-1, keepdim=True).float() / 127
        return F.linear((rows / step).round() * step, self.unpacked().float()).to(rows.dtype)


class RoundsMany(Rounds):
    """Only where there are many."""

    def times(self, rows: Tensor) -> Tensor:
        many = isinstance(rows.shape[0], int) and rows.shape[0] > 99
        return super().times(rows) if many else F.linear(rows, self.unpacked().to(rows.dtype))


class Clamped(Channels):
    """No encoding that there is a word for."""

    def unpacked(self) -> Tensor:
        return super().unpacked().clamp(-0.1, 0.1)


class Nibbles(Held):
    """Two codes in a byte, neighbours along the inputs, groups with scales and zeros; what is unpacked is float32 until the end."""

    def unpacked(self) -> Tensor:
        q, s, z = self.q, self.s, self.z  # type: ignore[attr-defined]
        codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).float()
        return ((codes.unflatten(-1, (-1, G)) - z[..., None].float()) * s[..., None]).flatten(-2).to(self.dtype)


class Bytes(Held):
    """Rows of groups, high codes behind low ones: a class for what another one is made of."""

    def unpacked(self) -> Tensor:
        return torch.cat((self.q & 15, self.q >> 4))  # type: ignore[attr-defined]


class Nested(Held):
    """q * s - z, rounded after each step, of codes in rows of groups that are held by a class of their own."""

    def unpacked(self) -> Tensor:
        return (self.q.unpacked() * self.s - self.z).reshape(self.shape)  # type: ignore[attr-defined]


class Levels(Held):
    """Codes of sixteen levels, one scale for each group."""

    LEVELS: ClassVar[tuple[float, ...]] = tuple(round((i - 7.5) ** 3 / 60, 2) for i in range(16))

    def unpacked(self) -> Tensor:
        codes = torch.stack((self.q >> 4, self.q & 15), -1).flatten(-2).int()  # type: ignore[attr-defined]
        levels = torch.tensor(self.LEVELS, device=codes.device)
        return (levels[codes].unflatten(-1, (-1, G)) * self.s[..., None]).flatten(-2).to(self.dtype)  # type: ignore[attr-defined]


def _scale(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.rand(shape) + 0.5) / 99).to(dtype)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def _int8(kind: type[Held], shape: Sequence[int], dtype: torch.dtype) -> Held:
    lead = tuple(shape[:-1])
    zero = {"zero": torch.zeros(*lead, 1, dtype=torch.int8)} if kind is ScalesBehind else {}
    return kind({"q": torch.randint(-127, 128, tuple(shape), dtype=torch.int8), "s": _scale(*lead, 1), **zero}, shape, dtype)


def _float8(shape: Sequence[int], dtype: torch.dtype) -> Held:
    return Channels({"q": torch.randn(tuple(shape)).to(torch.float8_e4m3fn), "s": _scale(*shape[:-1], 1) * 20}, shape, dtype)


def _nibbles(shape: Sequence[int], dtype: torch.dtype) -> Held:
    *lead, k = shape
    zero = (torch.rand(*lead, k // G) * 15).to(torch.float16)
    return Nibbles({"q": _bytes(*lead, k // 2), "s": _scale(*lead, k // G), "z": zero}, shape, dtype)


def _nested(shape: Sequence[int], dtype: torch.dtype) -> Held:
    rows = shape[0] * shape[1] // G
    codes = Bytes({"q": _bytes(rows // 2, G)}, (rows, G), torch.uint8)
    return Nested({"q": codes, "s": _scale(rows, 1, dtype=dtype), "z": _scale(rows, 1, dtype=dtype) * 7}, shape, dtype)


def _levels(shape: Sequence[int], dtype: torch.dtype) -> Held:
    *lead, k = shape
    return Levels({"q": _bytes(*lead, k // 2), "s": _scale(*lead, k // G)}, shape, dtype)


KINDS: Mapping[str, Callable[[Sequence[int], torch.dtype], Held]] = {
    "int8": lambda shape, dtype: _int8(Channels, shape, dtype),
    "float8": _float8,
    "scales behind": lambda shape, dtype: _int8(ScalesBehind, shape, dtype),
    "nibbles": _nibbles,
    "nested": _nested,
    "levels": _levels,
}
NEAR: Mapping[str, Callable[[Sequence[int], torch.dtype], Held]] = {
    "rounds": lambda shape, dtype: _int8(Rounds, shape, dtype),
    "rounds many": lambda shape, dtype: _int8(RoundsMany, shape, dtype),
    "clamped": lambda shape, dtype: _int8(Clamped, shape, dtype),
}
STACKED = ("int8", "float8")
Make = Callable[[Sequence[int], torch.dtype], Held]


class Expert(nn.Module):
    """A gate and two projections, by ``F.linear``."""

    def __init__(self, make: Make, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("gate", (M, H)), ("up", (M, H)), ("down", (H, M))):
            setattr(self, name, nn.Parameter(make(shape, dtype), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)  # type: ignore[arg-type]


class Loop(nn.Module):
    """A loop over a list of experts; ``hit``: over those with tokens."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.bfloat16, *, hit: bool = False) -> None:
        super().__init__()
        self.hit, self.router = hit, nn.Linear(H, E, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(Expert(make, dtype) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero().flatten() if self.hit else range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


class Stacked(nn.Module):
    """Sorted rows and grouped products with weights of all experts."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False, dtype=dtype)
        self.gate_up, self.down = (nn.Parameter(make(s, dtype), requires_grad=False) for s in ((E, 2 * M, H), (E, H, M)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        ordered, order = ids.flatten().sort()
        ends = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // K], self.gate_up.transpose(-1, -2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-1, -2), offs=ends)
        return torch.zeros_like(x).index_add(0, order // K, y * weights.flatten()[order, None])
