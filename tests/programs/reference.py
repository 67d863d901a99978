"""The meaning of every positive program: one routed slot at a time, in the precision of its inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.routing import Routed
from tests.programs.store import ExpertStore


def expert(store: ExpertStore, e: int, row: Tensor) -> Tensor:
    """Expert ``e`` on one row [H]."""
    return store.bodies[e](lambda name, h: F.linear(h, *store.leaf(name, e)), lambda name: store.vector(name, e), row)


def mix(store: ExpertStore, x: Tensor, routed: Routed, weight_on: str = "output") -> Tensor:
    """sum over k of weights[t, k] * expert(ids[t, k])(x[t])."""
    ids, weights = routed.ids.reshape(x.shape[0], -1), routed.weights.reshape(x.shape[0], -1).to(x.dtype)
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for k in range(ids.shape[1]):
            e, w = int(ids[t, k]), weights[t, k]
            total = total + (w * expert(store, e, x[t]) if weight_on == "output" else expert(store, e, w * x[t]))
        rows.append(total)
    return torch.stack(rows)
