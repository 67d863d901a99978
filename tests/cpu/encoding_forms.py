"""Quantised weights as people write them down, and how each must be read: small functions of what holds the weights.

Every function gives [E, N, K], or [N, K] of what holds one expert; ``order`` of a case says so where its dimensions are others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

E, N, K, G = 3, 12, 32, 8
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0)
BF16 = torch.bfloat16
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Case:
    """A function, what it is given, and the encoding's text up to its first semicolons; None where it must be refused.

    ``at``: the canonical name of the operation that a refusal names.
    """

    weight: Callable[..., Tensor]
    parts: Callable[[], tuple[Tensor, ...]]
    text: str | None = None
    at: str = ""
    order: tuple[int, ...] = (0, 1, 2)
    sizes: tuple[int, ...] = field(default=(E, N, K))


def byte(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


def channel(q: Tensor, s: Tensor) -> Tensor:
    return q.to(BF16) * s


def channel_wide(q: Tensor, s: Tensor) -> Tensor:
    return (s * q.float()).to(BF16)


def by_repeating(q: Tensor, s: Tensor) -> Tensor:
    scale = s.repeat_interleave(4, -2).repeat_interleave(8, dim=-1)
    return (q.float() * scale[..., : q.shape[-2], : q.shape[-1]]).to(BF16)


def by_splitting(q: Tensor, s: Tensor) -> Tensor:
    e, n, k = q.shape
    return (q.to(torch.float32).reshape(e, n // 4, 4, k // 8, 8) * s[:, :, None, :, None]).reshape(e, n, k).to(BF16)


def by_expanding(q: Tensor, s: Tensor) -> Tensor:
    e, n, k = q.shape
    wide = s[:, :, None, :, None].expand(e, n // 4, 4, k // 8, 8).reshape(e, n, k)
    return q.to(BF16) * wide


def nibbles(q: Tensor, low_first: bool = True) -> Tensor:
    pair = (q & 15, q >> 4)
    return torch.stack(pair if low_first else pair[::-1], -1).flatten(-2)


def grouped(codes: Tensor, s: Tensor, z: Tensor | None = None) -> Tensor:
    values = codes.to(s.dtype).unflatten(-1, (-1, G))
    values = values if z is None else values - z[..., None]
    return (values * s[..., None]).flatten(-2)


def halves(q: Tensor, s: Tensor) -> Tensor:
    return grouped(torch.cat((q & 15, q >> 4), -1), s)


def with_zeros(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return grouped(nibbles(q), s, z)


def signed(q: Tensor, s: Tensor) -> Tensor:
    return grouped(nibbles(q, low_first=False).to(torch.int8) - 8, s)


def wrapped(q: Tensor, s: Tensor) -> Tensor:
    codes = nibbles(q).to(torch.int8)
    return grouped(torch.where(codes >= 8, codes - 16, codes), s)


def hqq(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Groups are rows; the high nibbles are the first half of them."""
    half = q.shape[0]
    values = torch.empty((2 * half, q.shape[1]), dtype=s.dtype)
    values[:half] = (q & 0b11110000) >> 4
    values[half:] = q & 0b00001111
    return ((values - z) * s).reshape(N, K).t()


