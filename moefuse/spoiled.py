"""Experts whose tokens are written to behind them in a frame around theirs, before the gradients of the call are computed.

The frame that shows the write is refused, and Dynamo then traces the frame of the experts alone, which shows nothing of it. The op would
keep tokens that are written to before backward, where the program keeps the rows that it gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.fx import Node

from moefuse.report import Skipped

_known: dict[int, tuple[weakref.ref[nn.Parameter], Skipped]] = {}
"""By the identity of a parameter of theirs: why the frame around was refused."""


def note(leaves: Iterable[Node], why: Skipped) -> None:
    """A graph was refused, for a write to what these inputs of experts have in their memory."""
    for parameter in _parameters(leaves):
        number = id(parameter)
        _known[number] = (weakref.ref(parameter, lambda _, number=number: _known.pop(number, None)), why)  # type: ignore[misc]


def known(leaves: Iterable[Node]) -> Skipped | None:
    """Why a frame around experts with such inputs was refused, if one was."""
    found = (_known.get(id(parameter)) for parameter in _parameters(leaves)) if _known else ()
    return next((one[1] for one in found if one is not None), None)


def _parameters(leaves: Iterable[Node]) -> Iterator[nn.Parameter]:
    for node in leaves:
        argument = node.meta.get("grapharg") if node.op == "placeholder" else None
        value = None if argument is None else argument.example
        if isinstance(value, nn.Parameter) and not isinstance(value, torch._subclasses.FakeTensor):
            yield value
