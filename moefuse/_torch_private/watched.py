"""Every operation that some code comes to, those inside of tensors of classes of their own and of operators that Python implements too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moefuse._torch_private.tensors import made_of_others

OF_TORCH = ("aten", "prims")
"""Namespaces of torch's own operators."""
Seen = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


@contextlib.contextmanager
def inner_operations(seen: Seen) -> Iterator[None]:
    """Call ``seen`` after every one of torch's operations on plain tensors on this thread, in forward and backward passes.

    An operator of a library is run by its kernel with the operations in it seen, and then seen itself.
    """
    with _watch()(seen):
        yield


@functools.cache
def _watch() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self, seen: Seen) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen = seen

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            given = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
            if any(made_of_others(a) is not None for a in given):
                return NotImplemented  # what its class makes of it is seen instead
            out = func(*args, **kwargs) if func.namespace in OF_TORCH or not given else self._opened(func, given[0], args, kwargs)
            self.seen(func, tuple(args), kwargs, out)
            return out

        def _opened(self, func: Any, like: torch.Tensor, args: Any, kwargs: Any) -> Any:
            key = getattr(torch._C.DispatchKey, {"cpu": "CPU", "cuda": "CUDA"}.get(like.device.type, "PrivateUse1"))
            if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                key = torch._C.DispatchKey.CompositeExplicitAutograd
            if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                return func(*args, **kwargs)
            with self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    return Watch


__all__ = ["OF_TORCH", "inner_operations"]
