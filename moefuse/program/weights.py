"""The weights that a module's code reads, where the module holds parts of them, or another one does: experts on several ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

READ = "_moefuse_weights_read"
"""Of the class of such a module, a method that gives them by attribute; None for a Parameter that is no weight of this module's code."""

Weight = tuple[Tensor, tuple[int, ...]]
"""The Parameter that a weight comes from, and the shape in which the code reads it."""


def weights_read(module: nn.Module) -> Mapping[str, Weight | None]:
    """What the code of a module reads in the place of its own Parameters, or besides them; empty for nearly all."""
    read = getattr(type(module), READ, None)
    return {} if read is None else read(module)
