"""Loops over the experts that were hit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, H, Hits, Layer, positive


@positive
class RowsOfNonzero(Layer):
    """transformers 5: rows of shape [1], a sentinel expert, stacked weights."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=E + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for row in hit:
            row = row[0]
            if row == E:
                continue
            slot, tok = torch.where(mask[row])
            y = self.expert(row, x[tok]) * weights[tok, slot, None]
            out.index_add_(0, tok, y.to(out.dtype))
        return out


@positive
class RowsAsLists(Layer):
    """Numbers of tokens and slots as lists, written into the index."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, mask = torch.zeros_like(x), F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        for e in range(E):
            slot, tok = torch.where(mask[e])
            if tok.shape[0] == 0:
                continue
            y = self.expert(e, x[None, tok.tolist()].reshape(-1, H)) * weights[tok.tolist(), slot.tolist(), None]
            out.index_add_(0, tok, y)
        return out


@positive
class ModuleListByRow(Layer):
    """transformers 4.57: ``self.experts[row]`` and ``mask[row].squeeze(0)``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros((x.shape[0], H), dtype=x.dtype, device=x.device)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            expert = self.experts[row]
            slot, tok = torch.where(mask[row].squeeze(0))
            current = x[None, tok].reshape(-1, H)
            out.index_add_(0, tok, expert(current) * weights[tok, slot, None])
        return out


@positive
class NamedListOfHits(Layer):
    """The list has a name before it is looped over."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        present = torch.where(hit)[0].tolist()
        for e in present:
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class SqueezedHits(Layer):
    """Scalars, from ``where``, ``squeeze`` and counts."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        counts = F.one_hot(ids, num_classes=E).sum(dim=(0, 1))
        for e in (counts != 0).nonzero().squeeze(-1):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class ArgwhereSliced(Layer):
    """GPT-OSS: ``hit[:]``, and grad mode switched in the body."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in torch.argwhere(hit)[:]:
            with torch.no_grad():
                slot, tok = torch.where(mask[row[0]])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@positive
class UnusedStatistic(Layer):
    """Something that would not be local to a row, and that nobody reads."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.hits(ids)[1].nonzero():
            tok, slot = torch.where(ids == row)
            rows = self.expert(row[0], x[tok])
            _mean = rows.sum() / rows.shape[0]
            out.index_add_(0, tok, rows * weights[tok, slot, None])
        return out


@positive
class RowsOfOne(Layer):
    """qwen3_vl_moe of transformers 4.57: the row stays a tensor of one element, also beside the tokens in ``table[tokens, row, None]``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        table = torch.zeros_like(logits).scatter_(1, ids, weights)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask, hit = self.hits(ids)
        for row in hit.nonzero()[:]:
            with torch.no_grad():
                _, tok = torch.where(mask[row[0]])
            gate, up = (x[tok] @ self.w_in[row].transpose(1, 2)).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ self.w_out[row].transpose(1, 2)
            out.index_add_(0, tok, y[0] * table[tok, row, None])
        return out


@positive
class FirstExpertsWeight(Hits):
    """The second projection is that of expert 0 for all, as the representative shows that is not expert 0."""

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[0])
