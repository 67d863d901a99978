"""What compiled code takes for granted of the results of this project's operations, checked on each while a program runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ALIGNED = 16
"""Bytes, of Inductor."""


class Aligned(TorchDispatchMode):
    """Every result begins at the beginning of its memory, at an aligned address, with the strides that its fake says.

    Attributes:
        seen: names of the operations.
        wrong: one line for each result that does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "moefuse":
            self.seen.add(func._opname)
            found, said = _tensors(out), _tensors(_fake(func, args, kwargs or {}))
            assert len(found) == len(said), func
            self.wrong += [f"{func._opname}[{n}]: {text}" for n, pair in enumerate(zip(found, said, strict=True)) for text in _off(*pair)]
        return out


def _tensors(of: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, Tensor)]


def _fake(func: Any, args: Any, kwargs: Any) -> Any:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = tree_map_only(Tensor, lambda t: mode.from_tensor(t, static_shapes=True), (args, kwargs))
        return func(*fakes[0], **fakes[1])


def _off(real: Tensor, fake: Tensor) -> list[str]:
    found = []
    if real.storage_offset() != fake.storage_offset():
        found.append(f"begins at {real.storage_offset()}, its fake at {fake.storage_offset()}")
    if real.numel() and real.data_ptr() % ALIGNED:
        found.append(f"its address is no multiple of {ALIGNED}")
    sizes = [n if isinstance(n, int) else None for n in fake.shape]
    if any(n not in (None, m) for n, m in zip(sizes, real.shape, strict=True)):
        found.append(f"is {list(real.shape)}, its fake {list(fake.shape)}")
    wanted = fake.stride() if None not in sizes else torch.empty(real.shape, device="meta").stride()
    if real.numel() > 1 and any(a != b for a, b, n in zip(real.stride(), wanted, real.shape, strict=True) if n != 1):
        found.append(f"has strides {real.stride()}, its fake {wanted}")
    return found
