"""Rows of a unit matrix, whose products are the weights themselves: what kernels for weights in few bits make of codes, bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import Encoding
from tests.cpu.coded_case import hold

EXPERTS, FEATURES = 3, 200
BF16 = torch.bfloat16


class UnitRows(NamedTuple):
    """A projection of EXPERTS, with features and inputs that are no whole blocks.

    Attributes:
        held: as kernels take it.
        dense: the weights [E, N, K] of the definition.
        x: a unit matrix for each expert [E * K, K]; ids: [E * K, 1].
    """

    held: Any
    dense: Tensor
    x: Tensor
    ids: Tensor

    def out(self) -> Tensor:
        """Where a kernel writes, NaN before."""
        return torch.full((self.x.shape[0], FEATURES), float("nan"), dtype=BF16, device="cuda")

    def rows(self, height: int) -> Any:
        """The sorted rows in tiles of a height."""
        from moefuse.kernels.triton.host import sorted_rows

        order, offsets = sorted_rows.sort(self.ids, EXPERTS)
        return sorted_rows.tiled(sorted_rows.Sorted(order, offsets, self.ids.numel(), EXPERTS, 1), BF16, height)

    def check(self, out: Tensor, what: object) -> None:
        """All bits of all features but those with a weight that is not finite, for 0 * inf spoils their other products."""
        same = out.view(EXPERTS, -1, FEATURES).transpose(1, 2)
        finite = self.dense.isfinite().all(2, keepdim=True)
        assert torch.equal(torch.where(finite, same, 0), torch.where(finite, self.dense, 0)), what
        assert finite.float().mean() > 0.8


def unit_rows(encoding: Encoding, separate: bool) -> UnitRows:
    """For an encoding; scales that are powers at both ends, too."""
    from moefuse.kernels.triton.host import coded

    inputs = 320 if encoding.block[1] in (0, 32, 64) else 384
    held = hold(encoding, EXPERTS, FEATURES, inputs, torch.Generator().manual_seed(0))
    if encoding.scale:
        held.scale[0, 0, 0], held.scale[0, 1, 0] = 0, 254
    storage, more = held.lists(separate)
    as_bytes = [(t.view(torch.uint8) if t.dtype not in coded.ELEMENTS else t).cuda() for t in storage]
    more, count = [t.cuda() for t in more], len(storage)
    it = coded.held(as_bytes, Codes(encoding, more[:count], more[count:]))
    x = torch.eye(inputs, dtype=BF16, device="cuda").repeat(EXPERTS, 1)
    return UnitRows(it, held.dense(BF16).cuda(), x, torch.arange(EXPERTS, device="cuda").repeat_interleave(inputs)[:, None])
