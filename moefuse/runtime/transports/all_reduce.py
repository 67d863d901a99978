"""Every rank has the same tokens: nothing travels to the experts, and one all-reduce adds what they computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moefuse.runtime.collectives import all_reduce
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports.base import Dispatched, scaled


class _AllReduce:
    def arrivals(self, terms: Terms, tokens: int) -> int:
        return tokens

    def handle(self, terms: Terms, ids: Tensor) -> list[Tensor]:
        return []

    def dispatch(self, terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
        return Dispatched(self.send(terms, rows, (), ids.shape[0]), ids, [])

    def refuse(self, terms: Terms, ids: Tensor) -> None:
        return

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float = 1.0) -> list[Tensor]:
        rows = scaled(rows, scale)
        return [mine.clone() for mine in rows]

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float = 1.0) -> list[Tensor]:
        out = []
        for part in rows:
            total = part.contiguous().clone()
            all_reduce(total, terms.group.process_group)
            out.append(total)
        return list(scaled(out, scale))


TRANSPORT = _AllReduce()
