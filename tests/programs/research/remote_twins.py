"""Near misses of the layers of ``remote.py``: one thing more or less than their loops, slices and counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.programs.research.base import E, H, K, Listed, twin
from tests.programs.research.remote import UpToTheLast


class _Ends(UpToTheLast):
    """The loop of :class:`DeepseekFirstInfer`; subclasses do one thing more with the ends."""

    def pairs(self, ends: Any) -> Any:
        return enumerate(ends)

    def start(self, ends: Any, e: int) -> Any:
        return ends[e - 1] if e else 0

    def after(self, out: Tensor, ends: Any) -> Tensor:
        return out

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order, out, e = ids.view(-1).argsort(), torch.zeros_like(x), 0
        ends = ids.view(-1).bincount().cpu().numpy().cumsum(0)
        for e, end in self.pairs(ends):
            start = self.start(ends, e)
            if start == end:
                continue
            slots = order[start:end]
            out.index_add_(0, slots // K, self.own(x, slots // K, slots, weights, e))
        return self.after(out, ends)


@twin
class LastNumberKept(UpToTheLast):
    """The number of the last expert that was chosen is in the result."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order, out, e, start = ids.view(-1).argsort(), torch.zeros_like(x), 0, 0
        for e, count in enumerate(ids.view(-1).bincount().cpu().numpy()):
            slots = order[start : start + count]
            out.index_add_(0, slots // K, self.own(x, slots // K, slots, weights, e))
            start = start + count
        return out * e


@twin
class NumbersCounted(_Ends):
    """How many numbers there are is in the result."""

    def after(self, out: Tensor, ends: Any) -> Tensor:
        return out * len(ends)


@twin
class PairsListed(_Ends):
    """The pairs as a list, whose length is in the result."""

    def pairs(self, ends: Any) -> Any:
        self.listed = list(enumerate(ends))
        return self.listed

    def after(self, out: Tensor, ends: Any) -> Tensor:
        found = out * len(self.listed)
        del self.listed
        return found


@twin
class TurnsCounted(_Ends):
    """How often the loop ran is in the result."""

    def pairs(self, ends: Any) -> Any:
        self.turns = 0
        return enumerate(ends)

    def start(self, ends: Any, e: int) -> Any:
        self.turns += 1
        return super().start(ends, e)

    def after(self, out: Tensor, ends: Any) -> Tensor:
        return out + self.turns


@twin
class LastEndKept(_Ends):
    """The start of the last expert that was chosen is in the result."""

    def after(self, out: Tensor, ends: Any) -> Tensor:
        return out + float(ends[-2] if len(ends) > 1 else 0)


@twin
class UnequalBoth(_Ends):
    """Where the last experts have no tokens, the one before starts where it ends, counted from the back."""

    def start(self, ends: Any, e: int) -> Any:
        return ends[-1] if e == E - 2 else super().start(ends, e)


@twin
class WithoutTheFirst(_Ends):
    """The first expert is left out."""

    def pairs(self, ends: Any) -> Any:
        return ((e, end) for e, end in enumerate(ends) if e)


@twin
class CountsOfTheNext(Listed):
    """The next expert's count says whether this one runs."""

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=E).tolist()
        for i in range(E):
            if counts[(i + 1) % E] == 0:
                continue
            idx, top = torch.where(indices == i)
            y[idx] += self.experts[i](x[idx]) * weights[idx, top, None]
        return y


@twin
class SumOfOtherTokens(Listed):
    """The buffer of all slots is read as if slots came before tokens."""

    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_idx = self.route(x)
        flat_topk_idx = topk_idx.view(-1)
        hidden_states = x.repeat_interleave(K, dim=0)
        y = torch.empty_like(hidden_states)
        for i, expert in enumerate(self.experts):
            y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
        return (y.view(K, -1, H) * topk_weight.t().unsqueeze(-1)).sum(dim=0)


