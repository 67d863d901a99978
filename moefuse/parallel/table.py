"""The table that says where each expert is, as a tensor on whatever device it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.runtime import layers


class Table:
    """[E] int32: of each expert its slot, ``rank * L + local``.

    It is no buffer of the model: ``to_empty`` and the loaders of other libraries fill buffers that are in no checkpoint with anything, and
    a wrong table is wrong numbers without a word. Numbers are held here, and tensors of them are made again where one is missing.
    """

    def __init__(self, slots: Sequence[int], layer: str = "", model: int = 1) -> None:
        """``layer`` of the ``model``-th one on its mesh: whose table it is, for ``moefuse/runtime/layers.py``, with a ``note`` on it."""
        self.slots, self.layer, self.model, self.note = tuple(slots), layer, model, ""
        self.tensors: dict[tuple[str, int | None], Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The tensor on a device; one and the same in every call, in compiled code an input that keeps its address."""
        found = self.tensors.get((device.type, device.index))
        if found is None:
            return self._made(device)
        return found

    def ready(self, device: torch.device) -> None:
        """Have the tensor on a device before a program is traced that reads it."""
        if device.type == "meta" or (device.type, device.index) in self.tensors:
            return
        with torch.inference_mode(False):
            made = self._made(device)
        if type(made) is Tensor:  # and not of somebody's mode that records operations
            torch._dynamo.mark_static(made)  # E is no size that changes, whatever the user says of those of tokens
            self.tensors[made.device.type, made.device.index] = _torch_private.static_address(made)
            layers.remember(made, self)

    def move(self, slots: Sequence[int]) -> None:
        """Other slots from now on, in the tensors that there are: a compiled graph reads them in its next call."""
        self.slots = tuple(slots)
        for tensor in self.tensors.values():
            tensor.copy_(torch.tensor(self.slots, dtype=torch.int32))

    def _made(self, device: torch.device) -> Tensor:
        return torch.tensor(self.slots, dtype=torch.int32, device=device)
