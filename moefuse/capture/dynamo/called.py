"""Functions and methods of torch's that the program calls with tensors, by name: what is traced in frames of ours in their place.

Whatever reads a number out of a tensor (``int(t)``, ``range(t)``, an index) calls its ``item``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moefuse.capture.dynamo import fresh_leaves, observed, parametrized, values


def function(original: Any, self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    observer = observed.of(translator.output)
    if observer is None:
        return original(self, translator, args, kwargs)
    call = functools.partial(original, self, translator)
    answer = _FUNCTIONS.get(getattr(self.value, "__name__", ""))
    if answer is not None:
        return answer(observer, translator, call, args, kwargs)
    if observer.makes_leaves and fresh_leaves.asked(self.value, kwargs):
        return fresh_leaves.make(translator.output, functools.partial(call, args), kwargs, args)
    return call(args, kwargs)


def method(original: Any, self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    observer = observed.of(translator.output)
    if observer is None:
        return original(self, translator, name, args, kwargs)
    call = functools.partial(original, self, translator, name)
    answer = _METHODS.get(name)
    if answer is not None:
        return answer(observer, translator, call, self, args, kwargs)
    if observer.makes_leaves and fresh_leaves.asked(name, kwargs):
        return fresh_leaves.make(translator.output, functools.partial(call, args), kwargs, [self, *args])
    return call(args, kwargs)


def _split(observer: observed.Observer, translator: Any, call: Any, args: Any, kwargs: Any) -> Any:
    # ``rows.split(list(counts))``: Python makes numbers of these tensors, and Dynamo breaks the graph.
    if not observer.scalars:
        return call(args, kwargs)
    given = {name: values.with_numbers(translator, value) for name, value in kwargs.items()}
    return call([values.with_numbers(translator, value) for value in args], given)


def _split_method(observer: observed.Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    return _split(observer, translator, call, args, kwargs)


def _count(observer: observed.Observer, translator: Any, call: Any, args: Any, kwargs: Any) -> Any:
    # ``torch.bincount(ids, minlength=E)``, whose length Dynamo does not know.
    ids = [*args, *([kwargs["input"]] if "input" in kwargs else [])]
    named = {key: value for key, value in kwargs.items() if key != "input"}
    known = observer.counted(translator, ids[0], ids[1:], named) if ids else None
    return call(args, kwargs) if known is None else known


def _count_method(observer: observed.Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    known = observer.counted(translator, self, args, kwargs)
    return call(args, kwargs) if known is None else known


def _item(observer: observed.Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    known = observer.read(translator, self) if observer.scalars else None
    if known is not None or not observer.numbers_traced:
        return call(args, kwargs) if known is None else known
    from torch._dynamo import config

    with config.patch(capture_scalar_outputs=True):
        return call(args, kwargs)


def _tolist(observer: observed.Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    known = observer.rows(translator, self)
    if known is None:
        observer.read(translator, self)
    return call(args, kwargs) if known is None else known


def _requires_grad(observer: observed.Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    turned = observer.makes_leaves and fresh_leaves.told(args, kwargs) and fresh_leaves.turn(translator.output, self)
    return self if turned else call(args, kwargs)


def _hook(observer: observed.Observer, translator: Any, call: Any, self: Any, args: Any, kwargs: Any) -> Any:
    # One on a value that the graph computes is an operation of the graph.
    if self.source is not None and not parametrized.answering(translator.output):
        observer.mutated(self)
    return call(args, kwargs)


_FUNCTIONS: dict[str, Callable[..., Any]] = {"split": _split, "split_with_sizes": _split, "bincount": _count}
_METHODS: dict[str, Callable[..., Any]] = {
    "split": _split_method,
    "split_with_sizes": _split_method,
    "bincount": _count_method,
    "item": _item,
    "tolist": _tolist,
    "requires_grad_": _requires_grad,
    "register_hook": _hook,
    "register_post_accumulate_grad_hook": _hook,
}


def unpacked(original: Any, self: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    observer = observed.of(translator.output)
    known = observer.numbers(translator, self) if observer is not None and not args and not kwargs else None
    return original(self, translator, *args, **kwargs) if known is None else known
