"""compile, a short form of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from moefuse import backend as _backend

_Model = TypeVar("_Model", bound=Callable[..., Any])


def compile(
    model: _Model,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> _Model:
    """``torch.compile(model, backend="moefuse", ...)``, with the options checked now instead of at the first call.

    Raises:
        OptionError: for an unknown option or an illegal value.
        RuntimeError: torch's own, for an unknown mode, or mode and options together.
    """
    if not callable(model):
        raise TypeError(f"moefuse.compile needs a module or a function, got {type(model).__name__}")
    _backend.parse(mode, options)
    plain: Any = None if options is None else dict(options)
    compiled: Any = torch.compile(model, backend=_backend.backend, mode=mode, options=plain, dynamic=dynamic, fullgraph=fullgraph)
    return cast(_Model, compiled)
