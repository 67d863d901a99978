"""A change of a model that happens as a whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from moefuse.diagnosis.undo import Restore, contents


@contextlib.contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Where the block raises, every module of a model has the class, the attributes, the Parameters and the hooks from before.

    What tensors hold is not looked at: the block puts new ones in the place of old ones, and writes to none that was there.
    """
    before = [(module, type(module)) for module in model.modules()]
    dicts = [vars(module) for module, _ in before]
    dicts += [value for attributes in dicts for value in attributes.values() if isinstance(value, dict)]
    restores: list[Restore] = [contents(found) for found in (*dicts, *map(vars, model.parameters()))]
    try:
        yield
    except BaseException:
        for module, kind in before:
            module.__class__ = kind
        for restore in restores:
            restore()
        raise