def hqq8(q: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return ((q.to(BF16) - z) * s).reshape(N, K).t()


def gptq(q: Tensor, s: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (q[..., :, None, :] >> shifts[:, None]) & 15
    codes = codes.flatten(-3, -2) - 8
    return (s.repeat_interleave(G, -2) * codes).transpose(-1, -2)


def gptq_zeros(q: Tensor, s: Tensor, z: Tensor, more: int = 0, *, wrap: bool = False) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((q[:, None, :] >> shifts[None, :, None]) & 15).reshape(K, -1)
    zeros = ((z[:, :, None] >> shifts[None, None, :]) & 15).reshape(z.shape[0], -1) + more
    zeros = zeros & 15 if wrap else zeros
    return ((codes.reshape(-1, G, codes.shape[1]) - zeros[:, None]) * s[:, None]).reshape(K, -1)


def awq(q: Tensor, s: Tensor) -> Tensor:
    shifts = torch.tensor([4 * i for i in AWQ], dtype=torch.int32)
    codes = torch.bitwise_and(torch.bitwise_right_shift(q[..., None], shifts), 15).flatten(-2)
    return (codes - 8).to(s.dtype) * s.repeat_interleave(G, dim=-2)


def awq_reordered(q: Tensor, s: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4)
    codes = (q[:, :, None] >> shifts[None, None, :]).to(torch.int8) & 15
    codes = codes.view(q.shape[0], -1)
    order = torch.arange(codes.shape[1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    return (codes[:, order] - 8) * s.repeat_interleave(G, 0)


def mxfp4(q: Tensor, e: Tensor) -> Tensor:
    levels = torch.tensor(FP4, dtype=BF16)
    low, high = levels[(q & 15).long()], levels[(q >> 4).to(torch.int32)]
    values = torch.stack((low, high), -1).flatten(-2).unflatten(-1, (-1, G))
    return torch.ldexp(values, (e.to(torch.int32) - 127)[..., None]).flatten(-2)


def mxfp4_in_place(q: Tensor, e: Tensor) -> Tensor:
    """As transformers unpacks GPT-OSS: blocks are rows, even and odd columns are written, exponents are applied in place."""
    levels = torch.tensor(FP4, dtype=BF16)
    blocks, exponents = q.reshape(-1, G // 2), (e.to(torch.int32) - 127).reshape(-1, 1)
    out = torch.empty(blocks.shape[0], G, dtype=BF16)
    some = out[0 : blocks.shape[0]]
    some[:, 0::2] = levels[(blocks & 15).to(torch.int)]
    some[:, 1::2] = levels[(blocks >> 4).to(torch.int)]
    torch.ldexp(some, exponents, out=some)
    return out.reshape(E, N, K).transpose(1, 2)


def powers(q: Tensor, e: Tensor) -> Tensor:
    return grouped(nibbles(q), 2.0 ** (e.float() - 127))


def e8m0(q: Tensor, e: Tensor) -> Tensor:
    return grouped(nibbles(q), e.view(torch.float8_e8m0fnu).to(BF16))


def nf4(q: Tensor, s: Tensor) -> Tensor:
    table = torch.tensor(NF4)
    codes = torch.stack((q >> 4, q & 15), -1).reshape(-1).long()
    return (torch.index_select(table, 0, codes).view(-1, G) * s.view(-1, 1)).view(E, N, K).to(BF16)


def two() -> tuple[Tensor, ...]:
    """Nibbles and a scale for each group."""
    return byte(E, N, K // 2), some(E, N, K // G)


def three() -> tuple[Tensor, ...]:
    """With a zero for each group."""
    return (*two(), some(E, N, K // G) * 8)


def three_narrow() -> tuple[Tensor, ...]:
    """In 16 bits."""
    return tuple(part.to(BF16) if part.is_floating_point() else part for part in three())


def rows_of_groups() -> tuple[Tensor, ...]:
    """Groups are rows, as HQQ has them."""
    return byte(N * K // G // 2, G), some(N * K // G, 1, dtype=BF16), some(N * K // G, 1, dtype=BF16) * 8


def exponents() -> tuple[Tensor, ...]:
    """Nibbles, and a power of two for each group."""
    return byte(E, N, K // 2), byte(E, N, K // G)


WORD = "0,4,8,12,16,20,24,28"
U4 = "u4;1x8;f32;number;;k:0,4"
FORMS: dict[str, Case] = {
    "int8 channel": Case(channel, lambda: (int8(E, N, K), some(E, N, 1, dtype=BF16)), "s8;1x0;bf16;number;;"),
    "int8 channel wide": Case(channel_wide, lambda: (int8(E, N, K), some(E, N, 1)), "s8;1x0;f32;number;;"),
    "int8 scale of another dtype": Case(channel, lambda: (int8(E, N, K), some(E, N, 1)), "s8;1x0;f32;number;;"),
    "int8 one": Case(channel, lambda: (int8(N, K), some(N, 1, dtype=BF16)), "s8;1x0;bf16;number;;", order=(0, 1)),
    "one number": Case(channel, lambda: (int8(N, K), torch.tensor(0.3)), "s8;0x0;f32;number;;", order=(0, 1)),
    "one number first": Case(lambda q, s: s[1] * q[1].to(BF16), lambda: (int8(E, N, K), some(E)), "s8;0x0;bf16;number;;", order=(0, 1)),
    "one number of 16 bits": Case(channel, lambda: (int8(N, K), torch.tensor(0.3, dtype=BF16)), "s8;0x0;bf16;number;;", order=(0, 1)),
    "tensor": Case(channel, lambda: (fp8(E, N, K), some(E, 1, 1)), "e4m3;0x0;f32;number;;"),
    "e5m2": Case(channel, lambda: (fp8(E, N, K).to(torch.float8_e5m2), some(E, 1, K)), "e5m2;0x1;f32;number;;"),
    "bytes": Case(channel, lambda: (byte(E, N, K), some(E, N, 1)), "u8;1x0;f32;number;;"),
    "block": Case(by_repeating, lambda: (fp8(E, N, K), some(E, N // 4, K // 8)), "e4m3;4x8;f32;number;;"),
    "block cut": Case(by_repeating, lambda: (fp8(E, N - 1, K - 3), some(E, 3, 4)), "e4m3;4x8;f32;number;;", sizes=(E, N - 1, K - 3)),
    "block split": Case(by_splitting, lambda: (fp8(E, N, K), some(E, N // 4, K // 8)), "e4m3;4x8;f32;number;;"),
    "block expanded": Case(by_expanding, lambda: (fp8(E, N, K), some(E, N // 4, K // 8, dtype=BF16)), "e4m3;4x8;bf16;number;;"),
    "block turned": Case(lambda q, s: by_splitting(q, s).transpose(1, 2), lambda: (fp8(E, N, K), some(E, N // 4, K // 8)),
                         "e4m3;4x8;f32;number;;", order=(0, 2, 1)),
    "block stored turned": Case(lambda q, s: by_splitting(q.transpose(1, 2), s.transpose(1, 2)),
                                lambda: (fp8(E, K, N), some(E, K // 8, N // 4)), "e4m3;4x8;f32;number;;"),
    "groups": Case(lambda q, s: grouped(nibbles(q), s), two, U4),
    "groups high first": Case(lambda q, s: grouped(nibbles(q, low_first=False), s), two,
                              "u4;1x8;f32;number;;k:4,0"),
    "groups halves": Case(halves, two, "u4;1x8;f32;number;;k/0,4"),
    "groups zeros": Case(with_zeros, three, "u4;1x8;f32;number;zero;k:0,4"),
    "groups zeros 16 bits": Case(with_zeros, three_narrow,
                                 "u4;1x8;bf16;number;zero;k:0,4"),
    "one zero": Case(with_zeros, lambda: (byte(E, N, K // 2), some(E, N, K // G), some(E, N, 1) * 8), "u4;1x8;f32;number;zero;k:0,4"),
    "zeros behind": Case(lambda q, s, z: grouped(nibbles(q), s) - z.repeat_interleave(G, -1), three, "u4;1x8;f32;number;behind;k:0,4"),
    "zeros behind 16 bits": Case(lambda q, s, z: (nibbles(q).unflatten(-1, (-1, G)) * s[..., None]).sub_(z[..., None]).flatten(-2),
                                 three_narrow, "u4;1x8;bf16;number;behind;k:0,4"),
    "scaled zeros behind": Case(lambda q, s, z: grouped(nibbles(q), s) - (s * z).repeat_interleave(G, -1), three,
                                "u4;1x8;f32;number;behind;k:0,4"),
    "scaled zeros": Case(lambda q, s, z: with_zeros(q, s, z * s), three, "u4;1x8;f32;number;zero;k:0,4"),
    "scale of a scale": Case(lambda q, s, z: grouped(nibbles(q), s.to(torch.float8_e4m3fn).float() * z[..., :1]), three, U4),
    "scale times a number": Case(lambda q, s: (q.to(BF16) * (s * (1 / 127))).to(BF16), lambda: (int8(E, N, K), some(E, N, 1)),
                                 "s8;1x0;f32;number;;"),
    "scales of codes": Case(lambda q, s, z: grouped(nibbles(q), z.flatten()[:256][s.long()] + 0.5),
                            lambda: (byte(E, N, K // 2), byte(E, N, K // G), some(E, 16, K)), U4),
    "whole zeros": Case(lambda q, s, z: ((nibbles(q).int().unflatten(-1, (-1, G)) - z[..., None]) * s[..., None]).flatten(-2),
                        lambda: (byte(E, N, K // 2), some(E, N, K // G), byte(E, N, K // G)), "u4;1x8;f32;number;zero;k:0,4"),
    "signed": Case(signed, two, "u4-8;1x8;f32;number;;k:4,0"),
    "wrapped": Case(wrapped, two, "s4;1x8;f32;number;;k:0,4"),
    "hqq": Case(hqq, rows_of_groups,
                "u4;1x8;bf16;number;zero;n/4,0", order=(1, 0)),
    "hqq 8 bits": Case(hqq8, lambda: (byte(N * K // G, G), some(N * K // G, 1, dtype=BF16), some(N * K // G, 1, dtype=BF16) * 8),
                       "u8;1x8;bf16;number;zero;", order=(1, 0)),
    "gptq": Case(gptq, lambda: (words(E, K // 8, N), some(E, K // G, N)), f"u4-8;1x8;f32;number;;k:{WORD}"),
    "gptq one": Case(gptq, lambda: (words(K // 8, N), some(K // G, N, dtype=torch.half)), f"u4-8;1x8;f16;number;;k:{WORD}",
                     order=(0, 1)),
    "gptq zeros": Case(gptq_zeros, lambda: (words(K // 8, 8), some(K // G, 8, dtype=torch.half), words(K // G, 1)),
                       f"u4;1x8;f16;number;zero=n:{WORD};k:{WORD}", order=(1, 0), sizes=(8, K)),
    "gptq zeros less one": Case(lambda q, s, z: gptq_zeros(q, s, z, 1), lambda: (words(K // 8, 8), some(K // G, 8), words(K // G, 1)),
                                "lut16=-1.0,0.0,1.0,", order=(1, 0), sizes=(8, K)),
    "nibbles as zeros": Case(lambda q, s, z: grouped(nibbles(q).to(torch.int8) - nibbles(z).to(torch.int8).repeat_interleave(G, -1), s),
                             lambda: (*two(), byte(E, N, K // G // 2)), "u4;1x8;f32;number;zero=k:0,4;k:0,4"),
    "awq": Case(awq, lambda: (words(E, K, 2), some(E, K // G, 16)), "u4-8;1x8;f32;number;;n:0,16,4,20,8,24,12,28",
                order=(0, 2, 1), sizes=(E, 16, K)),
    "awq reordered": Case(awq_reordered, lambda: (words(K, 2), some(K // G, 16)), "u4-8;1x8;f32;number;;n:0,16,4,20,8,24,12,28",
                          order=(1, 0), sizes=(16, K)),
    "mxfp4": Case(mxfp4, exponents, "e2m1;1x8;"),
    "mxfp4 in place": Case(mxfp4_in_place, lambda: (byte(E, N, K // G, G // 2), byte(E, N, K // G)), "e2m1;1x8;",
                           order=(0, 2, 1)),
    "powers": Case(powers, exponents, "u4;1x8;f32;2^n;;k:0,4"),
    "e8m0": Case(e8m0, exponents, "u4;1x8;bf16;e8m0;;k:0,4"),
    "nf4": Case(nf4, lambda: (byte(E * N * K // 2), some(E * N * K // G)), "lut16=-1.0,-0.69"),
}  # fmt: skip
"""What must be read."""


def shifted_group(q: Tensor, s: Tensor) -> Tensor:
    return nibbles(q).float() * s.repeat_interleave(G, -1).roll(1, -1)


def shifted_group_padded(q: Tensor, s: Tensor) -> Tensor:
    """The first group is one shorter, the last one longer."""
    return nibbles(q).float() * torch.cat((s.repeat_interleave(G, -1)[..., 1:], s[..., -1:]), -1)


def shifted_zero(q: Tensor, s: Tensor) -> Tensor:
    return grouped(torch.stack(((q & 15).to(torch.int8) - 8, (q >> 4).to(torch.int8) - 7), -1).flatten(-2), s)


def swapped_rows(q: Tensor, s: Tensor) -> Tensor:
    return grouped(torch.cat((nibbles(q[..., : N // 2, :]), nibbles(q[..., N // 2 :, :], low_first=False)), -2), s)


def changed_after(q: Tensor, s: Tensor) -> Tensor:
    weight = grouped(nibbles(q), s)
    q.bitwise_xor_(1)
    return weight


def unfilled(q: Tensor, s: Tensor) -> Tensor:
    values = torch.empty(E, N, K)
    values[..., ::2] = q & 15
    return grouped(values, s)


def last_shifted(q: Tensor, s: Tensor) -> Tensor:
    """One row of one expert is scaled by another's."""
    scale = s.clone()
    scale[1, 3] = s[1, 4]
    return grouped(nibbles(q), scale)


NEAR: dict[str, Case] = {
    "rolled groups": Case(shifted_group, two, at="roll"),
    "shorter first group": Case(shifted_group_padded, two, at="mul"),
    "another zero for one nibble": Case(shifted_zero, two, at="to"),
    "other nibbles in half of the rows": Case(swapped_rows, two, at="to"),
    "scale added": Case(lambda q, s: (nibbles(q).float().unflatten(-1, (-1, G)) + s[..., None]).flatten(-2), two, at="add"),
    "clamped": Case(lambda q, s: grouped(nibbles(q), s).clamp(-3, 3), two, at="clamp"),
    "scales as large as weights": Case(lambda q, s: nibbles(q) * (s.repeat_interleave(G, -1) * 2), two, at="mul"),
    "scales that are written to": Case(lambda q, s: grouped(nibbles(q), s.clone().mul_(2)), two, at="mul"),
    "gptq zeros that wrap": Case(lambda q, s, z: gptq_zeros(q, s, z, 1, wrap=True),
                                 lambda: (words(K // 8, 8), some(K // G, 8), words(K // G, 1)), order=(1, 0), sizes=(8, K), at="mul"),
    "zeros twice": Case(lambda q, s, z: with_zeros(q, s, z) - z.repeat_interleave(G, -1), three, at="sub"),
    "zero before a scaled zero": Case(lambda q, s, z: z.repeat_interleave(G, -1) - grouped(nibbles(q), s), three, at="sub"),
    "zeros behind in other bits": Case(lambda q, s, z: (grouped(nibbles(q).to(BF16), s) - z.repeat_interleave(G, -1).float()).to(BF16),
                                       three_narrow, at="sub"),
    "zero minus code": Case(lambda q, s, z: (z.repeat_interleave(G, -1) - nibbles(q)) * s.repeat_interleave(G, -1), three, at="sub"),
    "divided": Case(lambda q, s: nibbles(q) / s.repeat_interleave(G, -1), two, at="div"),
    "scaled twice": Case(lambda q, s, z: grouped(nibbles(q), s) * z.repeat_interleave(G, -1), three, at="mul"),
    "dropout": Case(lambda q, s: torch.dropout(grouped(nibbles(q), s), 0.5, True), two, at="dropout"),
    "storage written to": Case(changed_after, two, at="bitwise_xor"),
    "another scale for a row": Case(last_shifted, two, at="mul"),
    "rounded twice": Case(lambda q, s: (q.float() * s).to(BF16).to(torch.half), lambda: (int8(E, N, K), some(E, N, 1)), at="mul"),
    "scale rounded before": Case(lambda q, s: q.float() * s.to(BF16), lambda: (int8(E, N, K), some(E, N, 1)), at="mul"),
    "zeros in other bits": Case(lambda q, s, z: ((nibbles(q).to(BF16).unflatten(-1, (-1, G)) - z[..., None]) * s[..., None]).flatten(-2),
                                lambda: (*two(), some(E, N, K // G, dtype=BF16)), at="sub"),
    "masked": Case(lambda q, s, z: grouped(nibbles(q) * (z > 0.6).to(torch.uint8).repeat_interleave(G, -1), s), three, at="mul"),
    "levels that may change": Case(lambda q, s, z: grouped(z.flatten()[:16][nibbles(q).long()], s), three, at="getitem"),
    "permuted groups": Case(lambda q, s, z: nibbles(q) * s[..., z.long()], lambda: (*two(), torch.randint(K // G, (K,))), at="getitem"),
    "codes of codes": Case(lambda q, s: grouped(nibbles(q), s) * q.repeat_interleave(2, -1), two, at="mul"),
    "sum of two": Case(lambda q, s: (q[:, ::2].float() + q[:, 1::2]) * s[:, ::2], lambda: (byte(E, N, K), some(E, N, 1)), at="add"),
    "some of nothing": Case(unfilled, two, at="empty"),
    "packed zeros with an overflow": Case(lambda q, s, z: grouped(nibbles(q) - nibbles(z).repeat_interleave(G, -1), s),
                                          lambda: (*two(), byte(E, N, K // G // 2)), at="sub"),
    "levels as zeros": Case(lambda q, s, z: grouped(nibbles(q).float() - 2 * nibbles(z).repeat_interleave(G, -1), s),
                            lambda: (*two(), byte(E, N, K // G // 2)), at="mul"),
    "no scale": Case(lambda q, s: q.to(BF16) + 0 * s, lambda: (int8(E, N, K), some(E, N, 1)), at="add"),
    "a scale for each weight of a stack of two": Case(lambda q, s: (q.float() * s)[:, :, ::2], lambda: (int8(E, N, K), some(E, N, K))),
}  # fmt: skip
"""What must be refused, or read as what it is."""
