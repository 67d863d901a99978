"""Weights that are put together from all ranks when they are read: what is written to them would be lost, so that is an error.

Only where a program runs as it is written, outside of compiled calls: Dynamo would trace this class where a graph takes such a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.errors import ParallelError

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})
_NO_DATA = frozenset({"requires_grad_", "retain_grad", "register_hook"})
_OF_A_LEAF = frozenset({"requires_grad_", "register_post_accumulate_grad_hook"})


class ReadOnly(Tensor):
    """A gathered weight, and whatever shares its memory. Everything else that is computed from it is a plain tensor.

    Attributes:
        moefuse_alone: whether it was read for itself, in no call of a layer.
    """

    moefuse_name = ""
    moefuse_alone = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else next(iter(kwargs.values()), None)
        to_itself = len(args) == 2 and args[0] is args[1]  # as ``parametrize`` sets what it registers
        written = next((t for t in _written(func, target, kwargs) if isinstance(t, cls)), None)
        if written is not None and not to_itself:
            raise ParallelError(
                f"{written.moefuse_name} was written to, and is put together from all ranks each time it is read, so that this would be "
                "lost: write before moefuse.parallelize, to the rows that are here (model.parameters()), or load a state_dict"
            )
        if isinstance(target, cls) and target.moefuse_alone:
            _of_this_read(func, target.moefuse_name)
        with _torch_private.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if isinstance(target, cls) and getattr(func, "__name__", "") == "numpy":
            out.flags.writeable = False
        return _shared(out, target) if isinstance(target, cls) else out


def _written(func: Any, first: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What a call writes to: its first argument, if it is in place, or each tensor of that; and what it is to put its results into."""
    for given in (first if _writes(func) else None, kwargs.get("out")):
        yield from given if isinstance(given, tuple | list) else (given,)


def _of_this_read(func: Any, weight: str) -> None:
    """What is done to a weight as to a Parameter: the next read knows nothing of it, and no call of the layer does."""
    name, field = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    if name in _OF_A_LEAF or (name == "__set__" and field in (torch.Tensor.grad, torch.Tensor.requires_grad)):
        raise ParallelError(
            f"{weight} is put together from all ranks each time it is read, so that this would be lost: take the Parameter itself, with "
            "the rows that are here, from model.named_parameters()"
        )
    if name == "register_hook":
        warnings.warn(
            f"a hook on {weight} is of this read alone, and sees no gradient of what reads it again: put it on the Parameter itself, of "
            "model.named_parameters()",
            stacklevel=5,
        )


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(func, "__self__", None) is torch.Tensor.data
    return name in _WRITES or (name.endswith("_") and not name.endswith("__") and name not in _NO_DATA)


def _shared(out: Any, source: ReadOnly) -> Any:
    """What shares memory with a weight is as little to be written to."""
    if isinstance(out, tuple | list):
        return type(out)(_shared(o, source) for o in out) if type(out) in (tuple, list) else out
    if not isinstance(out, Tensor) or isinstance(out, ReadOnly) or out.is_meta:
        return out
    with _torch_private.DisableTorchFunctionSubclass():
        same = out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() != 0
    return read_only(out, source.moefuse_name, source.moefuse_alone) if same else out


def read_only(weight: Tensor, name: str, alone: bool = False) -> Tensor:
    """A view of ``weight`` that refuses writes; ``name`` stands in the error, ``alone`` is :attr:`ReadOnly.moefuse_alone`."""
    out = weight.as_subclass(ReadOnly)
    out.moefuse_name, out.moefuse_alone = name, alone
    return out
