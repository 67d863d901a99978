"""Loops of tutorials: one slot by a slice, columns of a table of gates, lists that are joined, masks of padding, whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.programs.loops.base import E, H, K, Layer, positive


@positive
class SlotBySlice(Layer):
    """``w[:, k:k + 1]`` and ``wk[mask]``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for k in range(K):
            chosen, wk = ids[:, k], weights[:, k : k + 1]
            for e in range(E):
                mask = chosen == e
                out[mask] += wk[mask] * self.expert(e, x[mask])
        return out


@positive
class MaskAndSlot(Layer):
    """``w[mask, k:k + 1]`` in one slot, ``w[mask, k, None]`` in the other, behind ``if mask.any()``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for k in range(K):
            for e, expert in enumerate(self.experts):
                mask = ids[:, k] == e
                if mask.any():
                    gate = weights[mask, k : k + 1] if k == 0 else weights[mask, k, None]
                    out[mask] += gate * expert(x[mask])
        return out


class Gated(Layer):
    """A table of gates [T, E]; some weights are zero, some below."""

    def gates(self, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        return torch.zeros_like(logits).scatter(1, ids, weights - 0.4 * (weights < 0.6))


@positive
class ColumnAboveZero(Gated):
    """``gates[:, e] > 0``, where a chosen expert may have a gate below zero."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        gates, out = self.gates(logits), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = gates[:, e] > 0
            out[mask] += gates[mask, e].unsqueeze(-1) * expert(x[mask])
        return out


@positive
class ColumnNonzero(Gated):
    """``gates[:, e].nonzero().squeeze(-1)``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        gates, out = self.gates(logits), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = gates[:, e].nonzero().squeeze(-1)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, gates[tok, e, None] * expert(x[tok]))
        return out


@positive
class ListsAdded(Layer):
    """Outputs and tokens in lists, joined and added in one go."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        outputs, tokens = [], []
        for e in range(E):
            tok, slot = torch.where(ids == e)
            outputs.append(self.expert(e, x[tok]) * weights[tok, slot, None])
            tokens.append(tok)
        return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(outputs))


@positive
class ListsScattered(Layer):
    """As above, weighted behind the lists, for experts that have tokens."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        outputs, tokens, gates = [], [], []
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            outputs.append(expert(x[tok]))
            tokens.append(tok)
            gates.append(weights[tok, slot])
        index = torch.cat(tokens).unsqueeze(-1).expand(-1, H)
        return torch.zeros_like(x).scatter_add(0, index, torch.cat(outputs) * torch.cat(gates)[:, None])


@positive
class BatchedWhere(Layer):
    """``b, t, k = torch.where(ids == e)`` of ids [B, T, K]."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits[None])
        rows = x[None]
        out = torch.zeros_like(rows)
        for e in range(E):
            b, t, k = torch.where(ids == e)
            if e % 2:
                out[b, t] += self.expert(e, rows[b, t]) * weights[b, t, k, None]
            else:
                out.index_put_((b, t), self.expert(e, rows[b, t]) * weights[b, t, k].unsqueeze(-1), accumulate=True)
        return out[0]


@positive
class NumberPerExpert(Layer):
    """One learned number for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(E) + 0.5)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * self.scale[e] * weights[tok, slot, None])
        return out


@positive
class Padding(Layer):
    """``(ids == e) & valid[:, None]``: tokens of padding have no expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        valid = x[:, 0] > -0.5
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where((ids == e) & valid[:, None])
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class PaddedSlots(Layer):
    """A condition on each slot, in front of the mask, behind ``if``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        heavy = weights > 0.4
        for e, expert in enumerate(self.experts):
            mask = torch.logical_and(heavy, ids == e)
            if mask.any():
                tok, slot = torch.where(mask)
                out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


class _Outputs(Layer):
    def outputs(self, x: Tensor, logits: Tensor) -> list[Tensor]:
        ids, weights = self.route(logits)
        found = []
        for e in range(E):
            tok, slot = torch.where(ids == e)
            found.append(torch.zeros_like(x).index_add(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None]))
        return found


@positive
class PythonSum(_Outputs):
    """``sum(outs)``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return sum(self.outputs(x, logits))  # type: ignore[return-value]


@positive
class StackedSum(_Outputs):
    """``torch.stack(outs).sum(0)``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return torch.stack(self.outputs(x, logits)).sum(0)


@positive
class Sequences(Layer):
    """Ids of a whole sequence: ``x[b]`` is [rows, S, H]."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        pairs = torch.stack((x, x.flip(-1)), 1)  # [B, 2, H]
        out = torch.zeros_like(pairs)
        for e, expert in enumerate(self.experts):
            b, slot = torch.where(ids == e)
            out.index_add_(0, b, expert(pairs[b]) * weights[b, slot, None, None])
        return out.sum(1)


@positive
class NumbersByMask(Layer):
    """``arange(T)[mask]``, ``arange(T).masked_select(mask)``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        numbers, out = torch.arange(x.shape[0]), torch.zeros_like(x)
        for e in range(E):
            mask = (ids == e).any(-1)
            gate = (weights * (ids == e)).sum(-1)
            tok = numbers[mask] if e % 2 else numbers.masked_select(mask)
            out.index_add_(0, tok, self.expert(e, x[tok]) * gate[tok, None])
        return out


class _Sorted(Layer):
    def counts(self, ids: Tensor) -> list[int]:
        return torch.histc(ids.flatten().float(), bins=E, min=0, max=E).int().tolist()  # type: ignore[no-any-return]


@positive
class Torchtitan(_Sorted):
    """torchtitan's loop: histc up to E, all sorted rows by the sum of the counts, padding of no rows."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        counts, order = self.counts(ids), torch.argsort(ids.flatten(), stable=True)
        index = (order // K).reshape(-1, 1).expand(-1, H)
        rows = torch.gather(x, 0, index)
        padding = rows.shape[0] - sum(counts)
        pieces = torch.split(rows[: sum(counts)], split_size_or_sections=counts, dim=0)
        y = torch.cat([self.expert(e, piece) for e, piece in enumerate(pieces)], dim=0)
        y = torch.vstack((y, y.new_zeros((padding, y.shape[-1]))))
        return torch.zeros_like(x).scatter_add(0, index, y * weights.flatten()[order].reshape(-1, 1))


@positive
class BoundsBySearch(Layer):
    """Where each expert's slots begin, by ``searchsorted`` from the left."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        known, order = ids.flatten().sort()
        bounds = torch.searchsorted(known, torch.arange(E + 1)).tolist()
        out = torch.zeros_like(x)
        for e in range(E):
            start, stop = bounds[e], bounds[e + 1]
            if start == stop:
                continue
            slots = order[start:stop]
            tok = slots // K
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights.flatten()[slots, None])
        return out
