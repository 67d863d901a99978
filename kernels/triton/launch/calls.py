"""Launches that belong to no plan: those of the grouped tier, of training and of the router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.launch import Begin, Launch
from moefuse.kernels.triton.launch.record import as_launch


def launch(
    kernel: Any,
    grid: Sequence[int],
    arrays: Mapping[str, Tensor | Described | Begin],
    *,
    warps: int = 4,
    stages: int = 2,
    pdl: bool = False,
    **numbers: Any,
) -> None:
    """Launch on the current stream, arguments by the names of the kernel's parameters; ``pdl``: programmatic dependent launch."""
    named = {name: name if isinstance(a, Tensor) else a._replace(array=name) for name, a in arrays.items()}
    it = Launch(kernel, grid, named, numbers, num_warps=warps, num_stages=stages, **({"launch_pdl": True} if pdl else {}))
    as_launch(it, [a if isinstance(a, Tensor) else a.array for a in map(arrays.__getitem__, it.names)])


def launch_traced(kernel: Any, grid: Sequence[Any], arrays: Mapping[str, Any], *, warps: int, **numbers: Any) -> None:
    """Put a launch into the graph that is being traced, where Inductor makes it."""
    torch.library.wrap_triton(kernel)[tuple(grid)](**arrays, **numbers, num_warps=warps)
