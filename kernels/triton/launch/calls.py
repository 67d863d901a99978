"""Launches that are made one by one: each is looked up by all that Triton specialises on, and one that was seen before goes straight to its
compiled kernel. The ops of the grouped tier, of training and of the router launch so; ``experts`` has plans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import current_device, raw_stream
from moefuse.kernels.triton.launch.driver_launch import Direct
from moefuse.kernels.triton.launch.launch import Described, Launch, stream_of
from moefuse.ops.call import first_tensor

LAUNCHES: dict[Any, Launch] = {}
_MAX_LAUNCHES = 1 << 14
"""Launches kept; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""


def launch(
    kernel: Any, grid: Sequence[int], arrays: Mapping[str, Tensor | Described], *, warps: int = 4, stages: int = 2, **numbers: Any
) -> None:
    """Launch on the current stream, arguments by the names of the kernel's parameters."""
    tensors: list[Any] = list(arrays.values())
    shown: list[Any] = []
    if Described in map(type, tensors):
        shown = [(i, *a[1:]) for i, a in enumerate(tensors) if type(a) is Described]
        for i, *_ in shown:
            tensors[i] = tensors[i].array
    addresses, device = [t.data_ptr() for t in tensors], tensors[0].get_device()
    kinds = (*[t.dtype for t in tensors], *[a & 15 for a in addresses], device)
    key = (id(kernel), *grid, *arrays, *numbers, *numbers.values(), warps, stages, *shown, *kinds)
    known = LAUNCHES.get(key)
    if known is None:
        if len(LAUNCHES) >= _MAX_LAUNCHES:
            LAUNCHES.clear()
        named = {name: a._replace(array=name) if isinstance(a, Described) else name for name, a in arrays.items()}
        known = LAUNCHES[key] = Launch(kernel, grid, named, numbers, num_warps=warps, num_stages=stages)
    if known.order:
        tensors, addresses = [tensors[i] for i in known.order], [addresses[i] for i in known.order]
    run(known, tensors, addresses, device)


def run(it: Launch, tensors: Sequence[Tensor], addresses: Sequence[int] | None = None, device: int | None = None) -> None:
    """Launch on the current stream, with arrays in the order of its names. Their addresses and device are asked for if not given."""
    if it.compiled is None:
        it.first(tensors)
        return
    stream = raw_stream(tensors[0].get_device() if device is None else device)
    addresses = addresses or [t.data_ptr() for t in tensors]
    if it.driver is None:
        it.driver = _driver(it)
    if not (it.driver and it.driver.run(stream, addresses)):
        it.again(stream, addresses)


def _driver(it: Launch) -> Direct | bool:
    """The launch by the driver's function, or False."""
    try:
        return Direct([it], it.names)
    except NotImplementedError:
        return False


def launch_once(kernel: Any, pointer: Tensor, numbers: Sequence[int]) -> None:
    """Launch one program with numbers that are new each time, for which the kernel is not specialised."""
    key = (id(kernel), pointer.data_ptr() & 15, *[n >= 1 << 31 for n in numbers], pointer.device)
    known = LAUNCHES.get(key)
    if known is None:
        known = LAUNCHES[key] = Launch(kernel, (1,), {name: name for name in kernel.arg_names}, {}, num_warps=1)
    if known.compiled is None:
        known.first((pointer, *numbers))
    else:
        known.again(stream_of(pointer.device), (pointer.data_ptr(), *numbers))


def launch_traced(kernel: Any, grid: Sequence[Any], arrays: Mapping[str, Any], *, warps: int, **numbers: Any) -> None:
    """Put a launch into the graph that is being traced, where Inductor makes it."""
    torch.library.wrap_triton(kernel)[tuple(grid)](**arrays, **numbers, num_warps=warps)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run with the device of the first argument, a tensor, a list of them or a call, as the current one."""

    @functools.wraps(function)
    def wrapper(first: Any, *rest: Any) -> Any:
        device = first_tensor(first).device
        if device.type != "cuda" or device.index == current_device():
            return function(first, *rest)
        with torch.cuda.device(device):
            return function(first, *rest)

    return wrapper
