"""Rows that were promised to be enough for backward, and were not: told as soon as the host can know it without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.errors import TooManyTokens
from moefuse.runtime.groups import Terms


@dataclass
class Pending:
    """How many rows a layer needed, on the host once ``event`` has happened, and how many it kept."""

    layer: str
    needed: Tensor
    kept: int
    bound: object
    event: Any = None


def watch(terms: Terms, layer: str, needed: Tensor, kept: int) -> None:
    """Look at ``needed`` [] later. Nothing is copied while a CUDA graph is recorded: its replays say so by NaN alone."""
    if needed.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    event, host = None, needed.detach().clone()
    if needed.is_cuda:
        host = torch.empty((), dtype=needed.dtype, pin_memory=True).copy_(needed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    terms.group.standing.pending.append(Pending(layer, host, kept, terms.bound, event))


def check(terms: Terms) -> None:
    """Looks at what has come.

    Raises:
        TooManyTokens: a layer needed more rows than it kept.
    """
    pending = terms.group.standing.pending
    done = [p for p in pending if p.event is None or p.event.query()]
    pending[:] = [p for p in pending if p not in done]
    over = next((p for p in done if int(p.needed) > p.kept), None)
    if over is not None:
        raise TooManyTokens(
            f"{int(over.needed)} rows came to the experts of {over.layer} on rank {terms.group.rank}, and bound={over.bound} keeps "
            f"{over.kept} for backward, so that gradients of that call are NaN: give a larger bound, bound='exact', or checkpoint the layer"
        )
