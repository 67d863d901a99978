"""``moefuse::row_codes``: tokens rounded before they travel to experts that would round them all the same.

    rows [T, bytes] uint8 = row_codes(x [T, H], rounding)

``rounding`` is the text of a ``token_codes.Rounding``; ``token_codes.packed`` is the definition. What is sent has half of the bytes of
16-bit tokens, and each token is rounded once, by the rank that has it. As DeepEP and its users send tokens to float8 experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops.autograd import not_differentiable
from moefuse.ops.meaning.token_codes import ALIGN, Rounding
from moefuse.ops.schema import implement
from moefuse.runtime import providers


def _row_codes(x: Tensor, rounding: str) -> Tensor:
    _check(x, rounding)
    rows: Tensor = providers.run("row_codes", x, Rounding.parse(rounding))
    return rows


def _fake(x: Tensor, rounding: str) -> Tensor:
    _check(x, rounding)
    return x.new_empty((x.shape[0], Rounding.parse(rounding).width(x.shape[1])), dtype=torch.uint8)


def _check(x: Tensor, rounding: str) -> None:
    if x.dim() != 2 or not x.is_floating_point() or not Rounding.parse(rounding).packs(x.shape[1]):
        legal = f"numbers in floating point [T, H], with H and groups multiples of {ALIGN}"
        raise ValueError(f"moefuse::row_codes: argument `x` is {x.dtype} {list(x.shape)} for {rounding!r}; legal: {legal}")


implement("row_codes", kernel=_row_codes, fake=_fake, autograd=not_differentiable("row_codes", "rounds, and has no gradient"))
