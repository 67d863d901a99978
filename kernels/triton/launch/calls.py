"""Launches that belong to no plan: those of the grouped tier, of training and of the router. They are bound anew in each call that runs in
Python, which is once for each kind of call (``record.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.launch import Launch, stream_of
from moefuse.kernels.triton.launch.record import as_launch


def launch(
    kernel: Any,
    grid: Sequence[int],
    arrays: Mapping[str, Tensor | Described],
    *,
    warps: int = 4,
    stages: int = 2,
    pdl: bool = False,
    **numbers: Any,
) -> None:
    """Launch on the current stream, arguments by the names of the kernel's parameters; ``pdl``: programmatic dependent launch."""
    named = {name: a._replace(array=name) if isinstance(a, Described) else name for name, a in arrays.items()}
    it = Launch(kernel, grid, named, numbers, num_warps=warps, num_stages=stages, **({"launch_pdl": True} if pdl else {}))
    tensors = [a.array if isinstance(a, Described) else a for a in map(arrays.__getitem__, it.names)]
    as_launch(run, it, tensors)


def run(it: Launch, tensors: Sequence[Tensor]) -> None:
    """Launch on the current stream, with arrays in the order of its names."""
    if it.compiled is None:
        it.first(tensors)
    else:
        it.again(stream_of(tensors[0].device), [t.data_ptr() for t in tensors])


_LAUNCHES: dict[Any, Launch] = {}
"""Of :func:`launch_once`: few, for a kernel is compiled by how many bits its numbers have."""


def launch_once(kernel: Any, pointer: Tensor, numbers: Sequence[int]) -> None:
    """Launch one program with numbers that are new each time, for which the kernel is not specialised."""
    key = (id(kernel), pointer.data_ptr() & 15, *[n >= 1 << 31 for n in numbers], pointer.device)
    known = _LAUNCHES.get(key)
    if known is None:
        known = _LAUNCHES[key] = Launch(kernel, (1,), {name: name for name in kernel.arg_names}, {}, num_warps=1)
    if known.compiled is None:
        known.first((pointer, *numbers))
    else:
        known.again(stream_of(pointer.device), (pointer.data_ptr(), *numbers))


def launch_traced(kernel: Any, grid: Sequence[Any], arrays: Mapping[str, Any], *, warps: int, **numbers: Any) -> None:
    """Put a launch into the graph that is being traced, where Inductor makes it."""
    torch.library.wrap_triton(kernel)[tuple(grid)](**arrays, **numbers, num_warps=warps)
