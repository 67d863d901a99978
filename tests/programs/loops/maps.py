"""Rows listed by a map [E, T] of who was chosen, expert by expert, and cut by counts that are taken in one way or another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, Layer, near_miss, positive


class Mapped(Layer):
    """The pieces are split off, and joined again; subclasses list or count otherwise."""

    def listed(self, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        expert, token = torch.where(chosen.T)
        return token, gates[token, expert]

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        found: list[int] = chosen.sum(0).tolist()
        return found

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        gates = torch.zeros_like(logits).scatter(1, ids, weights)
        chosen = F.one_hot(ids, E).sum(1).bool()
        token, weight = self.listed(chosen, gates)
        pieces = x[token].split(self.counts(ids, chosen, gates))  # type: ignore[arg-type]
        y = torch.cat([self.expert(e, piece) for e, piece in enumerate(pieces)])
        return torch.zeros_like(x).index_add_(0, token, y * weight[:, None])


@positive
class MapByWhere(Mapped):
    """Expert and token of every entry."""


@positive
class MapByMask(Mapped):
    """Numbers of tokens, and gates, picked by the map."""

    def listed(self, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(chosen)).expand(E, -1)[chosen.T], torch.masked_select(gates.T, chosen.T)


@positive
class MapAsMatrix(Mapped):
    """The entries as a matrix of two columns, of gates that are not zero."""

    def listed(self, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        both = gates.t().nonzero()
        return both[:, 1], gates[both[:, 1], both[:, 0]]

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        found: list[int] = gates.count_nonzero(dim=0).tolist()
        return found


@positive
class MapOfSigned(MapAsMatrix):
    """Weights below zero are not zero."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits)
        return ids, weights - 0.45


@positive
class CountsAsTensors(Mapped):
    """Python makes numbers of a list of tensors."""

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        return list(chosen.sum(0))


@positive
class CountsByLength(Mapped):
    """How long lists are that other masks make."""

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        return [len(torch.where(ids == e)[0]) for e in range(E)]


class CountedByItself(Mapped):
    """How often the map lists each expert; subclasses list others."""

    def which(self, ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen.T)[0]

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        found: list[int] = torch.bincount(self.which(ids, chosen), minlength=E).tolist()
        return found


@positive
class CountsOfTheMap(CountedByItself):
    """Its own."""


@positive
class CountsOfTheMatrix(CountedByItself):
    """A column of the places of the entries."""

    def which(self, ids: Tensor, chosen: Tensor) -> Tensor:
        return chosen.transpose(0, 1).nonzero()[:, 0]


@near_miss
class CountsOfTheComplement(CountedByItself):
    """Who was not chosen; with two of four experts that is as many."""

    def which(self, ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(~chosen.T)[0]


@near_miss
class CountsOfTokens(CountedByItself):
    """Token by token: the numbers of tokens, of which there may be more than experts."""

    def which(self, ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen)[0] % E


@near_miss
class CountsOfAnotherK(CountedByItself):
    """The best expert of each token, twice."""

    def which(self, ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(F.one_hot(ids[:, 0], E).bool().T)[0].repeat(2)


@near_miss
class CountsOfAnotherMap(CountedByItself):
    """The map of other ids."""

    def which(self, ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen.roll(1, 1).T)[0]


@positive
class BoundsThatStayTensors(Mapped):
    """The map is gone through piece by piece, and the bounds are compared as tensors."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        gates = torch.zeros_like(logits).scatter(1, ids, weights)
        chosen = torch.zeros_like(logits).scatter(1, ids, True).bool().T
        token = torch.masked_select(torch.arange(len(x)).expand(E, -1), chosen)
        ends, rows, parts = chosen.sum(1).cumsum(0), x.index_select(0, token), []
        for e in range(E):
            start = 0 if e == 0 else ends[e - 1]
            if start == ends[e]:
                continue
            parts.append(self.expert(e, rows[start : ends[e]]))  # type: ignore[misc]
        y = torch.cat(parts) * torch.masked_select(gates.T, chosen).unsqueeze(-1)
        return torch.zeros_like(x).scatter_add_(0, token.unsqueeze(-1).expand(-1, x.shape[1]), y)


@near_miss
class MapByToken(Mapped):
    """Token by token, cut as if it was expert by expert."""

    def listed(self, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        token, expert = torch.where(chosen)
        return token, gates[token, expert]


@near_miss
class CountsOfOthers(Mapped):
    """The counts of other ids, which come to as many."""

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        return [len(torch.where(E - 1 - ids == e)[0]) for e in range(E)]


@near_miss
class CountsTurned(Mapped):
    """The right counts, of one expert before the other."""

    def counts(self, ids: Tensor, chosen: Tensor, gates: Tensor) -> Sequence[int | Tensor]:
        return list(chosen.sum(0).flip(0))


@near_miss
class GatesOfOthers(Mapped):
    """The gate that the token gives the next expert."""

    def listed(self, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        expert, token = torch.where(chosen.T)
        return token, gates.roll(1, 1)[token, expert]
