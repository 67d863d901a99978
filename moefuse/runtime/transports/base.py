"""What a transport is, and the exchange of numbers on the host that all of them share.

T rows of this rank, P ranks, M the most rows of any rank. What arrives has R = P * M rows: those of rank r are at r * M, and behind its own
T come rows of padding, which no expert reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moefuse.errors import TooManyTokens
from moefuse.runtime.collectives import all_gather
from moefuse.runtime.groups import Terms
from moefuse.runtime.peers import told


@dataclass(frozen=True)
class Dispatched:
    """What arrived: ``rows`` [R, F] each, ``ids`` [R, K] of all experts, or ``local``; and a ``handle`` for the way back and gradients.

    A handle is tensors, as many for every call of a transport, so that it may be saved and computed again like anything else.
    """

    rows: list[Tensor]
    ids: Tensor
    handle: list[Tensor]
    local: bool = False


class Transport(Protocol):
    """Functions of one way for rows to travel."""

    def arrivals(self, terms: Terms, tokens: int) -> int:
        """R for T = ``tokens``, where no exchange is needed to know it; else -1."""

    def handle(self, terms: Terms, ids: Tensor) -> list[Tensor]:
        """Tensors like those of a handle for ids [T, K], for tracing: shapes, dtypes and devices."""

    def dispatch(self, terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
        """Rows [T, F] each and ids [T, K] to those of all ranks that this one needs; what is no rank's row has id -1."""

    def refuse(self, terms: Terms, ids: Tensor) -> None:
        """Tell the others, in place of a dispatch of such ids, that this rank has raised; nothing where none of them waits on the host."""

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float = 1.0) -> list[Tensor]:
        """[T, F] each times ``scale``, to [R, F], as the dispatch with this handle sent them; zeros where no row is."""

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float = 1.0) -> list[Tensor]:
        """[R, F] each, partial sums for every rank's rows, to [T, F]: the sum over ranks, in their order, rounded once, times ``scale``."""


def scaled(rows: Sequence[Tensor], scale: float) -> Sequence[Tensor]:
    """Other tensors, but for a scale of one."""
    return rows if scale == 1 else [r * scale for r in rows]


def most_tokens(terms: Terms, tokens: int) -> int:
    """M: the most tokens of any rank.

    Raises:
        TooManyTokens: this rank has more than ``max_tokens``.
    """
    if terms.most == "equal":
        return tokens
    if isinstance(terms.most, int):
        check_tokens(terms, tokens)
        return terms.most
    return max(told(terms, tokens))


def exchanged(group: Any, size: int, number: int) -> list[int]:
    """[P]: what each rank says; on the host, by a group that takes CPU tensors. Of a fake group all say the same."""
    every = torch.full((size,), number, dtype=torch.int64, device="cpu")
    all_gather(every, torch.tensor([number], dtype=torch.int64, device="cpu"), group)
    found: list[int] = every.tolist()
    return found


def known_arrivals(terms: Terms, tokens: int) -> int:
    """P * M, where no exchange is needed to know it; else -1."""
    if terms.most == "any":
        return -1
    return terms.group.size * (tokens if terms.most == "equal" else int(terms.most))


def check_tokens(terms: Terms, tokens: int) -> None:
    """Raises :class:`TooManyTokens` where this rank has more than ``max_tokens``."""
    if isinstance(terms.most, int) and tokens > terms.most:
        raise TooManyTokens(f"rank {terms.group.rank} has {tokens} tokens, and max_tokens={terms.most} was promised")
