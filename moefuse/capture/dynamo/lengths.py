"""How many places a mask without elements has, and how many rows a slice of nothing: sizes that are not known, as with tokens.

Torch knows that the first is zero. A program that asks (``if t.numel() == 0: continue``) then has no experts in its graph, and would not
take part in the calls that other ranks' graphs make. For a slice whose bounds depend on data torch makes a size, finds it to be zero, and
calls that an error of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moefuse.capture.dynamo import hooks, points
from moefuse.passes.graph import symbols

_MEMOS = {"nonzero": "nonzero_memo", "_unique2": "unique_memo", "_unique": "unique_memo"}
"""Operation -> the attribute of a fake argument with the length that it gave before."""


def keep_open() -> None:
    """From now on, for frames of moefuse's own backend whose sizes may depend on data; nothing with a torch that keeps them elsewhere."""
    if not points.has("lengths"):
        return
    from torch._subclasses.fake_impls import op_implementations_dict

    aten = torch.ops.aten
    makers: dict[Any, Callable[..., Any]] = {
        getattr(aten, name).default: functools.partial(_open, memo=memo) for name, memo in _MEMOS.items()
    }
    for op, maker in {**makers, aten.slice.Tensor: _open_slice}.items():
        known = op_implementations_dict.get(op)
        if known is not None and not hasattr(known, "moefuse"):
            op_implementations_dict[op] = maker(known)


def _open(original: Callable[..., Any], memo: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def fake(mode: Any, func: Any, arg: Any, *args: Any, **named: Any) -> Any:
        if _none(arg) and _wanted(mode) and getattr(arg, memo, 0) is None:
            setattr(arg, memo, _some(mode.shape_env))
        return original(mode, func, arg, *args, **named)

    fake.moefuse = True  # type: ignore[attr-defined]
    return fake


def _open_slice(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fake(mode: Any, func: Any, arg: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        if (
            _zero(arg.shape[dim])
            and _wanted(mode)
            and any(isinstance(bound, torch.SymInt) and symbols.unbacked(bound) for bound in (start, end))
        ):
            sizes: list[Any] = list(arg.shape)
            known = _between(0 if start is None else start, end) if step == 1 else None
            sizes[dim] = _some(mode.shape_env) if known is None else known
            return arg.as_strided(sizes, arg.stride())
        return original(mode, func, arg, dim, start, end, step)

    fake.moefuse = True  # type: ignore[attr-defined]
    return fake


def _between(start: Any, end: Any) -> Any:
    """How long a slice is by its bounds, the same for each that has them; None where they may count from the end, or cross."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    known = end is not None and all(statically_known_true(number >= 0) for number in (start, end, end - start))
    return end - start if known else None


def _none(arg: torch.Tensor) -> bool:
    return any(map(_zero, arg.shape))


def _zero(size: Any) -> bool:
    """Without asking a symbol, which would be a guard."""
    return isinstance(size, int) and size == 0


def _wanted(mode: Any) -> bool:
    observer = hooks.current()
    return observer is not None and observer.scalars and mode.shape_env is not None and mode.shape_env.allow_dynamic_output_shape_ops


def _some(environment: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    size = environment.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size
