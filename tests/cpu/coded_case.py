"""Random quantised weights for the tests of ``moefuse::experts_extended``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import EXPONENTS, LDEXP, MADE, NAMED, POWERS, Encoding, Packing, dequantise, parse
from tests.cpu.ops_case import Case

LOW_FIRST, HIGH_FIRST = (0, 4), (4, 0)
WORDS, AWQ = tuple(range(0, 32, 4)), tuple(4 * i for i in (0, 4, 1, 5, 2, 6, 3, 7))
NF4 = tuple(round(i * i * i / 343 - 0.01 * i, 4) for i in range(-7, 9))

ENCODINGS = {
    "fp8 blocks": Encoding("e4m3", (4, 8)),
    "fp8 channels": Encoding("e4m3", (1, 0), "bf16"),
    "fp8 tensor": Encoding("e5m2", (0, 0)),
    "int8 channels": Encoding("s8", (1, 0), "bf16"),
    "uint8 zeros": Encoding("u8", (1, 8), "bf16", zero=True),
    "nibbles": Encoding(MADE["u4-8"], (1, 8), "bf16", packing=Packing(1, LOW_FIRST)),
    "nibbles, zeros": Encoding(MADE["u4"], (1, 8), "f32", zero=True, packing=Packing(1, HIGH_FIRST)),
    "halves": Encoding(MADE["u4"], (1, 8), "bf16", zero=True, packing=Packing(0, HIGH_FIRST, halves=True)),
    "words of inputs": Encoding(MADE["u4"], (1, 8), "f32", zero=True, packing=Packing(1, WORDS)),
    "words of features": Encoding(MADE["s4"], (1, 8), "f32", packing=Packing(0, AWQ)),
    "mxfp4": Encoding(MADE["e2m1"], (1, 8), "f32", EXPONENTS, packing=Packing(1, LOW_FIRST)),
    "mxfp4 by ldexp": Encoding(MADE["e2m1"], (1, 8), "bf16", LDEXP, packing=Packing(1, LOW_FIRST)),
    "powers": Encoding("s8", (1, 8), "f32", POWERS),
    "nf4": Encoding(NF4, (1, 16), "f32", packing=Packing(1, HIGH_FIRST)),
}
"""One of each kind that libraries have; sizes are those of tests."""


@dataclass(frozen=True)
class Held:
    """Weights of one projection as they are held."""

    encoding: Encoding
    storage: Tensor
    scale: Tensor
    zero: Tensor | None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights [E, N, K]."""
        return dequantise(self.encoding, self.storage, self.scale, self.zero, dtype)

    def lists(self, separate: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The storage, and what goes with it, as the op takes them."""
        parts = [t for t in (self.storage, self.scale, self.zero) if t is not None]
        each = [list(map(torch.clone, t)) if separate else [t] for t in parts]
        return each[0], [t for part in each[1:] for t in part]


def hold(encoding: Encoding, experts: int, out: int, inp: int, g: torch.Generator, in_out: bool = False) -> Held:
    """Random codes, all of which occur in large tensors, with scales and zeros that differ from block to block."""
    rows, cols = out, inp
    if encoding.packing is not None:
        rows, cols = (n // encoding.packing.per if i == encoding.packing.axis else n for i, n in enumerate((out, inp)))
    shape = (experts, cols, rows) if in_out else (experts, rows, cols)
    if encoding.packing is None:
        assert isinstance(encoding.table, str)
        kind = NAMED[encoding.table]
        values = torch.randn(shape, generator=g) if kind.is_floating_point else torch.randint(-128, 128, shape, generator=g)
        storage = values.to(torch.int8).view(kind) if kind == torch.uint8 else values.to(kind)
    elif max(encoding.packing.shifts) > 4:
        storage = torch.randint(-(1 << 31), 1 << 31, shape, generator=g).to(torch.int32)
    else:
        storage = torch.randint(0, 256, shape, generator=g).to(torch.uint8)
    size = (experts, *encoding.scales(out, inp))
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(encoding.arithmetic, torch.float32)
    scale = (torch.rand(size, generator=g) + 0.2).to(dtype) * inp**-0.5 / (8 if encoding.packing is not None else 1)
    if encoding.table in ("s8", "u8"):
        scale = scale / 64
    if encoding.scale:
        scale = torch.randint(112 if encoding.table == "s8" else 118, 120 if encoding.table == "s8" else 128, size, generator=g).to(
            torch.uint8
        )
    zero = torch.randint(0, 16, size, generator=g).to(dtype) if encoding.zero else None
    return Held(encoding, storage.transpose(1, 2) if in_out else storage, scale, zero)


def coded(case: Case, *encodings: Encoding | None, in_out: bool = False) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """(arguments of experts_extended, arguments of experts with the weights that these mean, options of the former).

    ``encodings``: of w_in, w_up and w_out.
    """
    g = torch.Generator().manual_seed(case.seed)
    args, codes, names = case.args(), [], []
    dense = list(args)
    for i, encoding in enumerate(encodings, 3):
        names.append("" if encoding is None or not args[i] else str(encoding))
        if not names[-1] or encoding is None:
            continue
        out, inp = args[i][0].shape[-2:]
        held = hold(encoding, case.experts, out, inp, g, in_out)
        args[i], more = held.lists(case.separate)
        codes += more
        whole = held.dense(case.dtype)
        dense[i] = list(whole) if case.separate else [whole]
    return [*args, *([] for _ in range(6)), codes], dense, {**case.options, "encodings": names}


def rounded_before(args: list[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same call with tokens that come rounded, by ``moefuse::row_codes``."""
    x, texts = args[0], options["encodings"]
    how = parse(texts[0]).activation
    assert how is not None
    came = replace(how, came=str(x.dtype).removeprefix("torch."))
    firsts = [str(replace(parse(text), activation=came)) if text else "" for text in texts[:2]]
    return [torch.ops.moefuse.row_codes(x, str(how)), *args[1:]], options | {"encodings": [*firsts, texts[2]], "out_dtype": None}
