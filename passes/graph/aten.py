"""ATen's operators under the names and with the arguments of torch's functions.

Exported programs (torch.export) are made of ``torch.ops.aten.*.default``. Most operators have their function's name and arguments. Here are
those that Python writes otherwise, or not at all: indexing has an operator for each kind of index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moefuse.passes.graph.values import tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _named(names: str, args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """The values of an operator's first arguments, in the order of ``names``."""
    given = defaults | dict(zip(names.split(), args, strict=False)) | kwargs
    return [given[name] for name in names.split()]


def _index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """``index(x, [None, i])`` is ``x[:, i]``."""
    x, indices = _named("input indices", args, kwargs)
    return (x, tuple(slice(None) if i is None else i for i in indices)), {}


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    x, indices, values, accumulate = _named("input indices values accumulate", args, kwargs, accumulate=False)
    return (x, tuple(slice(None) if i is None else i for i in indices), values, accumulate), {}


def _slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """``slice(x, 1, a, b)`` is ``x[:, a:b]``."""
    x, dim, start, end, step = _named("input dim start end step", args, kwargs, dim=0, start=None, end=None, step=1)
    value = tensor(x)
    if value is None or not isinstance(dim, int) or not isinstance(step, int):
        return None
    # The end of a dimension, however long it is.
    end = None if isinstance(end, int) and end == sys.maxsize else end
    before = (slice(None),) * (dim + value.dim() if dim < 0 else dim)
    return (x, (*before, slice(start, end, None if step == 1 else step))), {}


def _empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """``empty_permuted([n], [0])`` is ``empty([n])``; its strides are torch's to know."""
    (size,) = _named("size", args, kwargs)
    return (size,), {}


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """``embedding(x, i)`` is ``F.embedding(i, x)``, where -1 is the last row and not none."""
    given = dict(zip("input indices padding_idx scale_grad_by_freq sparse".split(), args, strict=False)) | kwargs
    table, ids = given.pop("input", given.pop("weight", None)), given.pop("indices")
    return (ids, table), {name: value for name, value in given.items() if (name, value) != ("padding_idx", -1)}


def _attribute(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Arguments | None]:
    """``numpy_T(x)`` is ``x.T``, as Dynamo writes it from torch 2.14 on."""
    return lambda args, kwargs: ((*_named("input", args, kwargs), name), {})


_FORMS: dict[str, tuple[str, Callable[[tuple[Any, ...], dict[str, Any]], Arguments | None]]] = {
    "index": ("getitem", _index),
    "_unsafe_index": ("getitem", _index),
    "index_put": ("index_put", _index_put),
    "_unsafe_index_put": ("index_put", _index_put),
    "slice": ("getitem", _slice),
    "empty_permuted": ("empty", _empty),
    "embedding": ("embedding", _embedding),
    "numpy_T": ("getattr", _attribute("T")),
    "mT": ("getattr", _attribute("mT")),
    "matrix_H": ("getattr", _attribute("H")),
    "mH": ("getattr", _attribute("mH")),
}
"""Operator -> (canonical name, its arguments as that takes them)."""


def as_function(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """An operator of ATen, without underscore if it writes, by the name and with the arguments that rules know."""
    known = _FORMS.get(name)
    found = known[1](args, kwargs) if known is not None else None
    return (name, args, kwargs) if known is None or found is None else (known[0], *found)
