"""The regions that this process has fused, for :func:`moefuse.warmup` to find again. No tensor is kept alive by them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.spec import ExpertsSpec
from moefuse.tuning.problem import Problem
from moefuse.tuning.weak_tensor import WeakTensor

MAX_SITES = 4096
"""Regions remembered; the oldest go first."""
DEVICES = {"cuda"}
"""Device types with something to tune."""


@dataclass(frozen=True, eq=False)
class Site:
    """One fused region.

    Attributes:
        module, location: as in the report.
        spec: as in the report.
        problem: of the call as it was compiled (its hint where the number of tokens is symbolic).
        out_dtype: dtype of the result.
        biases: whether w_in, w_up, w_out have one.
        device: where it runs.
        lists: the operands w_in, w_up, w_out, b_in, b_up, b_out; None where the graph computes one.
        sources: the user's tensors that the operands are, or are computed from.
        program: the region before and after (:class:`moefuse.passes.lower.program.Program`), or why there is none to run.
        trained: gradients were wanted, so the forward op alone does not run.
    """

    module: str
    location: str
    spec: ExpertsSpec
    problem: Problem
    out_dtype: torch.dtype
    biases: tuple[bool, bool, bool]
    device: torch.device
    lists: tuple[tuple[WeakTensor, ...], ...] | None
    sources: tuple[weakref.ref[Tensor], ...]
    program: Any
    trained: bool = False

    def owners(self) -> set[int]:
        """``id`` of each of its sources that is still there."""
        return {id(source) for ref in self.sources if (source := ref()) is not None}

    def tensors(self) -> tuple[list[Tensor], ...] | None:
        """The operands as they are now; None if one is not there any more."""
        found = [[weak.tensor() for weak in part] for part in self.lists or ()]
        if self.lists is None or any(t is None for part in found for t in part):
            return None
        return tuple(found)  # type: ignore[arg-type]


programs: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
"""The programs of the regions, each once for all layers that are equal: a graph of many experts is large."""

_sites: list[Site] = []
_lock = threading.Lock()


def remember(site: Site) -> None:
    """Note a region that was just fused."""
    with _lock:
        # A recompilation for the same tokens and weights says the same again.
        mine = site.owners()
        kept = [s for s in _sites if (s.module, s.location, s.problem) != (site.module, site.location, site.problem) or s.owners() != mine]
        _sites[:] = [*kept, site][-MAX_SITES:]


def of(tensors: Collection[Tensor] | None) -> list[Site]:
    """The regions that read some of these tensors; all of which something is left, for None."""
    wanted = None if tensors is None else {id(t) for t in tensors}
    with _lock:
        found = list(_sites)
    return [s for s in found if (s.owners() if wanted is None else s.owners() & wanted)]


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """What is fused in this block is not remembered behind it."""
    with _lock:
        before = list(_sites)
    try:
        yield
    finally:
        with _lock:
            _sites[:] = before


def clear() -> None:
    """Forget everything."""
    with _lock:
        _sites.clear()
