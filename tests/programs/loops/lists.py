"""Row numbers of each expert in lists that are joined, so that rows are taken at once and split by how long the lists are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.programs.loops.base import E, Layer, near_miss, positive


class Lists(Layer):
    """Rows and weights are taken at once; subclasses list or split otherwise."""

    def lists(self, ids: Tensor) -> list[Tensor]:
        return [torch.where((ids == e).any(-1))[0] for e in range(E)]

    def sizes(self, ids: Tensor, lists: list[Tensor]) -> Sequence[int | Tensor]:
        return [len(t) for t in lists]

    def order(self, lists: list[Tensor]) -> Tensor:
        return torch.cat(lists)

    def weights(self, ids: Tensor, weights: Tensor, lists: list[Tensor]) -> Tensor:
        return torch.cat([(weights * (ids == e)).sum(-1)[t] for e, t in enumerate(lists)])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        lists = self.lists(ids)
        xs = x[self.order(lists)].split(self.sizes(ids, lists))  # type: ignore[arg-type]
        y = torch.cat([self.experts[e](xs[e]) for e in range(E)])
        return torch.zeros_like(x).index_add_(0, torch.cat(lists), y * self.weights(ids, weights, lists)[:, None])


@positive
class ListsOfTokens(Lists):
    """As lists are joined most often."""


@positive
class ListsByCounts(Lists):
    """Numbers of slots beside each other, as Python's numbers, for lists that ``nonzero`` made."""

    def lists(self, ids: Tensor) -> list[Tensor]:
        return [(ids == e).any(-1).nonzero().squeeze(1) for e in range(E)]

    def sizes(self, ids: Tensor, lists: list[Tensor]) -> Sequence[int | Tensor]:
        found: list[int] = torch.stack([(ids == e).sum() for e in range(E)]).tolist()
        return found


@positive
class ListsOfSlots(Layer):
    """Lists of slots beside those of tokens, and weights that are split, too."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        found = [torch.where(ids == e) for e in range(E)]
        token, slot = torch.cat([t for t, _ in found]), torch.cat([k for _, k in found])
        sizes = [t.shape[0] for t, _ in found]
        xs, ws = torch.split(x.index_select(0, token), sizes), weights[token, slot].unsqueeze(-1).split(sizes)
        y = torch.cat([self.experts[e](xs[e]) * ws[e] for e in range(E)])
        return torch.zeros_like(x).index_add(0, token, y)


@positive
class ListsInTurn(Lists):
    """The rows of an expert between two offsets, added where its list says."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        lists = self.lists(ids)
        rows, out, start = x[torch.cat(lists)], torch.zeros_like(x), 0
        for e, t in enumerate(lists):
            if len(t) == 0:
                continue
            y = self.expert(e, rows[start : start + len(t)])
            out.index_add_(0, t, y * (weights * (ids == e)).sum(-1)[t, None])
            start = start + len(t)
        return out


@near_miss
class ListsOfOthers(Lists):
    """Split by how long the lists of other ids are, which come to as many."""

    def sizes(self, ids: Tensor, lists: list[Tensor]) -> Sequence[int | Tensor]:
        return [len(torch.where((E - 1 - ids == e).any(-1))[0]) for e in range(E)]


@near_miss
class ListsTurned(Lists):
    """The first two lengths in the other order."""

    def sizes(self, ids: Tensor, lists: list[Tensor]) -> Sequence[int | Tensor]:
        first, second, *rest = lists
        return [len(second), len(first), *map(len, rest)]


@near_miss
class ListsJoinedBackwards(Lists):
    """The lists are joined in the other order, and split as they stand."""

    def order(self, lists: list[Tensor]) -> Tensor:
        return torch.cat(lists[::-1])


@near_miss
class ListsOfOtherWeights(Lists):
    """The weights are listed in the other order."""

    def weights(self, ids: Tensor, weights: Tensor, lists: list[Tensor]) -> Tensor:
        return super().weights(ids, weights, lists).flip(0)


@near_miss
class ListsTwoTogether(ListsInTurn):
    """The rows of two experts as if they were those of one."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        lists = self.lists(ids)
        rows = x[torch.cat(lists)]
        both = len(lists[0]) + len(lists[1])
        y = torch.cat([self.expert(0, rows[:both]), *(self.expert(e, x[lists[e]]) for e in range(2, E))])
        return torch.zeros_like(x).index_add_(0, torch.cat(lists), y * self.weights(ids, weights, lists)[:, None])


@near_miss
class ListsOfTheOthers(Lists):
    """The tokens that did not choose the expert."""

    def lists(self, ids: Tensor) -> list[Tensor]:
        return [torch.where(~(ids == e).any(-1))[0] for e in range(E)]
