"""Programs that dequantise weights, put together at random: what is read has the bits of the weight, near misses included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moefuse.passes.encodings.part import Coded
from moefuse.passes.encodings.prove import drawn, holds
from moefuse.passes.encodings.read import read
from moefuse.passes.encodings.table import equal
from moefuse.passes.encodings.weight import Weight
from tests.cpu.encoding_forms import FP4
from tests.cpu.test_encodings_read import shown, traced

E, N, K = 3, 16, 32
Miss = Literal["", "group", "zero", "rows", "add", "clamp", "expert", "order"]


@dataclass(frozen=True)
class Program:
    """One way to write a weight down, perhaps with a mistake in it (``miss``)."""

    element: Literal["e4m3", "s8", "u4", "u4-8", "table"]
    axis: int = -1
    high_first: bool = False
    place: Literal["stack", "cat", "write"] = "stack"
    words: bool = False
    turned: bool = False
    block: tuple[int, int] = (1, 8)
    spread: Literal["repeat", "expand", "index", "split"] = "repeat"
    zero: Literal["", "number", "tensor", "packed"] = ""
    powers: Literal["", "pow", "view", "ldexp"] = ""
    scale: torch.dtype = torch.float32
    arithmetic: torch.dtype = torch.float32
    scale_first: bool = False
    result: torch.dtype | None = None
    stacked: bool = True
    miss: Miss = ""

    @property
    def packed(self) -> bool:
        return self.element not in ("e4m3", "s8")

    def parts(self) -> tuple[Tensor, ...]:
        """What holds the weights."""
        lead = (E,) if self.stacked else ()
        sizes = [N, K]
        per = (8 if self.words else 2) if self.packed else 1
        sizes[self.axis] //= per
        kind = torch.int32 if self.words and self.packed else torch.uint8
        storage = torch.randint(256, (*lead, *sizes, kind.itemsize), dtype=torch.uint8).view(kind)[..., 0]
        if self.element == "s8":
            storage = storage.view(torch.int8)
        if self.element == "e4m3":
            storage = storage.clamp(max=125).view(torch.float8_e4m3fn)
        blocks = (*lead, N // self.block[0], K // self.block[1])
        scale = torch.randint(256, blocks, dtype=torch.uint8) if self.powers else (torch.rand(blocks) + 0.5).to(self.scale)
        zeros = ((torch.rand(blocks) * 8).to(self.arithmetic),) if self.zero == "tensor" else ()
        if self.zero == "packed":
            zeros = (torch.randint(256, (*blocks[:-2], blocks[-2] // 2, blocks[-1]), dtype=torch.uint8),)
        held = (storage, scale, *zeros)
        return tuple(part.transpose(-1, -2).contiguous() for part in held) if self.turned else held

    def weight(self, storage: Tensor, scale: Tensor, zeros: Tensor | None = None) -> Tensor:
        """The program."""
        if self.turned:
            storage, scale = storage.transpose(-1, -2), scale.transpose(-1, -2)
            zeros = None if zeros is None else zeros.transpose(-1, -2)
        value = self._value(storage).to(self.arithmetic)
        scale = self._factors(scale)
        if zeros is not None and self.zero == "packed":
            zeros = torch.stack((zeros & 15, zeros >> 4), -2).flatten(-3, -2).to(self.arithmetic) + 1
        if self.spread == "split":
            split = (*value.shape[:-2], N // self.block[0], self.block[0], K // self.block[1], self.block[1])
            return self._scaled(value.reshape(split), scale[..., :, None, :, None], None if zeros is None else zeros[..., :, None, :, None])
        return self._scaled(value, self._spread(scale), None if zeros is None else self._spread(zeros))

    def _factors(self, scale: Tensor) -> Tensor:
        if self.powers == "view":
            return scale.view(torch.float8_e8m0fnu).to(self.arithmetic)
        if self.powers == "pow":
            return (2.0 ** (scale.float() - 127)).to(self.arithmetic)
        return scale.int() - 127 if self.powers == "ldexp" else scale

    def _value(self, storage: Tensor) -> Tensor:
        codes = self._codes(storage) if self.packed else storage
        if self.element == "u4-8":
            codes = codes.to(torch.int8) - 8
        if self.element == "table":
            codes = torch.tensor(FP4)[codes.long()]
        if self.miss == "rows":
            below = codes[..., N // 2 :, :]
            codes = torch.cat((codes[..., : N // 2, :], torch.cat((below[..., 1:], below[..., :1]), -1)), -2)
        return codes

    def _codes(self, storage: Tensor) -> Tensor:
        dim = self.axis
        shifts = list(range(0, 32 if self.words else 8, 4))
        shifts = shifts[::-1] if self.high_first else shifts
        if self.miss == "order":
            shifts = [shifts[0]] * len(shifts)
        pieces = [storage >> shift & 15 for shift in shifts]
        if self.place == "stack":
            return torch.stack(pieces, -1).flatten(-2) if dim == -1 else torch.stack(pieces, -2).flatten(-3, -2)
        if self.place == "cat":
            return torch.cat(pieces, dim)
        sizes = list(storage.shape)
        sizes[dim] *= len(shifts)
        found = torch.empty(sizes, dtype=torch.uint8)
        for i, piece in enumerate(pieces):
            where = [slice(None)] * len(sizes)
            where[dim] = slice(i, None, len(shifts))
            found[tuple(where)] = piece
        return found

    def _spread(self, scale: Tensor) -> Tensor:
        n, k = self.block
        if self.spread == "index":
            wide = scale[..., torch.arange(N) // n, :][..., torch.arange(K) // k]
        elif self.spread == "expand":
            wide = scale[..., :, None, :, None].expand(*scale.shape[:-1], n, scale.shape[-1], k).reshape(*scale.shape[:-2], N, K)
        else:
            wide = scale.repeat_interleave(n, -2).repeat_interleave(k, dim=-1)
        return torch.cat((wide[..., 1:], wide[..., :1]), -1) if self.miss == "group" else wide

    def _scaled(self, value: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
        lead = value.shape[: -4 if self.spread == "split" else -2]
        if zeros is not None:
            value = value - zeros
        elif self.zero == "number":
            value = value - 3
        if self.miss == "expert" and self.stacked:
            scale = torch.stack((scale[0], scale[2], scale[1]))
        if self.miss == "zero":
            value = torch.cat((value[..., :1], value[..., 1:] - 1), -1)
        if self.powers == "ldexp":
            found = value + scale if self.miss == "add" else torch.ldexp(value, scale)
        else:
            found = value + scale if self.miss == "add" else scale * value if self.scale_first else value * scale
        found = found.clamp(-2, 2) if self.miss == "clamp" else found
        found = found.reshape(*lead, N, K)
        return found if self.result is None else found.to(self.result)


@st.composite
def programs(draw: st.DrawFn, *, misses: bool) -> Program:
    element = draw(st.sampled_from(["e4m3", "s8", "u4", "u4-8", "table"]))
    narrow = draw(st.booleans())
    block = draw(st.sampled_from([(1, 8), (1, 32), (4, 8), (16, 32), (2, 1), (16, 4)]))
    packed = element in ("u4", "u4-8")
    zeros = ["", "tensor", *(["number"] if packed or element == "table" else []), *(["packed"] if packed and block[0] < 16 else [])]
    return Program(
        element,
        axis=draw(st.sampled_from([-1, -2])) if element not in ("e4m3", "s8") else -1,
        high_first=draw(st.booleans()),
        place=draw(st.sampled_from(["stack", "cat", "write"])),
        words=draw(st.booleans()),
        turned=draw(st.booleans()),
        block=block,
        spread=draw(st.sampled_from(["repeat", "expand", "index", "split"])),
        zero=draw(st.sampled_from(zeros)),
        powers=draw(st.sampled_from(["", "", "pow", "view", "ldexp"])),
        scale=torch.bfloat16 if narrow else draw(st.sampled_from([torch.float32, torch.bfloat16])),
        arithmetic=torch.bfloat16 if narrow else torch.float32,
        scale_first=draw(st.booleans()),
        result=draw(st.sampled_from([None, torch.bfloat16])),
        stacked=draw(st.booleans()),
        miss=draw(st.sampled_from(["group", "zero", "rows", "add", "clamp", "expert", "order"])) if misses else "",
    )


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def _found(program: Program) -> tuple[object, bool]:
    """What is read, and whether it says the bits of the weight."""
    torch._dynamo.reset()
    parts = program.parts()
    of = traced(program.weight, parts)
    order = (0, 1, 2) if program.stacked else (0, 1)
    coded = read(of.ctx, of.returned[0], order)
    if not isinstance(coded, Coded):
        return coded, False
    right = equal(shown(coded, of), program.weight(*parts))
    weight = Weight(of.returned[0], order)
    assert all(holds(of.ctx, weight, coded, drawn(coded), small=small) is right for small in (True, False)), "the proof says something else"
    return coded, right


@settings(max_examples=max(20, settings().max_examples))
@given(programs(misses=False))
def test_programs(program: Program) -> None:
    """Every way to write it down is read, and right."""
    coded, right = _found(program)
    assert right, coded


@settings(max_examples=max(20, settings().max_examples))
@given(programs(misses=True))
def test_near_misses(program: Program) -> None:
    """What has a mistake in it is refused, or read as what it is."""
    coded, right = _found(program)
    assert right or not isinstance(coded, Coded), coded