@twin
class TokensRepeatedWhole(Listed):
    """All tokens, and then all tokens again: a slot's row is another token's."""

    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_idx = self.route(x)
        flat_topk_idx = topk_idx.view(-1)
        hidden_states = x.repeat(K, 1)
        y = torch.empty_like(hidden_states)
        for i, expert in enumerate(self.experts):
            y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
        return (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)


@twin
class WrittenElsewhere(Listed):
    """An expert's rows are written one slot behind those that they were taken from."""

    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_idx = self.route(x)
        flat = topk_idx.view(-1)
        hidden_states = x.repeat_interleave(K, dim=0)
        y = torch.zeros_like(hidden_states)
        turned = flat.roll(1)
        for i, expert in enumerate(self.experts):
            y[turned == i] = expert(hidden_states[flat == i])
        return (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)


@twin
class BufferAfterwards(Listed):
    """The buffer is changed before its sum is taken."""

    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_idx = self.route(x)
        flat = topk_idx.view(-1)
        hidden_states = x.repeat_interleave(K, dim=0)
        y = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(hidden_states[flat == i])
        y[0] = 1.0
        return (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)


@twin
class WrittenTwice(Listed):
    """The last expert's rows are written over by another function of them."""

    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_idx = self.route(x)
        flat = topk_idx.view(-1)
        hidden_states = x.repeat_interleave(K, dim=0)
        y = torch.zeros_like(hidden_states)
        for i in (*range(E), 0):
            y[flat == i] = self.experts[i](hidden_states[flat == i] * (1 + i))
        return (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)


@twin
class PiecesOfTwo(Listed):
    """A list of the outputs of pieces that have more than one row, and the others put behind as they are."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.route(x)
        _, order = ids.view(-1).sort(0)
        split_x = torch.split(x[order // K], ids.view(-1).bincount(minlength=E).tolist(), dim=0)
        outputs = [self.experts[i](split_x[i]) for i in range(E) if split_x[i].shape[0] > 1]
        outputs += [piece for piece in split_x if piece.shape[0] == 1]
        y = torch.cat(outputs, 0) * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // K, y)


@twin
class CountedOutputs(Listed):
    """How many experts had tokens is in the result."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.route(x)
        _, order = ids.view(-1).sort(0)
        split_x = torch.split(x[order // K], ids.view(-1).bincount(minlength=E).tolist(), dim=0)
        outputs = [self.experts[i](split_x[i]) for i in range(E) if split_x[i].shape[0] > 0]
        y = torch.cat(outputs, 0) * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // K, y) / len(outputs)


@twin
class PairsSwapped(Listed):
    """Outputs go to the other slot of their token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = x.new_zeros(x.shape[0], K, H)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            y[tok, 1 - slot] = expert(x[tok])
        return torch.einsum("tkh,tk->th", y, weights)


@twin
class OtherDivisor(Listed):
    """Flat slots, divided by one more than there are in a token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = x.new_zeros(ids.numel(), H)
        for e, expert in enumerate(self.experts):
            rows = torch.nonzero(ids.flatten() == e).squeeze(1)
            y[rows] = expert(x[rows // (K + 1)])
        return (y.view(-1, K, H) * weights[:, :, None]).sum(1)


class _Lists(Listed):
    """Row numbers as Python lists; subclasses do one thing more with them."""

    def take(self, x: Tensor, rows: list[int]) -> Tensor:
        return x[None, rows].reshape(-1, H)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            rows = tok.tolist()
            out.index_add_(0, tok, expert(self.take(x, rows)) * weights[tok, slot, None])
        return out


@twin
class RowsCounted(_Lists):
    """How many there are is a factor."""

    def take(self, x: Tensor, rows: list[int]) -> Tensor:
        return super().take(x, rows) * len(rows)


@twin
class RowsReversed(_Lists):
    """They are read from the back."""

    def take(self, x: Tensor, rows: list[int]) -> Tensor:
        return x[rows[::-1]]


@twin
class RowsBeforeAWrite(Listed):
    """The tensor changes after its numbers were read."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            rows = tok.tolist()
            tok.mul_(0)
            out.index_add_(0, tok, expert(x[rows]) * weights[rows, slot, None])
        return out
