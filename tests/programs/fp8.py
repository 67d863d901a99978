"""Operators of a library that multiply float8 weights and round activations, as it registers them, and experts that call them.

The namespace has the hash of a build. What the operators compute is written as their kernels are: block by block of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPACE = "finegrained_fp8_0a1b2c3"
LIMIT = 448.0


def _scale(of: Tensor) -> Tensor:
    return of if of.dtype == torch.float32 else torch.exp2(of.view(torch.uint8).float() - 127)


def _rounded(part: Tensor) -> tuple[Tensor, Tensor]:
    scale = part.float().abs().amax(-1) / LIMIT
    return (part.float() / scale.clamp(min=1e-12)[:, None]).to(torch.float8_e4m3fn).float(), scale


def _product(rows: Tensor, weight: Tensor, scale: Tensor, block: list[int]) -> Tensor:
    """[n, N] in float32: rows [n, K] times one weight [N, K]."""
    (outputs, inputs), (bn, bk) = weight.shape, block
    assert outputs % bn == 0
    assert inputs % bk == 0
    assert scale.shape == (outputs // bn, inputs // bk)
    sums = torch.zeros(len(rows), outputs)
    for at in range(0, inputs, bk):
        codes, of_rows = _rounded(rows[:, at : at + bk])
        of_weight = _scale(scale)[:, at // bk].repeat_interleave(bn)
        sums += codes @ weight[:, at : at + bk].float().t() * of_rows[:, None] * of_weight
    return sums


def w8a8_block_dynamic_fp8_matmul(
    A: Tensor, B: Tensor, Bs: Tensor, block_size: list[int], output_dtype: torch.dtype | None = None
) -> Tensor:
    return _product(A.reshape(-1, A.shape[-1]), B, Bs, block_size).to(output_dtype or A.dtype).reshape(*A.shape[:-1], len(B))


def w8a8_block_dynamic_fp8_matmul_batched(
    A: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, block_size: list[int], output_dtype: torch.dtype | None = None
) -> Tensor:
    out = torch.full((len(A), B.shape[1]), float("nan"), dtype=output_dtype or A.dtype)
    for e in range(len(B)):
        mine = expert_ids == e
        out[mine] = _product(A[mine], B[e], Bs[e], block_size).to(out.dtype)
    return out


def w8a8_block_dynamic_fp8_matmul_grouped(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: list[int],
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    expert = torch.searchsorted(offsets, torch.arange(len(A), dtype=torch.int32), right=True)
    return w8a8_block_dynamic_fp8_matmul_batched(A, B, Bs, expert, block_size, output_dtype)


def w8a8_tensor_dynamic_fp8_matmul(A: Tensor, B: Tensor, Bs: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
    return w8a8_block_dynamic_fp8_matmul(A, B, Bs.reshape(1, 1), list(B.shape), output_dtype)


def w8a8_tensor_dynamic_fp8_matmul_batched(
    A: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    return w8a8_block_dynamic_fp8_matmul_batched(A, B, Bs.reshape(-1, 1, 1), expert_ids, list(B.shape[1:]), output_dtype)


def w8a8_tensor_dynamic_fp8_matmul_grouped(
    A: Tensor, B: Tensor, Bs: Tensor, offsets: Tensor, tokens_per_expert: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    block = list(B.shape[1:])
    return w8a8_block_dynamic_fp8_matmul_grouped(A, B, Bs.reshape(-1, 1, 1), offsets, tokens_per_expert, block, output_dtype)


def mxfp_dynamic_matmul_batched(A: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
    """Scales of 32 inputs, of rows too, are powers of two; weights have eight bits, or four."""
    weights = B.float()
    if B.dtype == torch.int8:
        levels = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
        codes = torch.stack((B.view(torch.uint8) & 15, B.view(torch.uint8) >> 4), -1).flatten(-2).long()
        weights = levels[codes & 7] * (1 - 2 * (codes >> 3))
    parts = A.float().unflatten(-1, (-1, 32))
    least = parts.abs().amax(-1, keepdim=True) / LIMIT
    scale = torch.exp2(torch.ceil(torch.log2(least)).clamp(min=-126))
    rows = ((parts / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    weights = weights * _scale(Bs).repeat_interleave(32, -1)
    return torch.einsum("sk,snk->sn", rows, weights[expert_ids]).to(output_dtype or A.dtype)


def w8a8_block_static_fp8_matmul(
    A: Tensor, B: Tensor, Bs: Tensor, As: Tensor, block_size: list[int], output_dtype: torch.dtype | None = None
) -> Tensor:
    """Rows are rounded with one scale that is known before."""
    rows = (A.float() / As).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn).float().reshape(-1, A.shape[-1])
    weight = B.float() * _scale(Bs).repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
    return (rows @ weight.t() * As).to(output_dtype or A.dtype).reshape(*A.shape[:-1], len(B))


def other_fp8_matmul_batched(A: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, block_size: list[int]) -> Tensor:
    """What has the name of an operator that is known, and another signature."""
    return w8a8_block_dynamic_fp8_matmul_batched(A, B, Bs, expert_ids, block_size)


def unrounded_batched(
    A: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, block_size: list[int], output_dtype: torch.dtype | None = None
) -> Tensor:
    """What has the name and the signature of an operator that is known, and computes something else."""
    return w8a8_block_dynamic_fp8_matmul_batched(A.flip(-1), B, Bs, expert_ids, block_size, output_dtype)


def _fake(A: Tensor, B: Tensor, *rest: object, output_dtype: torch.dtype | None = None, **more: object) -> Tensor:
    given = next((r for r in rest if isinstance(r, torch.dtype)), output_dtype)
    return A.new_empty((*A.shape[:-1], B.shape[-2]), dtype=given or A.dtype)


def _register(space: str, name: str, kernel: Callable[..., Tensor]) -> None:
    torch.library.custom_op(f"{space}::{name}", kernel, mutates_args=()).register_fake(_fake)


for _kernel in (
    w8a8_block_dynamic_fp8_matmul,
    w8a8_block_dynamic_fp8_matmul_batched,
    w8a8_block_dynamic_fp8_matmul_grouped,
    w8a8_tensor_dynamic_fp8_matmul,
    w8a8_tensor_dynamic_fp8_matmul_batched,
    w8a8_tensor_dynamic_fp8_matmul_grouped,
    mxfp_dynamic_matmul_batched,
    w8a8_block_static_fp8_matmul,
):
    _register(SPACE, _kernel.__name__, _kernel)
_BATCHED = w8a8_block_dynamic_fp8_matmul_batched.__name__
_register("other_arguments", _BATCHED, other_fp8_matmul_batched)
_register("other_meaning", _BATCHED, unrounded_batched)
OPS = getattr(torch.ops, SPACE)
H, INNER, E, K, BN, BK = 48, 32, 4, 2, 8, 16


def held(n: int, k: int, *, powers: bool = False, block: tuple[int, int] = (BN, BK)) -> tuple[Tensor, Tensor]:
    """(storage [E, n, k], scales) with every block of another size."""
    bn, bk = block
    shape = (E, -(-n // bn), -(-k // bk))
    scale = torch.randint(116, 122, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu) if powers else (torch.rand(shape) + 0.2) * 0.05
    return torch.randn(E, n, k).to(torch.float8_e4m3fn), scale


class Layer(nn.Module):
    """Gated experts of float8 blocks; how they are multiplied is what subclasses differ in."""

    def __init__(self, *, powers: bool = False, dtype: torch.dtype = torch.bfloat16, trained: bool = False) -> None:
        super().__init__()
        self.gate, self.block = nn.Linear(H, E, bias=False, dtype=dtype), [BN, BK]
        for name, (n, k) in {"up": (2 * INNER, H), "down": (H, INNER)}.items():
            for what, value in zip(("", "_scale"), held(n, k, powers=powers), strict=True):
                setattr(self, name + what, nn.Parameter(value, requires_grad=trained and not powers))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(self.gate(x).float().softmax(-1), K, dim=-1)
        return ids, weights

    def act(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up


class Batched(Layer):
    """Each slot's row, by its id."""

    op: Any = OPS.w8a8_block_dynamic_fp8_matmul_batched

    def product(self, rows: Tensor, name: str, ids: Tensor) -> Tensor:
        return self.op(rows, getattr(self, name), getattr(self, f"{name}_scale"), ids, self.block, None)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        flat = ids.reshape(-1)
        y = self.product(self.act(self.product(x.repeat_interleave(K, 0), "up", flat)), "down", flat)
        return (y * weights.reshape(-1).to(y.dtype).unsqueeze(-1)).view(len(x), K, H).sum(1)


