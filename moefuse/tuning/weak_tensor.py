"""A user's tensor, remembered without being kept alive: a weak reference to what owns the memory, and the view of it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeakTensor:
    """A view of a tensor that somebody else keeps alive. ``offset`` is relative to the first element of the owner."""

    owner: weakref.ref[Tensor]
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor | None:
        """The view, without gradients; None if the owner is gone or has become something else (resized, moved, cast)."""
        owner = self.owner()
        if owner is None or owner.dtype != self.dtype or owner.device != self.device:
            return None
        start = owner.storage_offset() + self.offset
        last = start + sum(s * (n - 1) for n, s in zip(self.size, self.stride, strict=True))
        if min(self.size, default=1) == 0 or start < 0 or (last + 1) * owner.element_size() > owner.untyped_storage().nbytes():
            return None
        return owner.detach().as_strided(self.size, self.stride, start)


def weak_view(owner: Tensor, like: Any, root: Any) -> WeakTensor | None:
    """``like`` (a fake view of the fake ``root``) as a view of the real ``owner``; None if it has sizes that are not known,
    or the owner is not a plain tensor."""
    # A subclass may have no memory of its own (DTensor), or other values in it (quantised).
    if type(owner) not in (Tensor, torch.nn.Parameter):
        return None
    numbers = (*like.shape, *like.stride(), like.storage_offset(), root.storage_offset())
    if not all(isinstance(n, int) for n in numbers) or like.dtype != owner.dtype:
        return None
    offset = like.storage_offset() - root.storage_offset()
    return WeakTensor(weakref.ref(owner), owner.dtype, owner.device, tuple(like.shape), tuple(like.stride()), offset)
