"""Which layer an op runs for: read from the table of experts that it is given.

A graph that several layers share names the one that it was traced for, and which one that is may differ from rank to rank. Each layer has
a table of its own, which is an input of every graph.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor


class OfLayer(Protocol):
    """Whoever holds the table of a layer, for as long as it lives."""

    @property
    def layer(self) -> str: ...
    @property
    def model(self) -> int: ...
    @property
    def note(self) -> str: ...


_at: weakref.WeakValueDictionary[int, OfLayer] = weakref.WeakValueDictionary()


def remember(table: Tensor, holder: OfLayer) -> None:
    """This tensor is a layer's table of experts, and stays where it is."""
    _at[table.data_ptr()] = holder


def layer_of(place: Tensor | None) -> str:
    """The layer whose table this is; empty if it is nobody's. Addresses alone are compared, so nothing waits for a device."""
    holder = None if place is None else _at.get(place.data_ptr())
    return "" if holder is None else holder.layer


def mark_of(place: Tensor | None) -> str:
    """The same in what ranks compare: layers of several models on one mesh may have one name, and the first model needs no number; and what
    else they must have alike."""
    holder = None if place is None else _at.get(place.data_ptr())
    if holder is None:
        return ""
    model = "" if holder.model == 1 else f" (model {holder.model})"
    return f"{holder.layer}{model}{holder.note}".lstrip()
