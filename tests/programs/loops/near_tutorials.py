"""One statement away from the loops of tutorials.py: what they compute is something else, and stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import E, H, K, Layer, near_miss
from tests.programs.loops.tutorials import _Outputs, _Sorted


@near_miss
class FirstSlotForAll(Layer):
    """The weight of slot 0 for the experts of all slots."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for k in range(K):
            wk = weights[:, 0:1]
            for e in range(E):
                mask = ids[:, k] == e
                out[mask] += wk[mask] * self.expert(e, x[mask])
        return out


@near_miss
class ListsInOtherOrder(Layer):
    """Tokens joined in another order than outputs."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        outputs, tokens = [], []
        for e in range(E):
            tok, slot = torch.where(ids == e)
            outputs.append(self.expert(e, x[tok]) * weights[tok, slot, None])
            tokens.insert(0, tok)
        return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(outputs))


@near_miss
class ListsDetached(Layer):
    """What is joined lets no gradient through."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        outputs, tokens = [], []
        for e in range(E):
            tok, slot = torch.where(ids == e)
            outputs.append(self.expert(e, x[tok]) * weights[tok, slot, None])
            tokens.append(tok)
        return x + torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(outputs).detach())


@near_miss
class ListsOfOneExpertTwice(Layer):
    """The rows of the first expert stand in the lists twice."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        outputs, tokens = [], []
        for e in (0, *range(E)):
            tok, slot = torch.where(ids == e)
            outputs.append(self.expert(e, x[tok]) * weights[tok, slot, None])
            tokens.append(tok)
        return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(outputs))


@near_miss
class OutputsTwice(_Outputs):
    """One of the outputs is added once more."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        found = self.outputs(x, logits)
        return torch.stack([*found, found[0]]).sum(0)


@near_miss
class TokensByBatch(Layer):
    """``x[t, b]`` where ids are [b, t]: as many sequences as tokens."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(torch.stack((logits[:2], logits[2:4])))  # [2, 2, K]
        rows = torch.stack((x[:2], x[2:4]))
        out = torch.zeros_like(rows)
        for e in range(E):
            b, t, k = torch.where(ids == e)
            out[b, t] += self.expert(e, rows[t, b]) * weights[b, t, k, None]
        return out.flatten(0, 1)


@near_miss
class ValidUntilWritten(Layer):
    """Who is valid changes from expert to expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        valid = x[:, 0] > -0.5
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where((ids == e) & valid[:, None])
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
            valid.logical_not_()
        return out


@near_miss
class ValidPerExpert(Layer):
    """Another condition for each expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            valid = x[:, e] > -0.5
            tok, slot = torch.where((ids == e) & valid[:, None])
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class NumberOfAnother(Layer):
    """The number of the expert before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(E) + 0.5)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * (1 + self.scale[0] * tok.sum()) * weights[tok, slot, None])
        return out


@near_miss
class AllButOneSlot(_Sorted):
    """The last of the sorted rows is left out, and a zero stands in its place."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        counts, order = self.counts(ids), torch.argsort(ids.flatten(), stable=True)
        index = (order // K).reshape(-1, 1).expand(-1, H)
        rows = torch.gather(x, 0, index)
        pieces = torch.split(rows[: sum(counts)], counts, dim=0)
        y = torch.cat([self.expert(e, piece) for e, piece in enumerate(pieces)], dim=0)
        y = torch.vstack((y[:-1], y.new_zeros((1, y.shape[-1]))))
        return torch.zeros_like(x).scatter_add(0, index, y * weights.flatten()[order].reshape(-1, 1))