_Put = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows [slots, H], ids [tokens, K] and routing weights [tokens, K] to the rows."""


def _written(y: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    mask = ids.reshape(-1, 1) >= E
    mask[0] = True
    return y.masked_fill(mask, 0.0)


def _turned(y: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return y.masked_fill((ids.t().reshape(-1) >= E)[:, None], 0.0)


ZEROS: dict[str, _Put] = {
    "in place": lambda y, ids, weights: y.masked_fill_((ids.reshape(-1) >= E).unsqueeze(-1), 0.0),
    "gt": lambda y, ids, weights: y.masked_fill((ids.reshape(-1) > E - 1)[:, None], 0),
    "not": lambda y, ids, weights: y.masked_fill((~(ids.reshape(-1) < E)).unsqueeze(-1), 0.0),
    "where": lambda y, ids, weights: torch.where((ids.reshape(-1) >= E).unsqueeze(-1), 0.0, y),
    "where, kept": lambda y, ids, weights: torch.where((ids.reshape(-1) <= E - 1)[:, None], y, torch.zeros_like(y)),
    "grid": lambda y, ids, weights: y.view(-1, K, H).masked_fill((ids >= E)[..., None], 0.0).view(-1, H),
}
"""Zeros for the rows of slots that have no expert."""

NO_ZEROS: dict[str, _Put] = {
    "nothing": lambda y, ids, weights: y,
    "nobody": lambda y, ids, weights: y.masked_fill((ids.reshape(-1) >= 2 * E)[:, None], 0.0),
    "the last": lambda y, ids, weights: y.masked_fill((ids.reshape(-1) >= E - 1)[:, None], 0.0),
    "the others": lambda y, ids, weights: y.masked_fill((ids.reshape(-1) < E)[:, None], 0.0),
    "where, the others": lambda y, ids, weights: torch.where((ids.reshape(-1) >= E)[:, None], y, 0.0),
    "ones": lambda y, ids, weights: y.masked_fill((ids.reshape(-1) >= E)[:, None], 1.0),
    "of weights": lambda y, ids, weights: y.masked_fill(weights.reshape(-1, 1) >= 1, 0.0),
    "turned": _turned,
    "written": _written,
}
"""What looks like that."""


class Absent(Batched):
    """Some slots have no expert: their ids are E, and the operator leaves their rows as they are in memory.

    ``put``: what is put into the last product's rows. ``inner``: what is put into the first one's.
    """

    def __init__(self, put: _Put, inner: _Put = NO_ZEROS["nothing"], *, odd: bool = True) -> None:
        super().__init__()
        self.put, self.inner, self.odd = put, inner, odd

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        if self.odd:
            ids = ids.masked_fill(weights < 0.2, E)
        flat = ids.reshape(-1)
        h = self.inner(self.product(x.repeat_interleave(K, 0), "up", flat), ids, weights)
        y = self.product(self.act(h), "down", flat)
        return self.put(y * weights.reshape(-1, 1).to(y.dtype), ids, weights).view(len(x), K, H).sum(1)


class Grouped(Layer):
    """Rows sorted by expert, by where each one's end."""

    def product(self, rows: Tensor, name: str, ends: Tensor, counts: Tensor) -> Tensor:
        weight, scale = getattr(self, name), getattr(self, f"{name}_scale")
        return OPS.w8a8_block_dynamic_fp8_matmul_grouped(rows, weight, scale, ends, counts, self.block)  # type: ignore[no-any-return]

    def bounds(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32), counts

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        ordered, order = torch.sort(ids.reshape(-1))
        bounds = self.bounds(ordered)
        y = self.product(self.act(self.product(x[order // K], "up", *bounds)), "down", *bounds)
        y = y * weights.reshape(-1)[order].to(y.dtype).unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return y[inverse].view(len(x), K, H).sum(1)


class Loop(Layer):
    """One expert after another, those with tokens only if ``hit``."""

    hit = False

    def product(self, rows: Tensor, name: str, e: int | Tensor) -> Tensor:
        weight, scale = getattr(self, name)[e], getattr(self, f"{name}_scale")[e]
        return OPS.w8a8_block_dynamic_fp8_matmul(rows, weight, scale, self.block, rows.dtype)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x, dtype=torch.float32)
        for e in range(E) if not self.hit else (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero():
            of = e if isinstance(e, int) else e[0]
            tok, slot = torch.where(ids == of)
            y = self.product(self.act(self.product(x[tok], "up", of)), "down", of)
            out.index_add_(0, tok, (y * weights[tok, slot, None].to(y.dtype)).float())
        return out.to(x.dtype)


class Hit(Loop):
    hit = True


class Expert(nn.Module):
    """Weights of one expert."""

    def __init__(self) -> None:
        super().__init__()
        for name, (n, k) in {"up": (2 * INNER, H), "down": (H, INNER)}.items():
            for what, value in zip(("", "_scale"), held(n, k), strict=True):
                setattr(self, name + what, nn.Parameter(value[0].clone(), requires_grad=False))


class Listed(Loop):
    """Weights that each expert has for itself."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def product(self, rows: Tensor, name: str, e: int | Tensor) -> Tensor:
        assert isinstance(e, int)
        weight, scale = getattr(self.experts[e], name), getattr(self.experts[e], f"{name}_scale")
        return OPS.w8a8_block_dynamic_fp8_matmul(rows, weight, scale, self.block, rows.dtype)  # type: ignore[no-any-return]


class OfTensors(Batched):
    """One scale for each matrix, and for each token."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.up_scale, self.down_scale = (nn.Parameter(torch.rand(E, *more), requires_grad=False) for more in ((1, 1), ()))

    def product(self, rows: Tensor, name: str, ids: Tensor) -> Tensor:
        return OPS.w8a8_tensor_dynamic_fp8_matmul_batched(  # type: ignore[no-any-return]
            rows, getattr(self, name), getattr(self, f"{name}_scale"), ids
        )


class Mx(Batched):
    """Powers of two for 32 inputs; weights in four bits, or in eight."""

    def __init__(self, *, nibbles: bool, **how: Any) -> None:
        super().__init__(**how)
        for name, n in (("up", 2 * INNER), ("down", 64)):
            storage, scale = held(n, 64 if name == "up" else INNER, powers=True, block=(1, 32))
            if nibbles:
                storage = torch.randint(-128, 128, (E, n, storage.shape[-1] // 2), dtype=torch.int8)
            setattr(self, name, nn.Parameter(storage, requires_grad=False))
            setattr(self, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def product(self, rows: Tensor, name: str, ids: Tensor) -> Tensor:
        return OPS.mxfp_dynamic_matmul_batched(rows, getattr(self, name), getattr(self, f"{name}_scale"), ids)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        flat, wide = ids.reshape(-1), F.pad(x, (0, 64 - H))
        y = self.product(self.act(self.product(wide.repeat_interleave(K, 0), "up", flat)), "down", flat)
        return (y * weights.reshape(-1).to(y.dtype).unsqueeze(-1)).view(len(x), K, 64).sum(1)


def mxfp_dynamic_matmul_grouped(
    A: Tensor, B: Tensor, Bs: Tensor, offsets: Tensor, tokens_per_expert: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    expert = torch.searchsorted(offsets, torch.arange(len(A), dtype=torch.int32), right=True)
    return mxfp_dynamic_matmul_batched(A, B, Bs, expert, output_dtype)


_register(SPACE, mxfp_dynamic_matmul_grouped.__name__, mxfp_dynamic_matmul_grouped)


def _kind(B: Tensor, Bs: Tensor, block: list[int] | None) -> tuple[str, tuple[list[int], ...]]:
    """Which of the package's operators multiplies, and what it is told of blocks."""
    inputs = B.shape[-1] * (2 if B.dtype == torch.int8 else 1)
    if Bs.dtype != torch.float32 and Bs.shape[-1] * 32 == inputs and Bs.shape[-2] == B.shape[-2]:
        return "mxfp_dynamic_matmul", ()
    if block is None or list(block) == list(B.shape[-2:]):
        return "w8a8_tensor_dynamic_fp8_matmul", ()
    return "w8a8_block_dynamic_fp8_matmul", (list(block),)


def matmul(A: Tensor, B: Tensor, Bs: Tensor, block_size: Any, output_dtype: Any = None, activation_scale: Any = None) -> Tensor:
    """As the package's functions choose an operator: these three are what transformers calls."""
    name, block = _kind(B, Bs, block_size)
    if activation_scale is not None:
        return OPS.w8a8_block_static_fp8_matmul(A, B, Bs, activation_scale, *block, output_dtype)  # type: ignore[no-any-return]
    return getattr(OPS, name)(A, B, Bs, *block, output_dtype)  # type: ignore[no-any-return]


def matmul_batched(A: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, block_size: Any, output_dtype: Any = None) -> Tensor:
    name, block = _kind(B, Bs, block_size)
    return getattr(OPS, f"{name}_batched")(A, B, Bs, expert_ids, *block, output_dtype)  # type: ignore[no-any-return]


def matmul_grouped(
    A: Tensor, B: Tensor, Bs: Tensor, offsets: Tensor, tokens_per_expert: Tensor, block_size: Any, output_dtype: Any = None
) -> Tensor:
    name, block = _kind(B, Bs, block_size)
    return getattr(OPS, f"{name}_grouped")(A, B, Bs, offsets, tokens_per_expert, *block, output_dtype)  # type: ignore[no-any-return]
