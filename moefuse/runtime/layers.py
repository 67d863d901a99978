"""Which layer an op runs for: read from the table of experts that it is given.

A graph that several layers share names the one that it was traced for, and which one that is may differ from rank to rank. The table is a
buffer of each layer and an input of every graph.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn

_layers: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
_at: dict[int, weakref.ref[nn.Module]] = {}


def remember(module: nn.Module, buffer: str, layer: str) -> None:
    """The table of a layer's experts is this buffer of a module, wherever it is moved to."""
    _layers[module] = buffer, layer


def layer_of(place: Tensor | None) -> str:
    """The layer whose table this is; empty if it is nobody's. Addresses alone are compared, so nothing waits for a device."""
    if place is None:
        return ""
    address = place.data_ptr()
    found = _named(address)
    if not found and _layers:
        _at.clear()
        _at.update({table.data_ptr(): weakref.ref(module) for module in _layers if (table := _table(module)) is not None})
        found = _named(address)
    return found


def _named(address: int) -> str:
    module = _at[address]() if address in _at else None
    table = None if module is None else _table(module)
    return _layers[module][1] if module is not None and table is not None and table.data_ptr() == address else ""


def _table(module: nn.Module) -> Tensor | None:
    return module._buffers.get(_layers[module][0])
